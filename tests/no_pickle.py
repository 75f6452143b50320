"""Pickle that serves everybody but the library. Loading a checkpoint must run no code of it, so nothing in the package
may unpickle, not even through torch (`torch.load`, collectives of objects), and nothing may pickle but `bcp convert`,
where a user names a format that is made of pickles. Tests and the frameworks that they use may: what counts is who
asked, which the stack tells.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARY = (f"{ROOT / 'bytecheckpoint'}/", f"{ROOT / 'tools'}/")
OTHERS = (
    *(f"{ROOT / name}/" for name in ("tests", "benchmarks", "examples")),
    *(f"/site-packages/{name}/" for name in ("deepspeed", "megatron", "transformer_engine", "lightning")),
    *(f"/site-packages/{name}/" for name in ("torch/utils/data", "torchdata", "transformers")),
)
"""Whose own business it is, also where the library called them: a test's object, a framework's module, batches that a
data loader's own workers send."""
WRITERS = frozenset(str(ROOT / "bytecheckpoint" / "conversion" / name) for name in ("torch_save.py", "dcp.py"))
"""What of the library writes files of torch."""
WRITING = {"pickle.dump", "pickle.dumps", "pickle.Pickler", "torch.save"}
FUNCTIONS = ("load", "loads", "dump", "dumps")
CLASSES = ("Pickler", "Unpickler")
COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)

uses: list[str] = []
"""By the library, so far. An error can be caught on its way."""


class PickleUsedError(BaseException):
    """The library has pickled or unpickled something."""


def install() -> None:
    """Once in a process. Children that are forked from it have it as well."""
    import torch
    import torch.distributed
    from torch.distributed import distributed_c10d

    if getattr(pickle.loads, "is_guarded", False):
        return
    for name in FUNCTIONS:
        _guard(pickle, name)
    for name in CLASSES:
        guarded = _guarded_class(getattr(pickle, name))
        setattr(pickle, name, guarded)
        setattr(distributed_c10d, f"_{name.lower()}", guarded)
    for name in ("load", "save"):
        _guard(torch, name)
    for name in COLLECTIVES:
        for module in (torch.distributed, distributed_c10d):
            _guard(module, name)
    # What somebody took hold of before this ran still tells when it is about to look up a global.
    sys.addaudithook(_on_event)


def _guard(module: ModuleType, name: str) -> None:
    setattr(module, name, _guarded(getattr(module, name), f"{module.__name__}.{name}"))


def _guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _refuse_library(name)
        return function(*args, **kwargs)

    guarded.is_guarded = True  # type: ignore[attr-defined]
    return guarded


def _guarded_class(cls: type) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_library(f"pickle.{cls.__name__}")
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(cls.__name__, (cls,), {"__init__": init, "__module__": cls.__module__})


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        _refuse_library(f"an unpickler, for {args[0]}.{args[1]}")


def _refuse_library(what: str) -> None:
    found = _frame_of_library(sys._getframe(2))
    if found is None or (what in WRITING and found.f_code.co_filename in WRITERS):
        return
    uses.append(f"{what} at {found.f_code.co_filename}:{found.f_lineno}")
    raise PickleUsedError(uses[-1])


def _frame_of_library(frame: FrameType | None) -> FrameType | None:
    """Where in the library this was asked for; None where somebody else asked."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and any(part in file for part in OTHERS):
            return None
        if file.startswith(LIBRARY):
            return frame
        frame = frame.f_back
    return None
