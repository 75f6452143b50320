"""The user's state taken apart: what in it is a module, an optimizer, a stateful object, rank-local, and what is
tensors and plain data. Each part becomes an entry that saves and loads as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.containers import PlainEntry
from bytecheckpoint.adapters.expectation import EntryContents, Expectation
from bytecheckpoint.adapters.frameworks.deepspeed import flat_optimizer, is_engine
from bytecheckpoint.adapters.frameworks.detect import check_known, refuse_absent
from bytecheckpoint.adapters.frameworks.megatron import MegatronEntry, is_megatron_module, refuse_inside
from bytecheckpoint.adapters.frameworks.megatron_optimizer import MegatronOptimizerEntry, is_megatron_optimizer
from bytecheckpoint.adapters.frameworks.megatron_sharded import is_sharded_leaf, sharded_leaves
from bytecheckpoint.adapters.frameworks.zero_partitions import is_wrapper
from bytecheckpoint.adapters.native.model_wrappers import ReloadEntry, modules_inside
from bytecheckpoint.adapters.native.modules import ModuleEntry
from bytecheckpoint.adapters.native.pipelines import Stage, stages_of
from bytecheckpoint.adapters.optimizers.optimizer import OptimizerEntry
from bytecheckpoint.adapters.optimizers.step_hooks import check_steps_wait
from bytecheckpoint.adapters.optimizers.wrapper_entries import OptimizerWrapperEntry, Wrapper, wrapper_of
from bytecheckpoint.adapters.plain.plain_data import ATOMS, leaves
from bytecheckpoint.adapters.shards import LocalShards, check_has_memory
from bytecheckpoint.adapters.stateful import RankLocal, RankLocalEntry, RngState, StatefulEntry, is_stateful
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, check_key, join_fqn, too_deep, unsupported

_CONTAINERS = (dict, list, tuple)
_MODULES = ModuleEntry | MegatronEntry
_OPTIMIZERS = OptimizerEntry | OptimizerWrapperEntry | MegatronOptimizerEntry


class Entry(Protocol):
    """A part of the state that saves and loads as one."""

    fqn: str

    def collect(self) -> EntryContents:
        """What to save, as views of live memory."""

    def expect(self, stored: CheckpointView) -> Expectation:
        """What to load, with meta tensors for memory that `prepare` will create. Changes nothing."""

    def prepare(self, stored: CheckpointView, refused: Collection[str], /) -> None:
        """Creates that memory, but for what is `refused`, by FQN. Called once, after every check has passed on every
        rank.
        """

    def finish(self, stored: CheckpointView) -> None:
        """Puts plain data in place, once the tensors are loaded."""


def _is_of_deepspeed(entry: Entry) -> bool:
    return (isinstance(entry, ModuleEntry) and bool(entry.engines)) or (
        isinstance(entry, OptimizerEntry | OptimizerWrapperEntry) and bool(entry.wrapped)
    )


def _is_of_megatron(entry: Entry) -> bool:
    return isinstance(entry, MegatronEntry | MegatronOptimizerEntry)


_OWN_ADAPTERS: Mapping[str, Callable[[Entry], bool]] = {"deepspeed": _is_of_deepspeed, "megatron": _is_of_megatron}
"""Frameworks with adapters of their own, and what tells their entries. `auto` tries all of them."""


def entries_of(state: Mapping[str, Any], framework: str) -> list[Entry]:
    """The entries of a state, modules first: optimizers are named after their modules' parameters.

    Raises CheckpointSaveError (unsupported_value) for a state that is no dict with names as keys, and
    CheckpointMismatchError (conflict) for a framework that is not known, or that nothing in the state is of.
    """
    check_known(framework)
    if not isinstance(state, dict):
        raise unsupported("the state", f"a {type(state).__name__} and no dict", 'pass a dict, as in {"model": model}')
    modules: list[ModuleEntry | MegatronEntry] = []
    given: list[_Optimizers | MegatronOptimizerEntry] = []
    others: list[Entry] = []
    for entry in _walk(state, "", framework):
        if isinstance(entry, _MODULES):
            modules.append(entry)
        elif isinstance(entry, _Optimizers | MegatronOptimizerEntry):
            given.append(entry)
        else:
            others.append(entry)
    optimizers = _optimizer_entries(given, modules)
    for optimizer in optimizers:
        optimizer.name_parameters(modules)
    entries: list[Entry] = [*modules, *optimizers, *others]
    is_of_it = _OWN_ADAPTERS.get(framework)
    refuse_absent(framework, state, has_own=is_of_it is not None and any(map(is_of_it, entries)))
    return entries


def _optimizer_entries(
    given: Sequence[_Optimizers | MegatronOptimizerEntry], modules: Sequence[ModuleEntry | MegatronEntry]
) -> list[OptimizerEntry | OptimizerWrapperEntry | MegatronOptimizerEntry]:
    """The entries of all optimizers, once the modules have learnt what they keep flat."""
    of_torch = [entry for entry in modules if isinstance(entry, ModuleEntry)]
    engines = [engine for entry in of_torch for engine in entry.engines]
    optimizers = [_optimizer_entry(each, engines) if isinstance(each, _Optimizers) else each for each in given]
    wrapped = [each for entry in optimizers if not isinstance(entry, MegatronOptimizerEntry) for each in entry.wrapped]
    for module in of_torch:
        module.find_flat(wrapped)
    return optimizers


def _optimizer_entry(given: _Optimizers, engines: Sequence[Any]) -> OptimizerEntry | OptimizerWrapperEntry:
    def known(value: Any) -> Any:
        return flat_optimizer(given.fqn, value, engines) or value

    values = list(map(known, given.values))
    wrappers = [wrapper_of(value) for value in values]
    if not any(wrappers):
        return OptimizerEntry(given.fqn, values)
    found = [
        Wrapper(value, [value]) if wrapper is None else Wrapper(value, list(map(known, wrapper.inner)))
        for value, wrapper in zip(values, wrappers, strict=True)
    ]
    return OptimizerWrapperEntry(given.fqn, found)


def check_can_be_lazy(entries: Sequence[Entry]) -> None:
    """Raises CheckpointSaveError (unsupported_value) where an optimizer would not wait for a lazy snapshot."""
    for entry in entries:
        if isinstance(entry, _OPTIMIZERS):
            wrapped = () if isinstance(entry, MegatronOptimizerEntry) else entry.wrapped
            check_steps_wait(entry.fqn, entry.optimizers, wrapped)


def buffers_in(entries: Sequence[Entry]) -> list[torch.Tensor]:
    """This rank's memory of the buffers of all modules, but for those that no state may hold."""
    shards = LocalShards()
    buffers = (buffer for entry in entries if isinstance(entry, _MODULES) for buffer in entry.buffers())
    for tensor in (tensor for buffer in buffers for tensor in _tensors_in(buffer)):
        with suppress(CheckpointError):  # it is not part of this state, where it is refused by its name
            shards.add("", tensor)
    return [shard.tensor for shard in shards.found]


def plain_names_of(entries: Sequence[Entry]) -> dict[str, str]:
    """State FQNs of the tensors that objects show under other names, by these."""
    objects = (entry for entry in entries if isinstance(entry, ReloadEntry))
    return {name: plain for entry in objects for name, plain in entry.plain_names().items()}


def _tensors_in(buffer: torch.Tensor) -> list[torch.Tensor]:
    parts: Mapping[str, Any] = {}
    with suppress(CheckpointError):  # as above
        parts = leaves(buffer, "")
    return [part for part in parts.values() if isinstance(part, torch.Tensor)]


def collect_all(entries: list[Entry]) -> list[EntryContents]:
    """What every entry gives to a save.

    Raises CheckpointSaveError (unsupported_value) where two of them use the same FQN.
    """
    taken: set[str] = set()
    collected: list[EntryContents] = []
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


def finish_all(
    entries: Sequence[Entry], stored: CheckpointView, overwriting: Callable[[], AbstractContextManager[None]]
) -> None:
    """Finishes every entry, `overwriting` around each, also behind one that cannot take all that it should.

    Raises the first CheckpointMismatchError of any of them.
    """
    errors: list[CheckpointMismatchError] = []
    for entry in entries:
        try:
            with overwriting():
                entry.finish(stored)
        except CheckpointMismatchError as error:
            errors.append(error)
    if errors:
        raise errors[0]


class _Optimizers(NamedTuple):
    """What becomes one entry once all modules are known."""

    fqn: str
    values: Sequence[Any]


def _walk(container: Any, fqn: str, framework: str) -> Iterator[Entry | _Optimizers]:
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        check_key(key, fqn or "the state")
        child = join_fqn(fqn, key)
        is_special = _is_special(value)
        if not is_special and not _holds_special(value, child, MAX_DEPTH):
            yield _plain_entry(container, key, value, child)
            continue
        leaves = list(sharded_leaves(value)) if not fqn else []
        if leaves:
            # All that stand below a name, because layers are parts of one tensor.
            yield MegatronEntry(child, [], leaves)
        if not is_special:
            yield from _walk(value, child, framework)
        elif not is_sharded_leaf(value):
            yield from _special_entries(value, child, framework)


def _plain_entry(container: Any, key: Any, value: Any, fqn: str) -> PlainEntry:
    if type(container) is tuple and not isinstance(value, torch.Tensor | dict | list):
        raise unsupported(fqn, "plain data in a tuple beside modules, where a load cannot put it", "use a list")
    return PlainEntry(fqn, value, _assigner(container, key))


def _assigner(container: Any, key: Any) -> Callable[[Any], None]:
    def assign(value: Any) -> None:
        if container[key] is not value:  # tuples hold only what is filled in place
            container[key] = value

    return assign


def _is_special(value: Any) -> bool:
    """Whether a value is an entry of its own, wherever it stands in the state."""
    if type(value) in ATOMS or isinstance(value, dict):
        return False
    if isinstance(value, list | tuple):
        is_optimizers = bool(value) and all(isinstance(item, torch.optim.Optimizer) for item in value)
        return is_optimizers or bool(stages_of(value))
    is_known = isinstance(value, torch.nn.Module | torch.optim.Optimizer | RankLocal)
    if is_known or is_stateful(value) or bool(stages_of(value)):
        return True
    return is_megatron_optimizer(value) or is_sharded_leaf(value)


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


def _special_entries(value: Any, fqn: str, framework: str) -> list[Entry | _Optimizers]:
    stages = stages_of(value)
    if stages:
        return [_entry_of_modules(fqn, stages, framework)]
    if is_megatron_optimizer(value):
        return [_entry_of_megatron_optimizer(fqn, value, framework)]
    items = list(value) if isinstance(value, list | tuple) else [value]
    if isinstance(items[0], torch.optim.Optimizer) or is_wrapper(items[0]):
        return [_Optimizers(fqn, items)]
    if isinstance(value, RankLocal):
        return [RankLocalEntry(fqn, value)]
    if isinstance(value, RngState):
        return [RankLocalEntry(fqn, RankLocal(value, missing="keep"))]
    inside = modules_inside(value)
    if inside is not None:
        return [_entry_of_modules(fqn, inside.stages, framework), ReloadEntry(fqn, value, inside)]
    return [StatefulEntry(fqn, value)]


def _entry_of_megatron_optimizer(fqn: str, value: Any, framework: str) -> Entry:
    if framework not in {"auto", "megatron"}:
        what = f"Megatron's {type(value).__name__} with framework={framework!r}, which could save no more than its "
        what += "state_dict(), where moments and fp32 copies are missing"
        raise unsupported(fqn, what, 'pass framework="auto" or "megatron"')
    return MegatronOptimizerEntry(fqn, value)


def _entry_of_modules(fqn: str, stages: Sequence[Stage], framework: str) -> Entry:
    modules = [stage.module for stage in stages]
    if framework in {"auto", "megatron"}:
        if all(map(is_megatron_module, modules)) and not any(map(is_engine, modules)):
            return MegatronEntry(fqn, modules)
        for module in modules:
            refuse_inside(fqn, module)
    return ModuleEntry(fqn, stages)
