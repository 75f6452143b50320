"""Modules: their parameters, persistent buffers and extra state, under names that wrappers do not change.

Takes plain modules, DistributedDataParallel, FullyShardedDataParallel, `fully_shard`, tensor-parallel and compiled
ones, and lists of modules that are stages of a pipeline, whose FQNs are then those of the whole model. Tied tensors are
stored once.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTree
from bytecheckpoint.adapters.expectation import EntryContents, Expectation, RankMissing, Scope, not_stored, rank_missing
from bytecheckpoint.adapters.frameworks import deepspeed
from bytecheckpoint.adapters.frameworks.flat_parameters import (
    FlatModule,
    FlatOptimizer,
    FlatParamMemory,
    NamedPart,
    merged,
)
from bytecheckpoint.adapters.native.module_parts import EXTRA_STATE, ModulePart, is_data, is_extra_state, part_of
from bytecheckpoint.adapters.native.module_walk import Stage, materialize
from bytecheckpoint.adapters.native.subclass_flatten import flat_parts, is_facts, is_subclass, tied_subclasses
from bytecheckpoint.adapters.native.subclass_match import Refusals, refusals
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.shard_columns import ShardBlocks, WholeTensors
from bytecheckpoint.adapters.shards import PLAIN_TENSORS, LocalShard, LocalShards, refuse_lazy
from bytecheckpoint.adapters.tied import split_tied, with_flat_ties
from bytecheckpoint.adapters.torch_types import DTensor
from bytecheckpoint.adapters.tree_loader import ABSENT, TreeTarget, keep_for_rank
from bytecheckpoint.errors import and_more
from bytecheckpoint.manifest.plain_wire import join_fqn

_NUM_SHOWN = 3


class _ModuleTensors(NamedTuple):
    """Contents of the modules of an entry, live."""

    tensors: Mapping[str, torch.Tensor]
    """Tensors by FQN; of tied ones the first."""
    aliases: Mapping[str, str]
    """FQN of a tied tensor -> FQN of the first tensor with the same memory."""
    extra: Mapping[str, Any]
    """Extra state, by FQN."""
    flat: Sequence[tuple[str, FlatParamMemory]]
    """Pairs of an FQN and a flat parameter."""
    facts: Mapping[str, Any]
    """Metadata of tensor subclasses, whose inner tensors are among the tensors, by FQN."""
    stages: Mapping[str, int]
    """Number of the pipeline stage by FQN, where it is known."""
    other_names: Mapping[str, Sequence[str]]
    """FQN of a tensor -> the aliases of it."""

    def names(self) -> set[str]:
        """Returns the FQNs of all tensors, aliases and flat parameters too."""
        return {*self.tensors, *self.aliases, *(fqn for fqn, _ in self.flat)}

    def stored_name(self, fqn: str, checkpoint: CheckpointView) -> str:
        """Returns the first of a tensor's names that the checkpoint has; `fqn` if it has none of them. `fqn` is the
        tensor's first name, not an alias, which is returned as it is.
        """
        if fqn not in self.other_names:
            return fqn
        names = (fqn, *self.other_names[fqn])
        return next((name for name in names if name in checkpoint.tensors), fqn)


class ModuleEntry:
    """One module, or the stages of a pipeline that this rank holds."""

    def __init__(self, fqn: str, stages: Sequence[Stage]) -> None:
        self.fqn = fqn
        self.engines = [stage.module for stage in stages if deepspeed.is_engine(stage.module)]
        """DeepSpeed engines among the modules."""
        self.framework = "deepspeed" if self.engines else ""
        """Name of the framework whose adapter reads the modules; empty without an engine."""
        self._parts = [part_of(fqn, stage) for stage in stages]
        self._extra = TreeTarget()
        self._detached: dict[str, torch.Tensor] = {}
        """Tensors that state_dict hooks made: no live memory, so a load hands them to load_state_dict."""
        self._named: _ModuleTensors | None = None
        """Tensors that were read to name parameters, for the one collect or expect that follows at once."""
        self._refused = Refusals([], ())

    def find_flat(self, optimizers: Sequence[FlatOptimizer]) -> None:
        """Finds the parameters of the modules that these optimizers, an engine of the entry or ZeRO 3 keep flat.

        Raises CheckpointSaveError (unsupported_value) for flat memory that cannot be read, and for a parameter of which
        DeepSpeed has a full-precision copy that was not found.
        """
        for index, part in enumerate(self._parts):
            if part.flat is None and (optimizers or self.engines or deepspeed.has_traces(part.tree)):
                self._parts[index] = part._replace(flat=self._flat_of(part, optimizers))

    def _flat_of(self, part: ModulePart, optimizers: Sequence[FlatOptimizer]) -> FlatModule | None:
        found = part.tree.module.named_parameters(remove_duplicate=False)
        named = [(part.plain_name(name), parameter) for name, parameter in found]
        known = {id(each.optimizer): each for each in optimizers}.values()  # one may have several names
        flat = [of_module for each in known if (of_module := each.module(named)) is not None]
        engine = next((each for each in self.engines if deepspeed.unwrapped(each) is part.tree.module), None)
        alone = deepspeed.module_alone(self.fqn, deepspeed.not_in(named, flat), engine)
        flat += [] if alone is None else [alone]
        deepspeed.refuse_unknown(self.fqn, named, flat)
        return merged(flat)

    def parameters(self) -> Iterator[tuple[torch.nn.Parameter, str]]:
        """Yields every parameter that is not flat memory, and its name in the entry. A tied one comes once, under
        its first name; where the entry has several stages, once for each stage that holds it.
        """
        for part in self._parts:
            replaced = () if part.flat is None else part.flat.replaced
            for name, parameter in part.tree.named_parameters():
                if id(parameter) not in replaced:
                    yield parameter, part.plain_name(name) if part.is_wrapped else name

    @cached_property
    def parameter_names(self) -> Mapping[int, str]:
        """The names in the entry of all parameters that are not flat memory, by id; of a tied one the first. Found
        once, because a state may have an optimizer for each parameter, and `find_flat` comes before.
        """
        names: dict[int, str] = {}
        for parameter, name in self.parameters():
            names.setdefault(id(parameter), name)  # two stages may have it
        return names

    def in_optimizer(self) -> Iterator[tuple[int, Sequence[NamedPart]]]:
        """Yields the ids of tensors that an optimizer has in place of flat parameters, and what lies in each."""
        for part in self._parts:
            if part.flat is not None:
                yield from part.flat.in_optimizer.items()

    def buffers(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            yield from part.tree.buffers()

    def tied_names(self) -> dict[str, str]:
        """Returns the first name of each tied tensor by its other names, all without the FQN of the entry in front."""
        self._named = held = self._named or self._read()
        prefix = len(self.fqn) + 1 if self.fqn else 0
        tied = {**held.aliases, **tied_subclasses(held.facts, held.aliases, held.tensors)}
        return {alias[prefix:]: fqn[prefix:] for alias, fqn in tied.items()}

    def collect(self) -> EntryContents:
        held = self._held()
        of_tensors, shards = WholeTensors(tuple(held.tensors), list(held.tensors.values())), LocalShards()
        for fqn, flat in held.flat:
            shards.found += flat.part.shards(fqn, flat.memory)
        on_tensor = partial(keep_for_rank, shards)
        encoded: dict[str, tuple[Scope, bytes]] = {
            fqn: ("either", encode_plain(value, fqn, on_tensor)) for fqn, value in held.extra.items()
        }
        encoded |= {fqn: ("shared", encode_plain(value, fqn, on_tensor)) for fqn, value in held.facts.items()}
        names = {name for fqn, value in held.extra.items() for name in leaves(value, fqn)}
        names |= {*held.names(), *held.facts}
        return EntryContents(ShardBlocks([of_tensors, shards.found]), names, encoded, held.aliases, held.stages)

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        held = self._held()
        own = {**held.facts, **held.tensors} if held.facts else {}
        self._refused = refused = refusals(own, checkpoint, held.aliases, held.other_names)
        problems = refused.problems
        of_module = LocalShards(with_addresses=True)
        resized = self._resized(held, checkpoint)
        targets = {fqn: torch.empty(shape, dtype=held.tensors[fqn].dtype, device="meta") for fqn, shape in resized}
        taken = ((fqn, tensor) for fqn, tensor in {**held.tensors, **targets}.items() if not refused.has(fqn))
        of_module.add_all((held.stored_name(fqn, checkpoint), tensor) for fqn, tensor in taken)
        shards = of_module.found
        for fqn, flat in held.flat:
            shards += flat.part.shards(held.stored_name(fqn, checkpoint), flat.memory)
        copies: list[LocalShard] = []
        for copy in (copy for part in self._parts if part.flat is not None for copy in part.flat.copies):
            name = held.stored_name(join_fqn(self.fqn, copy.name), checkpoint)
            copies += copy.part.shards(name, copy.memory)
        claims, skipped = held.names() | set(held.facts), set[str]()
        for fqn in held.extra:
            found = checkpoint.entry_tree(fqn)
            if found is None:
                problems.append(not_stored(fqn))
            elif found.is_taken:
                of_tree = self._extra.expect(found, {}, checkpoint)
                shards += of_tree.shards
                claims |= of_tree.claims
                skipped |= of_tree.skipped
                problems += of_tree.problems
                missing = [leaf for leaf in leaves(found.tree, "").values() if isinstance(leaf, RankMissing)]
                problems += [rank_missing(fqn, missing[0].num_saved)] if missing else []
        return Expectation(shards, claims, problems, copies, skipped=skipped)

    def _resized(self, held: _ModuleTensors, checkpoint: CheckpointView) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the FQNs of the tensors that get another shape in a load, with that shape."""
        resizable = set().union(*(part.tree.resizable() for part in self._parts))
        found: list[tuple[str, tuple[int, ...]]] = []
        for fqn, tensor in held.tensors.items() if resizable else ():
            stored = checkpoint.tensors.get(held.stored_name(fqn, checkpoint))
            if id(tensor) in resizable and stored is not None and stored.shape != tuple(tensor.shape):
                found.append((fqn, stored.shape))
        return found

    def prepare(self, checkpoint: CheckpointView, refused: Collection[str]) -> None:
        held = self._read()
        for fqn, shape in self._resized(held, checkpoint):
            if fqn not in refused:
                held.tensors[fqn].resize_(shape)

        def is_filled(fqn: str, tensor: torch.Tensor) -> bool:
            name = held.stored_name(held.aliases.get(fqn, fqn), checkpoint)
            found = checkpoint.tensors.get(name)
            return found is not None and found.shape == tuple(tensor.shape) and name not in refused

        for fqn in held.extra:
            found = checkpoint.entry_tree(fqn)
            if found is not None:
                self._extra.prepare(found, {}, checkpoint)
        for part in self._parts:
            filled = set()
            for _, plain, tensor in part.state():
                fqn = join_fqn(self.fqn, plain)
                if not isinstance(tensor, torch.Tensor) or self._refused.has(f"{fqn}."):
                    continue
                inner = flat_parts(fqn, tensor) if is_subclass(tensor) else {fqn: tensor}  # filled only as a whole
                if all(is_facts(name) or is_filled(name, each) for name, each in inner.items()):
                    filled.add(id(tensor))
            materialize(self.fqn, part.tree.module, filled)

    def finish(self, checkpoint: CheckpointView) -> None:
        for part in self._parts:
            if not self._detached and part.plain_tensors() is not None:
                self._run_load_hooks(part, checkpoint)  # all are filled in place
                continue
            new_values: dict[str, Any] = {}
            own: dict[str, Any] = {}
            for name, plain, value in part.state():
                fqn = join_fqn(self.fqn, plain)
                found = checkpoint.entry_tree(fqn) if is_data(name, value) else None
                if fqn in self._detached:
                    new_values[name] = self._detached[fqn]
                elif (filled := self._filled(found, fqn, value, checkpoint)) is not ABSENT:
                    new_values[name] = filled
                elif is_data(name, value) and not is_extra_state(name):
                    own[name] = value
            for name in filter(is_extra_state, list(new_values)):
                part.tree.module.get_submodule(name.rpartition(".")[0]).set_extra_state(new_values.pop(name))
            if new_values:
                # A module that takes data of its own back looks for all of it, also for what was not loaded.
                state = OrderedDict(own | new_values)
                # Hazard: without versions, modules that are not in it migrate what the load has put in place.
                state._metadata = part.tree.versions()  # type: ignore[attr-defined]
                result = part.tree.module.load_state_dict(state, strict=False)
                left = new_values.keys() & set(getattr(result, "unexpected_keys", ()))
                self._warn_of_left(part, {name: new_values[name] for name in left}, checkpoint)
            elif part.flat is None:
                self._run_load_hooks(part, checkpoint)
            if part.flat is not None:
                part.flat.finish()

    def _warn_of_left(self, part: ModulePart, left: Mapping[str, Any], checkpoint: CheckpointView) -> None:
        """Warns of loaded values that load_state_dict() did not take, where the module still has others: its
        state_dict() made them of what no load fills, as bitsandbytes does of the offset of doubly quantized scales.
        """
        shown = ((join_fqn(self.fqn, plain), name, now) for name, plain, now in (part.state() if left else ()))
        loaded = (each for each in shown if each[0] in checkpoint.tensors or each[0] not in self._detached)
        differ = [fqn for fqn, name, now in loaded if name in left and not _same(left[name], now)]
        if differ:
            warnings.warn(
                f"{and_more(differ, _NUM_SHOWN)}: the module's load_state_dict() does not take it, and it differs from "
                "the checkpoint: build the module with the values of the checkpoint, as from_pretrained does, or give "
                "its class a _load_from_state_dict() that takes them",
                stacklevel=2,
            )

    def _filled(self, found: StoredTree | None, fqn: str, value: Any, checkpoint: CheckpointView) -> Any:
        """Returns the data that takes the place of a value; ABSENT if none is loaded."""
        if found is None or not found.is_taken:
            return ABSENT
        return self._extra.filled(found, leaves(value, fqn), checkpoint)

    def _run_load_hooks(self, part: ModulePart, checkpoint: CheckpointView) -> None:
        """Lets modules compute what they derive from their tensors, as after load_state_dict(), if any are loaded."""
        hooks = part.tree.load_hooks()
        if hooks and not self._read().names().isdisjoint(checkpoint.tensors):
            for hook in hooks:
                hook()

    def _held(self) -> _ModuleTensors:
        """Returns what `tied_names` has read, and forgets it; else what `_read` finds now."""
        held, self._named = self._named or self._read(), None
        return held

    def _read(self) -> _ModuleTensors:
        """Finds all tensors, flat parameters and other data of the modules."""
        found: list[tuple[str, str, torch.Tensor]] = []
        extra: dict[str, Any] = {}
        flat: list[tuple[str, FlatParamMemory]] = []
        flat_ties: list[tuple[str, str]] = []
        facts: dict[str, Any] = {}
        stages: dict[str, int] = {}
        known: dict[int, tuple[str, dict[str, Any]]] = {}
        prefix = f"{self.fqn}." if self.fqn else ""
        for part in self._parts:
            first = len(found)
            plain_tensors = part.plain_tensors()
            if plain_tensors is not None:
                found += [(name, prefix + name, tensor) for name, tensor in plain_tensors.items()]
            else:
                found += self._read_part(part, prefix, extra=extra, facts=facts, known=known)
            of_part = [] if part.flat is None else [(prefix + held.name, held) for held in part.flat.held]
            flat += of_part
            if part.flat is not None:
                flat_ties += [(prefix + alias, prefix + name) for alias, name in part.flat.aliases.items()]
            if part.stage is not None:
                stages |= dict.fromkeys((fqn for _, fqn, _ in found[first:]), part.stage)
                stages |= dict.fromkeys((fqn for fqn, _ in of_part), part.stage)
        tensors, aliases = split_tied(found)
        if flat:
            aliases = with_flat_ties(tensors, aliases, [fqn for fqn, _ in flat], flat_ties)
        other_names: dict[str, list[str]] = {}
        for alias, fqn in aliases.items():
            other_names.setdefault(fqn, []).append(alias)
        return _ModuleTensors(tensors, aliases, extra, flat, facts, stages, other_names)

    def _read_part(
        self,
        part: ModulePart,
        prefix: str,
        *,
        extra: dict[str, Any],
        facts: dict[str, Any],
        known: dict[int, tuple[str, dict[str, Any]]],
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yields, for each tensor, the module's own name, the FQN and the tensor; those that hooks made are noted in
        `_detached`. Adds other data to `extra`, facts of subclasses to `facts`, and their parts to `known`: each is
        taken apart once, so that a tensor with several names is recognized as tied.
        """
        live = None if part.tree.is_saved_as_usual else part.tree.live()
        for name, plain, value in part.state():
            fqn = prefix + plain
            is_plain = type(value) in PLAIN_TENSORS and not name.endswith(EXTRA_STATE)
            if not is_plain and is_data(name, value):
                extra[fqn] = value
                continue
            if not is_plain:
                refuse_lazy(fqn, value)
            is_live = live is None or id(value) in live
            tensor = value if is_live else self._detached.setdefault(fqn, value)
            if is_plain or not is_subclass(tensor):
                yield name, fqn, tensor
                continue
            if id(tensor) not in known:
                known[id(tensor)] = fqn, flat_parts(fqn, tensor)
            first, of_first = known[id(tensor)]
            for of_part, inner in of_first.items():
                own = fqn + of_part.removeprefix(first)
                if is_facts(own):
                    facts[own] = inner
                else:
                    yield name, own, inner


def _same(a: Any, b: Any) -> bool:
    """Returns True if two values of a state_dict are equal, to the bit."""
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        a, b = a.to_local(), b.to_local()
    return a is b or (type(a) is type(b) and encode_plain(a, "") == encode_plain(b, ""))
