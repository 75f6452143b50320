"""A job that saves, loads and cleans up at `world://...`: a process of its own, which asks for every operation of its
stores over a socket and waits for the answer. Who lets it wait, fails it or kills it is commit_jobs.py.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint import api
from bytecheckpoint.formats import find_checkpoint
from bytecheckpoint.saving import handle as handle_module
from bytecheckpoint.saving import recover, target
from bytecheckpoint.storage import deletion, layout
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.tools import arguments, gc_command
from faults.object_world import SCHEME, Operation, WorldStore
from faults.seams import Seam, Seen, before, seen

OPENERS = (api, find_checkpoint, recover, target, arguments)
"""Where stores are opened."""
NOTHING = -1.0
"""What a state holds before it is loaded into."""
SPOILT = -2.0


class Call(NamedTuple):
    """What a job is asked to do."""

    kind: str
    """`save`, `load`, `gc`, `recover` or `retain`."""
    root: str
    step: int | None = None
    value: float = NOTHING
    overwrite: bool = False
    snapshot: str = ""
    """Of an asynchronous save; empty for a synchronous one."""
    stage: str | None = None
    keep: int = 1


class Ended(NamedTuple):
    """How a call ended."""

    error: Seen | None
    value: Any = None
    """What was loaded; what became of recovered saves, by save id."""


def warm_up() -> None:
    """Imports what a first save and load import."""
    with opened_by(lambda _root: WorldStore("world://warm", _no_answer)):
        seen(lambda: bcp.save("world://warm", state_of(0.0)))


def _no_answer(_operation: Operation) -> Any:
    raise bcp.StorageError("nobody is there", kind="unavailable")


def state_of(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((5, 7), value),
        "n": torch.full((3,), int(value), dtype=torch.int64),
        "plain": {"value": value},
    }


def value_of(state: dict[str, Any]) -> float | None:
    """That the state holds everywhere; None where it holds several."""
    values = {*state["w"].flatten().tolist(), *map(float, state["n"].tolist()), state["plain"]["value"]}
    return values.pop() if len(values) == 1 else None


@contextmanager
def opened_by(open_world: Callable[[str], WorldStore]) -> Iterator[None]:
    """Within the block `world://...` can be opened, wherever the library opens stores."""
    original = api.open_store

    def open_store(path: Any, **arguments: Any) -> Any:
        is_world = isinstance(path, str) and path.startswith(SCHEME)
        return open_world(path) if is_world else original(path, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in OPENERS:
            patch.setattr(module, "open_store", open_store)
        yield


class _Line:
    """To the test: one connection for calls, and one for each thread that asks for something meanwhile."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._of_thread = threading.local()
        self.calls = self._connect("calls")

    def ask(self, operation: Operation) -> Any:
        if not hasattr(self._of_thread, "connection"):
            self._of_thread.connection = self._connect("operations")
        self._of_thread.connection.send(operation)
        answer = self._of_thread.connection.recv()
        if isinstance(answer, bcp.CheckpointError):
            raise answer
        return answer

    def _connect(self, what: str) -> Connection:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(self._address)
        connection = Connection(connected.detach())
        connection.send((os.getpid(), what))
        return connection


def serve(address: str) -> None:
    """Takes calls until the test goes away."""
    line = _Line(address)
    durable = lambda: line.ask(Operation("durable", ""))  # noqa: E731
    with opened_by(lambda root: WorldStore(root, line.ask)), before(REACH_LOCAL, durable):
        while True:
            call = line.calls.recv()
            line.calls.send(carry_out(call))


REACH_LOCAL = Seam(handle_module.SaveProgress, "reach_local")


def carry_out(call: Call) -> Ended:
    found: list[Any] = []
    error = seen(lambda: found.append(_DOES[call.kind](call)))
    return Ended(error, found[0] if found else None)


def _save(call: Call) -> None:
    snapshot: Any = call.snapshot or "auto"
    options = bcp.SaveOptions(overwrite=call.overwrite, local_stage=call.stage, snapshot=snapshot, timeout_s=60)
    state = state_of(call.value)
    handle = bcp.save(call.root, state, step=call.step, async_save=bool(call.snapshot), options=options)
    handle.staged()
    for tensor in (state["w"], state["n"]):  # what is saved must be what was there at the call
        tensor.fill_(SPOILT)
    state["plain"]["value"] = SPOILT
    error = handle.exception()
    if error is not None:
        raise error


def _load(call: Call) -> float | None:
    state = state_of(NOTHING)
    bcp.load(call.root, state, step="latest" if call.step is None else call.step)
    return value_of(state)


def _gc(call: Call) -> int:
    more = ["--local-stage", call.stage] if call.stage else []
    code: int = gc_command.gc.main([call.root, "--delete", "--json", *more], standalone_mode=False)
    return code


def _recover(call: Call) -> dict[str, str]:
    recovered = bcp.recover(call.root, options=bcp.SaveOptions(local_stage=call.stage, timeout_s=60))
    return {save.save_id: save.outcome for save in recovered}


def _retain(call: Call) -> None:
    """What a script of a user does who keeps the last few: the manifest goes first, then what it needed."""
    store = api.open_store(call.root, storage_options=None, writer_threads=1)
    for step in layout.committed_steps(store)[: -call.keep]:
        folder = layout.step_folder(step)
        names = deletion.files_of_checkpoint(store, folder)
        store.delete(join_name(folder, layout.MANIFEST_NAME))
        deletion.discard(store, folder, names)


_DOES: dict[str, Callable[[Call], Any]] = {
    "save": _save,
    "load": _load,
    "gc": _gc,
    "recover": _recover,
    "retain": _retain,
}
