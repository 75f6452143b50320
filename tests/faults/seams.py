"""Where tests put faults into a save or a load, and the small state that they save and load meanwhile. Each phase has
a function that every rank calls (or the coordinator alone); a fault runs in its place, or just before it.
"""

from __future__ import annotations

import os
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.adapters import containers
from bytecheckpoint.distributed import rendezvous
from bytecheckpoint.distributed.liveness import connected_threads
from bytecheckpoint.loading import exchange, name_scope, open_checkpoint, read, receive
from bytecheckpoint.loading.between_ranks.host_exchange import HostExchange
from bytecheckpoint.saving import commit, global_plan, local_stage, prepare, report, target, upload, write
from bytecheckpoint.storage import layout


@dataclass(frozen=True)
class Seam:
    """A function where tests put a fault: an attribute of a module or of a class, which travels to other processes."""

    owner: ModuleType | type
    name: str

    def __str__(self) -> str:
        """The dotted name, by which a program that a test starts finds it again: see `seam_named`."""
        module = "" if isinstance(self.owner, ModuleType) else f"{self.owner.__module__}."
        return f"{module}{self.owner.__name__}.{self.name}"

    def __reduce__(self) -> tuple[Callable[[str], Seam], tuple[str]]:
        return seam_named, (str(self),)


def seam_named(dotted: str) -> Seam:
    owner, _, name = dotted.rpartition(".")
    return Seam(pkgutil.resolve_name(owner), name)


SAVE_PHASES = {
    "opening": Seam(target, "open_store"),
    "planning": Seam(prepare, "exchange_plans"),
    "staging": Seam(prepare, "new_snapshot"),
    "writing": Seam(write, "write_image"),
    "reporting": Seam(commit, "encode_report"),
}
COORDINATOR_PHASES = {
    "looking": Seam(target, "refuse_occupied"),
    "merging": Seam(global_plan, "merge_plain"),
    "building": Seam(report, "build_manifest"),
    "committing": Seam(layout, "commit"),
}
LOAD_PHASES = {
    "opening": Seam(open_checkpoint, "open_above"),
    "matching": Seam(name_scope, "match_state"),
    "planning": Seam(read.Source, "plan_unchecked"),
    "reading": Seam(read.Source, "read"),
}


EXCHANGE_PHASES = {
    "finding": Seam(open_checkpoint, "open_above"),
    "matching": Seam(name_scope, "match_state"),
    "planning what to exchange": Seam(exchange, "wanted_runs"),
    "dividing the work": Seam(exchange, "divide_plan"),
    "meeting on the host": Seam(exchange, "meet_on_host"),
    "asking": Seam(HostExchange, "ask"),
    "reading": Seam(read.Source, "run"),
    "passing on": Seam(HostExchange, "announce"),
    "taking": Seam(HostExchange, "_take"),
    "finishing": Seam(containers.PlainEntry, "finish"),
}
"""Of a load whose ranks exchange what they read, in the memory of their host."""
SOCKET_PHASES = {
    "connecting": Seam(connected_threads, "connect"),
    "letting in": Seam(rendezvous.Listener, "accept"),
    "sending": Seam(exchange, "OutgoingUnit"),
    "taking in": Seam(receive, "check_digest"),
}
"""More of one between hosts."""
STAGED_PHASES = {
    "opening": Seam(target, "open_store"),
    "planning": Seam(prepare, "exchange_plans"),
    "staging": Seam(prepare, "new_snapshot"),
    "writing to the disk": Seam(local_stage, "write_image"),
    "reporting": Seam(upload, "encode_report"),
    "uploading": Seam(local_stage, "copy_file"),
}
"""Of a save through a local stage."""


@contextmanager
def before(seam: Seam, action: Callable[[], object]) -> Iterator[None]:
    """Within the block, `action` runs before each call of the function."""
    original = getattr(seam.owner, seam.name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        action()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.owner, seam.name, replacement)
        yield


@contextmanager
def after(seam: Seam, action: Callable[[], object]) -> Iterator[None]:
    """Within the block, `action` runs after each call of the function that returns."""
    original = getattr(seam.owner, seam.name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        action()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.owner, seam.name, replacement)
        yield


def raising(error: BaseException) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


def state_of(rank: int, value: float) -> dict[str, Any]:
    """A tensor that all ranks hold and one that only this rank does, so that every rank has something to write."""
    return {
        "all": torch.full((700, 501), value),
        "own": {f"rank{rank}": torch.full((33, 7), value + rank)},
        "plain": {"value": value},
    }


def holds(state: dict[str, Any], rank: int, value: float) -> bool:
    expected = state_of(rank, value)
    return (
        torch.equal(state["all"], expected["all"])
        and torch.equal(state["own"][f"rank{rank}"], expected["own"][f"rank{rank}"])
        and state["plain"] == expected["plain"]
    )


def loads_as(path: str | os.PathLike[str], rank: int, value: float, **arguments: Any) -> bool:
    """Whether the checkpoint there loads, bit-equal to the state with this value."""
    state = state_of(rank, -1.0)
    bcp.load(path, state, **arguments)
    return holds(state, rank, value)


_OWN = re.compile(r"\. (The|Nothing of the) state of rank \d+ .* about its own state$")


@dataclass(frozen=True)
class Seen:
    """What an error said."""

    cls: str
    kind: str
    ranks: tuple[int, ...]
    message: str
    own: str = field(compare=False)
    """What comes behind the message: what this rank says of its own state."""
    seconds: float = field(default=0.0, compare=False)
    """From the call on."""


def seen(call: Callable[[], object]) -> Seen | None:
    """The CheckpointError that the call raises, in a form that travels; None where it raises none."""
    began_s = time.monotonic()
    try:
        call()
    except bcp.CheckpointError as error:
        seconds = time.monotonic() - began_s
        found = _OWN.search(str(error))
        message, own = (str(error), "") if found is None else (str(error)[: found.start()], found.group())
        return Seen(type(error).__name__, error.kind, error.ranks, message, own, seconds)
    return None


def files_under(path: str | os.PathLike[str]) -> list[str]:
    """Every file below, temporary ones too, by its path from there."""
    root = Path(path)
    return sorted(found.relative_to(root).as_posix() for found in root.rglob("*") if found.is_file())
