"""Modules: their parameters, persistent buffers and extra state, under names that wrappers do not change.

Takes plain modules, DistributedDataParallel, `fully_shard`, tensor-parallel and compiled ones, and lists of modules
that are stages of a pipeline, whose FQNs are then those of the whole model. Tied tensors are stored once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bytecheckpoint.adapters.module_tree import ModuleTree, tree_of
from bytecheckpoint.adapters.pipelines import Stage
from bytecheckpoint.adapters.plain_data import encode_plain, join_fqn, leaves
from bytecheckpoint.adapters.stateful import TreeTarget, keep_for_rank
from bytecheckpoint.adapters.stored import (
    Contents,
    Expectation,
    RankMissing,
    Scope,
    Stored,
    not_stored,
    rank_missing,
)
from bytecheckpoint.adapters.stored_subclasses import facts_problems, refused_by, unbuildable
from bytecheckpoint.adapters.subclasses import flat_parts, is_facts, is_subclass, tied_subclasses, with_new_memory
from bytecheckpoint.adapters.tensors import PLAIN_TENSORS, LocalShards, unsupported

_COMPILED, _CHECKPOINTED = "_orig_mod", "_checkpoint_wrapped_module"
_EXTRA_STATE = "_extra_state"


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it."""
    if _COMPILED not in name and _CHECKPOINTED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in {_COMPILED, _CHECKPOINTED})


class _Part(NamedTuple):
    """One module of an entry."""

    tree: ModuleTree
    ddp_prefixes: Sequence[str]
    """What the names of everything inside a DistributedDataParallel start with, innermost ones first."""
    stage: int | None
    """Which stage of a pipeline it is, where it says so."""
    is_wrapped: bool
    """Whether a wrapper puts anything into names; else they are plain as they are."""

    def plain_name(self, name: str) -> str:
        """The name of something in the module, without what wrappers put into it."""
        if not self.is_wrapped:
            return name
        for prefix in self.ddp_prefixes:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return plain_name(name)

    def plain_tensors(self) -> Mapping[str, torch.Tensor] | None:
        """The state_dict, where all in it are plain tensors of the module under plain names: told by a few looks."""
        if self.is_wrapped or not self.tree.is_saved_as_usual:
            return None
        values = self.tree.state_dict()
        are_plain = PLAIN_TENSORS.issuperset(map(type, values.values())) and _EXTRA_STATE not in "".join(values)
        return values if are_plain else None

    def state(self) -> Iterator[tuple[str, str, Any]]:
        """The state_dict: of each value the module's own name for it, the plain name, and the live value."""
        for name, value in self.tree.state_dict().items():
            yield name, self.plain_name(name), value


class _Held(NamedTuple):
    """What the modules of an entry hold."""

    tensors: Mapping[str, torch.Tensor]
    """By FQN; of tied ones the first."""
    aliases: Mapping[str, str]
    """FQN of a tied tensor -> the first one's."""
    extra: Mapping[str, Any]
    """Extra state, by FQN."""
    facts: Mapping[str, Any]
    """What else is known of tensor subclasses, whose inner tensors are among the tensors, by FQN."""
    stages: Mapping[str, int]
    """By FQN, of stages of a pipeline that say which they are."""


class ModuleEntry:
    """One module, or the stages of a pipeline that this rank holds."""

    def __init__(self, fqn: str, stages: Sequence[Stage]) -> None:
        self.fqn = fqn
        self._parts = [_part_of(fqn, stage) for stage in stages]
        self._extra = TreeTarget()
        self._detached: dict[str, torch.Tensor] = {}
        """Tensors that state_dict hooks made: no live memory, so a load hands them to load_state_dict."""
        self._named: _Held | None = None
        """What was found to name parameters, for the one collect or expect that follows at once."""

    def parameters(self) -> Iterator[tuple[torch.nn.Parameter, str]]:
        """Every parameter with its name in the model; a tied one once, under its first name."""
        for part in self._parts:
            for name, parameter in part.tree.named_parameters():
                yield parameter, part.plain_name(name)

    def buffers(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            yield from part.tree.module.buffers()

    def tied_names(self) -> dict[str, str]:
        """The other names of tied tensors -> their first name, without the entry's own."""
        self._named = held = self._named or self._read()
        prefix = len(self.fqn) + 1
        tied = {**held.aliases, **tied_subclasses(held.facts, held.aliases)}
        return {alias[prefix:]: fqn[prefix:] for alias, fqn in tied.items()}

    def collect(self) -> Contents:
        held = self._held()
        shards = LocalShards()
        for fqn, tensor in held.tensors.items():
            shards.add(fqn, tensor)
        on_tensor = partial(keep_for_rank, shards)
        encoded: dict[str, tuple[Scope, bytes]] = {
            fqn: ("either", encode_plain(value, fqn, on_tensor)) for fqn, value in held.extra.items()
        }
        encoded |= {fqn: ("shared", encode_plain(value, fqn, on_tensor)) for fqn, value in held.facts.items()}
        names = {name for fqn, value in held.extra.items() for name in leaves(value, fqn)}
        names |= {*held.tensors, *held.aliases, *held.facts}
        return Contents(shards.found, names, encoded, held.aliases, held.stages)

    def expect(self, stored: Stored) -> Expectation:
        held = self._held()
        other_names: dict[str, list[str]] = {}
        for alias, fqn in held.aliases.items():
            other_names.setdefault(fqn, []).append(alias)
        problems = facts_problems(held.facts, stored, tied_subclasses(held.facts, held.aliases))
        refused = refused_by(problems)
        of_module = LocalShards()
        for fqn, tensor in held.tensors.items():
            names = [fqn, *other_names.get(fqn, ())]
            if refused and fqn.startswith(refused):
                continue
            of_module.add(next((name for name in names if name in stored.tensors), fqn), tensor)
        shards = of_module.found
        claims = {*held.tensors, *held.aliases, *held.facts}
        for fqn in held.extra:
            found = stored.entry_tree(fqn)
            if found is None:
                problems.append(not_stored(fqn))
            elif found.is_taken:
                shards += self._extra.shards(found.tree, found.fqn, {}, stored)
                values = leaves(found.tree, found.fqn)
                claims.update(map(stored.rename, values))
                problems += unbuildable(values)
                missing = [value for value in values.values() if isinstance(value, RankMissing)]
                problems += [rank_missing(fqn, missing[0].num_saved)] if missing else []
        return Expectation(shards, claims, problems)

    def prepare(self, stored: Stored) -> None:
        for fqn in self._read().extra:
            found = stored.entry_tree(fqn)
            if found is not None:
                self._extra.prepare(found.tree, found.fqn, {}, stored)
        for part in self._parts:
            materialise(self.fqn, part.tree.module, {id(tensor) for tensor in self._loadable(part, stored)})

    def finish(self, stored: Stored) -> None:
        for part in self._parts:
            given: dict[str, Any] = {}
            own: dict[str, Any] = {}
            for name, plain, value in part.state():
                fqn = join_fqn(self.fqn, plain)
                found = stored.entry_tree(fqn) if _is_data(name, value) else None
                if fqn in self._detached:
                    given[name] = self._detached[fqn]
                elif found is not None and found.is_taken:
                    given[name] = self._extra.filled(found.tree, found.fqn, leaves(value, fqn), stored)
                elif _is_data(name, value) and not _is_extra_state(name):
                    own[name] = value
            for name in filter(_is_extra_state, list(given)):
                part.tree.module.get_submodule(name.rpartition(".")[0]).set_extra_state(given.pop(name))
            if given:
                # A module that takes data of its own back looks for all of it, also for what was not loaded.
                part.tree.module.load_state_dict(own | given, strict=False)

    def _loadable(self, part: _Part, stored: Stored) -> Iterator[torch.Tensor]:
        """The tensors that the checkpoint has, under one of their names, in the shape that the module has."""
        for _, plain, tensor in part.state():
            fqn = join_fqn(self.fqn, plain)
            if isinstance(tensor, torch.Tensor):
                found = ((stored.tensors.get(name), part) for name, part in _tensors_of(fqn, tensor).items())
                if all(record is not None and record.shape == tuple(part.shape) for record, part in found):
                    yield tensor

    def _held(self) -> _Held:
        held, self._named = self._named or self._read(), None
        return held

    def _read(self) -> _Held:
        """What the modules hold now."""
        found: list[tuple[str, str, torch.Tensor]] = []
        extra: dict[str, Any] = {}
        facts: dict[str, Any] = {}
        known: dict[int, tuple[str, dict[str, Any]]] = {}
        prefix = f"{self.fqn}." if self.fqn else ""
        starts: list[int] = []
        for part in self._parts:
            starts.append(len(found))
            plain_tensors = part.plain_tensors()
            if plain_tensors is not None:
                found += [(name, prefix + name, tensor) for name, tensor in plain_tensors.items()]
                continue
            live = None if part.tree.is_saved_as_usual else part.tree.live()
            for name, plain, value in part.state():
                fqn = prefix + plain
                is_plain = type(value) in PLAIN_TENSORS and not name.endswith(_EXTRA_STATE)
                if not is_plain and _is_data(name, value):
                    extra[fqn] = value
                    continue
                if not is_plain:
                    _refuse_lazy(fqn, value)
                is_live = live is None or id(value) in live
                tensor = value if is_live else self._detached.setdefault(fqn, value)
                if is_plain or not is_subclass(tensor):
                    found.append((name, fqn, tensor))
                    continue
                # Taken apart once, so that it is seen to be tied where it has several names.
                if id(tensor) not in known:
                    known[id(tensor)] = fqn, flat_parts(fqn, tensor)
                first, of_first = known[id(tensor)]
                parts = {fqn + of_part.removeprefix(first): part for of_part, part in of_first.items()}
                facts |= {of_part: part for of_part, part in parts.items() if is_facts(of_part)}
                found += [(name, of_part, part) for of_part, part in parts.items() if not is_facts(of_part)]
        stages: dict[str, int] = {}
        for part, start, end in zip(self._parts, starts, [*starts[1:], len(found)], strict=True):
            if part.stage is not None:
                stages |= dict.fromkeys((fqn for _, fqn, _ in found[start:end]), part.stage)
        return _Held(*_untied(found), extra, facts, stages)


def _tensors_of(fqn: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor by its FQN, or the inner tensors of a subclass by theirs."""
    if not is_subclass(tensor):
        return {fqn: tensor}
    return {name: part for name, part in flat_parts(fqn, tensor).items() if not is_facts(name)}


def _untied(found: Sequence[tuple[str, str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by FQN, and the other FQNs of tied ones; of each the module's own name, its FQN and itself are given."""
    tensors = {fqn: tensor for _, fqn, tensor in found}
    addresses = [_address(tensor) for tensor in tensors.values()]
    if len(set(addresses)) == len(found):  # no two share a name, or memory: nearly always
        return tensors, {}
    tensors = {}
    aliases: dict[str, str] = {}
    owners: dict[object, str] = {}
    for (name, fqn, tensor), memory in zip(found, _memories([tensor for _, _, tensor in found]), strict=True):
        if fqn in tensors and tensors[fqn] is not tensor:
            raise unsupported(
                fqn,
                f"the name of two tensors, one of which the module calls {name!r}",
                "give the stages of a pipeline the names that their layers have in the whole model, and "
                "rename what differs from another name only by what a wrapper puts into it",
            )
        owner = owners.setdefault(memory, fqn)
        if owner == fqn:
            tensors[fqn] = tensor
        else:
            aliases[fqn] = owner
    return tensors, aliases


def _refuse_lazy(fqn: str, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        advice = "call forward once, so that its shape is known"
        raise unsupported(fqn, "a parameter of a lazy module that has not been initialised", advice)


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def _is_data(name: str, value: Any) -> bool:
    """Whether something in a state_dict is no tensor of the module: extra state, or what its own hooks put there."""
    return not isinstance(value, torch.Tensor) or _is_extra_state(name)


def _part_of(fqn: str, stage: Stage) -> _Part:
    tree = tree_of(stage.module)
    if any(isinstance(child, FullyShardedDataParallel) for _, child in tree.submodules):
        raise unsupported(fqn, "an FSDP1 module", "use fully_shard (FSDP2); FSDP1 is not yet supported")
    tree.reshard()
    wrapped = [name for name, child in tree.submodules if isinstance(child, DistributedDataParallel)]
    ddp_prefixes = sorted((f"{join_fqn(name, 'module')}." for name in wrapped), key=len, reverse=True)
    is_wrapped = bool(wrapped) or any(plain_name(name) != name for name, _ in tree.submodules)
    return _Part(tree, ddp_prefixes, stage.number, is_wrapped)


def _memories(tensors: Sequence[torch.Tensor]) -> list[object]:
    """Of each tensor what two tied ones share: the same object, or the same elements of the same storage.

    Most tensors start at an address of their own. Only the others are looked at closely.
    """
    addresses = [_address(tensor) for tensor in tensors]
    num_at = Counter(addresses)
    return [
        id(tensor) if num_at[address] == 1 else _memory(tensor)
        for tensor, address in zip(tensors, addresses, strict=True)
    ]


def _address(tensor: torch.Tensor) -> int:
    local = tensor if type(tensor) in PLAIN_TENSORS or not isinstance(tensor, DTensor) else tensor._local_tensor
    return local.data_ptr() if type(local) in PLAIN_TENSORS and local.layout is torch.strided else 0


def _memory(tensor: torch.Tensor) -> object:
    """What two tied tensors share, with everything that tells them from views that only start at the same place."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.is_meta or local.numel() == 0 or local.layout is not torch.strided:
        return id(tensor)
    return local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), tensor.dtype


def materialise(fqn: str, module: torch.nn.Module, wanted: Collection[int]) -> None:
    """Gives memory to what is on the meta device and `wanted` (by id), keeping parameters the objects that they are.

    What a load does not fill stays on the meta device, where using it fails. A warning names buffers that are not
    persistent, which no checkpoint holds.
    """
    if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or id(tensor) not in wanted:
            return tensor
        default = torch.get_default_device()
        device = torch.device("cpu") if default.type == "meta" else default
        if isinstance(tensor, DTensor):
            device = torch.device(tensor.device_mesh.device_type)
        if is_subclass(tensor):
            return with_new_memory(tensor, lambda inner: torch.empty_like(inner, device=device))
        return torch.empty_like(tensor, device=device)

    # Swapping keeps identity: optimizers that were built on meta parameters, and ties, stay valid.
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module._apply(allocate)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    persistent = module.state_dict(keep_vars=True)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta and name not in persistent]
    if left:
        warnings.warn(
            f"{fqn}: buffers {left} are not persistent, so no checkpoint holds them; they are still on the meta "
            "device: compute them again before using the model",
            stacklevel=2,
        )
