"""The user's state taken apart: what in it is a module, an optimizer, a stateful object, rank-local, and what is
tensors and plain data. Each part becomes an entry that saves and loads as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from bytecheckpoint.adapters.containers import PlainEntry
from bytecheckpoint.adapters.modules import ModuleEntry
from bytecheckpoint.adapters.optimizer import OptimizerEntry
from bytecheckpoint.adapters.pipelines import stages_of
from bytecheckpoint.adapters.plain_data import ATOMS, MAX_DEPTH, check_key, join_fqn, leaves, too_deep
from bytecheckpoint.adapters.rng import RngState
from bytecheckpoint.adapters.stateful import RankLocal, RankLocalEntry, StatefulEntry, is_stateful
from bytecheckpoint.adapters.stored import Contents, Expectation, Stored
from bytecheckpoint.adapters.tensors import LocalShards, check_has_memory, unsupported

FRAMEWORKS = ("auto", "ddp", "fsdp", "fsdp2", "dtensor", "vescale")
"""What `framework` may be. They share one adapter, because all of them are torch tensors that say how they lie; FSDP1's
flat parameters, Megatron and DeepSpeed are not read yet."""

_CONTAINERS = (dict, list, tuple)


class Entry(Protocol):
    """A part of the state that saves and loads as one."""

    fqn: str

    def collect(self) -> Contents:
        """What to save, as views of live memory."""

    def expect(self, stored: Stored) -> Expectation:
        """What to load, with meta tensors for memory that `prepare` will create. Changes nothing."""

    def prepare(self, stored: Stored) -> None:
        """Creates that memory. Called once, after every check has passed on every rank."""

    def finish(self, stored: Stored) -> None:
        """Puts plain data in place, once the tensors are loaded."""


def entries_of(state: Mapping[str, Any], framework: str) -> list[Entry]:
    """The entries of a state, modules first: optimizers are named after their modules' parameters.

    Raises CheckpointSaveError (unsupported_value) for a state that is no dict with names as keys, and for a framework
    that is none of FRAMEWORKS.
    """
    if framework not in FRAMEWORKS:
        raise unsupported(
            f"framework={framework!r}", "a framework that this release does not know", f"pass one of {FRAMEWORKS}"
        )
    if not isinstance(state, dict):
        raise unsupported("the state", f"a {type(state).__name__} and no dict", 'pass a dict, as in {"model": model}')
    modules: list[ModuleEntry] = []
    optimizers: list[OptimizerEntry] = []
    others: list[Entry] = []
    for entry in _walk(state, ""):
        if isinstance(entry, ModuleEntry):
            modules.append(entry)
        elif isinstance(entry, OptimizerEntry):
            optimizers.append(entry)
        else:
            others.append(entry)
    for optimizer in optimizers:
        optimizer.name_parameters(modules)
    return [*modules, *optimizers, *others]


def optimizers_in(entries: Sequence[Entry]) -> list[torch.optim.Optimizer]:
    """The optimizers of the state: what changes its parameters, and theirs."""
    return [optimizer for entry in entries if isinstance(entry, OptimizerEntry) for optimizer in entry.optimizers]


def buffers_in(entries: Sequence[Entry]) -> list[torch.Tensor]:
    """This rank's memory of the buffers of all modules."""
    shards = LocalShards()
    buffers = (buffer for entry in entries if isinstance(entry, ModuleEntry) for buffer in entry.buffers())
    for tensor in (tensor for buffer in buffers for tensor in leaves(buffer, "").values()):
        if isinstance(tensor, torch.Tensor):
            shards.add("", tensor)
    return [shard.tensor for shard in shards.found]


def collect_all(entries: list[Entry]) -> list[Contents]:
    """What every entry gives to a save.

    Raises CheckpointSaveError (unsupported_value) where two of them use the same FQN.
    """
    taken: set[str] = set()
    collected: list[Contents] = []
    for entry in entries:
        contents = entry.collect()
        for shard in [shard for shard in contents.shards if shard.tensor.is_meta]:
            check_has_memory(shard.fqn, shard.tensor)
        if not taken.isdisjoint(contents.names):
            name = min(taken & contents.names)
            owner = next(entry for entry, earlier in zip(entries, collected, strict=False) if name in earlier.names)
            advice = f"rename one: {owner.fqn!r} and {entry.fqn!r} in the state both come to it"
            raise unsupported(name, "the name of two values", advice)
        taken |= contents.names
        collected.append(contents)
    return collected


def _walk(container: Any, fqn: str) -> Iterator[Entry]:
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        check_key(key, fqn or "the state")
        child = join_fqn(fqn, key)
        if _is_special(value):
            yield _special_entry(value, child)
        elif _holds_special(value, child, MAX_DEPTH):
            yield from _walk(value, child)
        elif type(container) is tuple and not isinstance(value, torch.Tensor | dict | list):
            raise unsupported(child, "plain data in a tuple beside modules, where a load cannot put it", "use a list")
        else:
            yield PlainEntry(child, value, _assigner(container, key))


def _assigner(container: Any, key: Any) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        if container[key] is not value:  # tuples hold only what is filled in place
            container[key] = value

    return assign


def _is_special(value: Any) -> bool:
    """Whether a value is an entry of its own, wherever it stands in the state."""
    if type(value) in ATOMS or type(value) is dict:
        return False
    if isinstance(value, list | tuple) and value:
        return bool(stages_of(value)) or all(isinstance(item, torch.optim.Optimizer) for item in value)
    is_known = isinstance(value, torch.nn.Module | torch.optim.Optimizer | RankLocal)
    return is_known or is_stateful(value) or bool(stages_of(value))


def _holds_special(value: Any, fqn: str, depth: int) -> bool:
    if depth == 0:
        raise too_deep(fqn)
    values = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    if ATOMS.issuperset(map(type, values)):
        return False
    return any(
        _is_special(item) or (isinstance(item, _CONTAINERS) and _holds_special(item, join_fqn(fqn, key), depth - 1))
        for key, item in (value.items() if isinstance(value, dict) else enumerate(value))
    )


def _special_entry(value: Any, fqn: str) -> Entry:
    stages = stages_of(value)
    if stages:
        return ModuleEntry(fqn, stages)
    items = list(value) if isinstance(value, list | tuple) else [value]
    if isinstance(items[0], torch.optim.Optimizer):
        return OptimizerEntry(fqn, items)
    if isinstance(value, RankLocal):
        return RankLocalEntry(fqn, value)
    if isinstance(value, RngState):
        return RankLocalEntry(fqn, RankLocal(value, missing="keep"))
    return StatefulEntry(fqn, value)
