"""The user's state taken apart: what in it is a module, an optimizer, a stateful object, rank-local, and what is
tensors and plain data. Each part becomes an entry that saves and loads as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from operator import setitem
from typing import Any, Literal, NamedTuple, Protocol

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.containers import BareTensorsEntry, PlainEntry, bare_tensors
from bytecheckpoint.adapters.data.loader_entry import DataLoaderEntry
from bytecheckpoint.adapters.data.loader_state import DataLoaderState
from bytecheckpoint.adapters.expectation import EntryContents, Expectation
from bytecheckpoint.adapters.frameworks.deepspeed import flat_optimizer, is_engine
from bytecheckpoint.adapters.frameworks.detect import check_known, refuse_absent
from bytecheckpoint.adapters.frameworks.megatron import MegatronEntry, is_megatron_module, refuse_megatron
from bytecheckpoint.adapters.frameworks.megatron_optimizer import is_megatron_optimizer, megatron_optimizer_entry
from bytecheckpoint.adapters.frameworks.megatron_sharded import is_sharded_leaf
from bytecheckpoint.adapters.frameworks.zero_partitions import is_wrapper
from bytecheckpoint.adapters.native.model_wrappers import ReloadEntry, modules_inside
from bytecheckpoint.adapters.native.module_walk import Stage, stages_of
from bytecheckpoint.adapters.native.modules import ModuleEntry
from bytecheckpoint.adapters.optimizers.optimizer import OptimizerEntry
from bytecheckpoint.adapters.optimizers.param_state import refuse_zero_redundancy
from bytecheckpoint.adapters.optimizers.wrapper_entries import OptimizerWrapper, OptimizerWrapperEntry, wrapper_of
from bytecheckpoint.adapters.plain.plain_tree import atoms, leaves
from bytecheckpoint.adapters.rank_values.rank_local import RankLocal, RankLocalEntry
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.adapters.shard_columns import ShardBlocks
from bytecheckpoint.adapters.shards import LocalShard, LocalShards, refuse_meta
from bytecheckpoint.adapters.stateful import StatefulEntry, is_stateful
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointSaveError
from bytecheckpoint.info import DataReport
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, check_key, join_fqn, too_deep, unsupported

_MODULES = ModuleEntry | MegatronEntry
_CHANGING = _MODULES | DataLoaderEntry
"""Entries with tensors that change without waiting for a lazy snapshot."""
_OPTIMIZERS = OptimizerEntry | OptimizerWrapperEntry


class Entry(Protocol):
    """A part of the state that saves and loads as one."""

    fqn: str

    def collect(self) -> EntryContents:
        """Returns the shards and plain data to save, as views of live memory."""

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        """Returns the targets of a load, with meta tensors for memory that `prepare` will create. Changes nothing."""

    def prepare(self, checkpoint: CheckpointView, refused: Collection[str], /) -> None:
        """Creates the memory that the state lacks, except for `refused` FQNs. Called at most once, after all checks
        have passed on all ranks, and only if some entry of this rank lacks memory.
        """

    def finish(self, checkpoint: CheckpointView) -> None:
        """Puts plain data in place, once the tensors are loaded."""


def entries_of(state: Mapping[str, Any], framework: str) -> list[Entry]:
    """Returns the entries of a state: modules first, then optimizers, which name their state after parameters.

    Raises CheckpointSaveError (unsupported_value) for a state that is not a dict with names as keys, or has a value
    that cannot be saved, and CheckpointMismatchError (conflict) for a framework that is not known, or to which nothing
    in the state belongs.
    """
    check_known(framework)
    if not isinstance(state, dict):
        raise _no_state(state)
    values = list(_walk_state(state))
    entries = [entry for each in values if each.kind != "optimizers" for entry in _entries_of_item(each, framework)]
    modules = [entry for entry in entries if isinstance(entry, _MODULES)]
    of_torch = [entry for entry in modules if isinstance(entry, ModuleEntry)]
    engines = [engine for module in of_torch for engine in module.engines]
    optimizers = [_optimizer_entry(each, framework, engines) for each in values if each.kind == "optimizers"]
    flat = [each for optimizer in optimizers for each in optimizer.wrapped]
    for module in of_torch:
        module.find_flat(flat)
    others = [entry for entry in entries if isinstance(entry, PlainEntry)]
    for optimizer in optimizers:
        optimizer.name_parameters(modules, others)
    _refuse_bound_to_zero(values, optimizers)
    refuse_absent(framework, state, has_own=any(entry.framework == framework for entry in (*modules, *optimizers)))
    return [*modules, *optimizers, *(entry for entry in entries if not isinstance(entry, _MODULES))]


def _refuse_bound_to_zero(values: Sequence[_Value], optimizers: Sequence[_OPTIMIZERS]) -> None:
    """Raises CheckpointSaveError (unsupported_value) if the state has the inner optimizer of a ZeroRedundancyOptimizer
    and a scheduler of the outer one: each step replaces the inner hyperparameters by the outer, which no entry has.
    """
    fqns = {id(one): entry.fqn for entry in optimizers for one in entry.optimizers}
    for each in values:
        outer = getattr(each.value, "__dict__", {}).get("optimizer") if each.kind == "stateful" else None
        fqn = fqns.get(id(getattr(outer, "optim", None)))
        if fqn is not None and isinstance(outer, torch.optim.Optimizer):
            refuse_zero_redundancy(fqn, outer)


_Kind = Literal["sharded", "modules", "optimizers", "rank-local", "data", "stateful", "plain", "tensors"]


class _Value(NamedTuple):
    """A value of the state that becomes entries."""

    fqn: str
    value: Any
    found: Any
    """Result of the predicate of its kind; for plain data its container and its key there."""
    kind: _Kind


def _no_state(state: object) -> CheckpointSaveError:
    return unsupported("the state", f"a {type(state).__name__} and no dict", 'pass a dict, as in {"model": model}')


def _walk_state(state: Mapping[str, Any]) -> Iterator[_Value]:
    bare = bare_tensors(state)
    for key, value in state.items():
        if key in bare:
            check_key(key, "the state")
            continue
        # Each entry counts the depth of its plain data itself: this limit only ends the walk of what contains itself.
        content = _content_of(value, str(key), 2 * MAX_DEPTH)
        values = list(_walk_item(state, key, value, content, ""))
        # All sharded objects below a name are one entry, because layers are parts of one tensor.
        sharded = [each.value for each in values if each.kind == "sharded"]
        if sharded:
            yield _Value(str(key), sharded, None, "sharded")
        yield from (each for each in values if each.kind != "sharded")
    if bare:  # last: where one is also an item of a tuple, which cannot be replaced, it is the bare one that is
        yield _Value("", bare, state, "tensors")


def _walk_item(container: Any, key: Any, value: Any, content: _Content, fqn: str) -> Iterator[_Value]:
    # `content` is that of `value`, by `_content_of`: a tuple has the result of a predicate, and its kind.
    check_key(key, fqn or "the state")
    child = join_fqn(fqn, key)
    if content is None:
        yield _Value(child, value, (container, key), "plain")
    elif isinstance(content, tuple):
        yield _Value(child, value, *content)
    else:
        for key_item_content in content:
            yield from _walk_item(value, *key_item_content, child)


def data_loaders_in(state: Mapping[str, Any]) -> dict[str, DataLoaderState]:
    """Returns the data loaders of a state by FQN. Raises CheckpointSaveError (unsupported_value) as a save does."""
    if not isinstance(state, Mapping):
        raise _no_state(state)
    return {each.fqn: each.value for each in _walk_state(state) if each.kind == "data"}


def optimizers_in(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """Returns torch's optimizers in a state, without those inside wrappers. Raises CheckpointSaveError
    (unsupported_value) as a save does.
    """
    found = (one for each in _walk_state(state) if each.kind == "optimizers" for one in each.found)
    return [one for one in found if isinstance(one, torch.optim.Optimizer)]


_Content = tuple[Any, _Kind] | list[tuple[Any, Any, Any]] | None
"""A value of one of _KINDS (the result of its predicate, and its kind); a container with such values in it (key, value
and content of each item); or None for tensors and plain data."""


def _content_of(value: Any, fqn: str, depth: int) -> _Content:
    if type(value) in atoms():
        return None
    if not isinstance(value, dict):
        for kind, predicate in _KINDS.items():
            found = predicate(value)
            if found:
                return found, kind
    if not isinstance(value, dict) and type(value) not in (list, tuple):
        return None
    if depth == 0:
        raise too_deep(fqn)
    if atoms().issuperset(map(type, value.values() if isinstance(value, dict) else value)):
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    contents = [(key, item, _content_of(item, join_fqn(fqn, key), depth - 1)) for key, item in items]
    return contents if any(content is not None for _, _, content in contents) else None


def _entries_of_item(item: _Value, framework: str) -> Sequence[Entry]:
    match item.kind:
        case "sharded":
            return [MegatronEntry(item.fqn, [], item.value)]
        case "modules":
            return [_entry_of_modules(item.fqn, item.found, framework)]
        case "rank-local":
            return [RankLocalEntry(item.fqn, item.found)]
        case "data":
            return [DataLoaderEntry(item.fqn, item.value)]
        case "tensors":
            return [BareTensorsEntry(item.found, item.value)]
        case "stateful":
            inside = modules_inside(item.value)
            if inside is None:
                return [StatefulEntry(item.fqn, item.value)]
            return [_entry_of_modules(item.fqn, inside.stages, framework), ReloadEntry(item.fqn, item.value, inside)]
    return [_plain_entry(item)]


def _plain_entry(item: _Value) -> PlainEntry:
    container, key = item.found
    if type(container) is tuple and not isinstance(item.value, torch.Tensor | dict | list):
        raise unsupported(item.fqn, "plain data in a tuple beside modules, where a load cannot put it", "use a list")
    assign = None if type(container) is tuple else partial(setitem, container, key)
    return PlainEntry(item.fqn, item.value, assign)


def _entry_of_modules(fqn: str, stages: Sequence[Stage], framework: str) -> _MODULES:
    modules = [stage.module for stage in stages]
    if framework in {"auto", "megatron"}:
        if all(map(is_megatron_module, modules)) and not any(map(is_engine, modules)):
            return MegatronEntry(fqn, modules)
        refuse_megatron(fqn, modules)
    return ModuleEntry(fqn, stages)


def _optimizers_in(value: Any) -> Sequence[Any]:
    """Returns [value] for an optimizer of torch or Megatron, or an object that wraps optimizers; a list or tuple of
    torch's optimizers alone as it is; and an empty sequence for all else.
    """
    if isinstance(value, list | tuple):
        return value if all(isinstance(item, torch.optim.Optimizer) for item in value) else ()
    if is_megatron_optimizer(value) or isinstance(value, torch.optim.Optimizer):
        return [value]
    return [value] if is_stateful(value) and is_wrapper(value) else ()


def _optimizer_entry(item: _Value, framework: str, engines: Sequence[Any]) -> _OPTIMIZERS:
    """Returns the entry of optimizers; `engines` are those of DeepSpeed in the state."""
    if is_megatron_optimizer(item.value):
        return megatron_optimizer_entry(item.fqn, item.value, framework)

    def flat_or_itself(value: Any) -> Any:
        return flat_optimizer(item.fqn, value, engines) or value

    optimizers = list(map(flat_or_itself, item.found))
    wrappers = [wrapper_of(optimizer) for optimizer in optimizers]
    if not any(wrappers):
        return OptimizerEntry(item.fqn, optimizers)
    found = [
        OptimizerWrapper(one, [one])
        if wrapper is None
        else wrapper._replace(inner=[*map(flat_or_itself, wrapper.inner)])
        for one, wrapper in zip(optimizers, wrappers, strict=True)
    ]
    return OptimizerWrapperEntry(item.fqn, found)


def _rank_local(value: Any) -> RankLocal | None:
    if isinstance(value, RngState):
        return RankLocal(value, missing="keep")
    return value if isinstance(value, RankLocal) else None


_KINDS: Mapping[_Kind, Callable[[Any], Any]] = {
    "sharded": is_sharded_leaf,
    "modules": stages_of,
    "optimizers": _optimizers_in,
    "rank-local": _rank_local,
    "data": lambda value: isinstance(value, DataLoaderState),
    # The items of a list are entries of their own.
    "stateful": lambda value: not isinstance(value, list | tuple) and is_stateful(value),
}
"""The kinds of values that are entries of their own, wherever they stand in the state, and the predicate of each. The
first that matches counts, and each value is asked once. All else is tensors and plain data."""


def check_can_be_lazy(entries: Sequence[Entry]) -> None:
    """Raises CheckpointSaveError (unsupported_value) where an optimizer would not wait for a lazy snapshot."""
    for entry in entries:
        if isinstance(entry, _OPTIMIZERS):
            entry.check_can_be_lazy()


def changing_tensors(entries: Sequence[Entry]) -> list[torch.Tensor]:
    """Returns this rank's memory of modules' buffers and data loaders' tensors, which training changes without waiting
    for a lazy snapshot. Leaves out those that a save refuses.
    """
    shards = LocalShards()
    for buffer in (buffer for entry in entries if isinstance(entry, _CHANGING) for buffer in entry.buffers()):
        parts: Mapping[str, Any] = {}
        with suppress(CheckpointError):  # it is in no entry: collecting it would have been refused
            parts = leaves(buffer, "")
        for tensor in (part for part in parts.values() if isinstance(part, torch.Tensor)):
            with suppress(CheckpointError):  # as above
                shards.add("", tensor)
    return [shard.tensor for shard in shards.found]


def frozen_fqns(entries: Sequence[Entry]) -> set[str]:
    """Returns the FQNs of the parameters with requires_grad=False, except those of Megatron's modules."""
    modules = [entry for entry in entries if isinstance(entry, ModuleEntry)]
    return {
        join_fqn(entry.fqn, name)
        for entry in modules
        for parameter, name in entry.parameters()
        if not parameter.requires_grad
    }


def data_reports(entries: Sequence[Entry]) -> dict[str, DataReport]:
    """Returns what a load has done with each data loader, by FQN."""
    loaders = [entry for entry in entries if isinstance(entry, DataLoaderEntry)]
    return {entry.fqn: entry.report for entry in loaders if entry.report is not None}


def plain_names_of(entries: Sequence[Entry]) -> dict[str, str]:
    """Returns the state FQNs of tensors that objects show under other names, by these other names."""
    objects = (entry for entry in entries if isinstance(entry, ReloadEntry))
    return {name: plain for entry in objects for name, plain in entry.plain_names().items()}


def random_restores(entries: Sequence[Entry]) -> list[Callable[[], None]] | None:
    """Returns calls that set generators to the states that the load gave them; None if the state has no generators."""
    are_random = [entry for entry in entries if isinstance(entry, RankLocalEntry) and entry.is_random]
    return [restore for entry in are_random for restore in entry.random_restores] if are_random else None


def collect_all(entries: list[Entry]) -> list[EntryContents]:
    """Returns the shards and plain data of every entry for a save.

    Raises CheckpointSaveError (unsupported_value) where two entries use the same FQN, or a tensor is on the meta
    device, and the errors of `Entry.collect`.
    """
    known_names, known_trees = set[str](), set[str]()
    collected: list[EntryContents] = []
    for entry in entries:
        contents = entry.collect()
        # A tree of plain data has a name of its own, which may be no leaf's: 0 and "0" are two keys of a dict.
        if clashing := (known_names & contents.names) | (known_trees & contents.plain.keys()):
            name, earlier = min(clashing), zip(entries, collected, strict=False)
            owner = next(entry for entry, known in earlier if name in known.names or name in known.plain)
            first, second = (name if isinstance(each, BareTensorsEntry) else each.fqn for each in (owner, entry))
            advice = f"rename one: {first!r} and {second!r} in the state both give it"
            raise unsupported(name, "the name of two values", advice)
        if len(entries) > 1:  # a single entry clashes with none, and may have 100,000 names
            known_names |= contents.names
            known_trees |= contents.plain.keys()
        collected.append(contents)
    return [contents._replace(shards=_resolved(contents.shards)) for contents in collected]


def _resolved(shards: Sequence[LocalShard]) -> ShardBlocks:
    """Returns the shards with their memory located. Raises the errors of `ShardBlocks.resolved`, and
    CheckpointSaveError (unsupported_value) for a tensor on the meta device.
    """
    blocks = ShardBlocks([shards]).resolved()
    for shard in blocks.records():  # columns are on the host
        refuse_meta(shard.fqn, shard.tensor)
    return blocks


def finish_all(
    entries: Sequence[Entry], checkpoint: CheckpointView, overwriting: Callable[[], AbstractContextManager[None]]
) -> None:
    """Finishes every entry, each within `overwriting`, also after a CheckpointMismatchError of one: the first such
    error is raised at the end.
    """
    errors: list[CheckpointMismatchError] = []
    for entry in entries:
        try:
            with overwriting():
                entry.finish(checkpoint)
        except CheckpointMismatchError as error:
            errors.append(error)
    if errors:
        raise errors[0]
