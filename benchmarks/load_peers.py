"""How torchsnapshot and the open-source ByteCheckpoint load in benchmarks/load.py. Runs in an environment of their own,
like save_peers.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from load_contender import Contender, Place
from load_states import Held


def contestants() -> dict[str, Contender]:
    return {
        "torchsnapshot": Contender(snapshot_save, snapshot_load),
        "oss": Contender(oss_save, oss_load(is_fast=False)),
        "oss-fast": Contender(oss_save, oss_load(is_fast=True)),
    }


def snapshot_save(folder: Path, held: Held) -> None:
    from torchsnapshot import Snapshot  # noqa: PLC0415  may be missing: that is the error of this contestant alone

    Snapshot.take(str(folder), snapshot_state(held), replicated=["**"] if held.has_one_file else [])


def snapshot_load(place: Place, held: Held) -> None:
    from torchsnapshot import Snapshot  # noqa: PLC0415  as above

    snapshot = Snapshot(str(place.folder))
    if held.layout.kind == "slice":  # it reads whole objects
        held.tensors["tensor"].copy_(snapshot.read_object("0/state/tensor")[held.part])
        return
    snapshot.restore(snapshot_state(held))


def snapshot_state(held: Held) -> dict[str, Any]:
    """Local tensors: torchsnapshot knows DTensors only by what a rank holds of them."""
    from torchsnapshot import StateDict  # noqa: PLC0415  as above

    return {"state": StateDict(**held.local_tensors)}


class Holder:
    """What the open-source ByteCheckpoint takes for a model: it fills the tensors of its state_dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)

    def load_state_dict(self, tensors: dict[str, torch.Tensor], *_: object, **__: object) -> None:
        for name, tensor in tensors.items():
            if tensor is not self._tensors[name]:
                self._tensors[name].copy_(tensor)


def oss_save(folder: Path, held: Held) -> None:
    oss().save(
        str(folder),
        {"model": Holder(held.tensors)},
        framework=framework(held),
        ignore_append_global_steps_to_folder=True,
        fast_saving=False,
    )


def oss_load(*, is_fast: bool) -> Callable[[Place, Held], None]:
    def run(place: Place, held: Held) -> None:
        state = {"model": Holder(held.tensors)}
        oss().load(str(place.folder), state, framework=framework(held), fast_loading=is_fast)

    return run


def oss() -> Any:
    """Not this project: the environment that runs this file holds the other package of this name."""
    return importlib.import_module("bytecheckpoint")


def framework(held: Held) -> str:
    return "ddp" if held.layout.kind in ("whole", "replicated") else "fsdp2"
