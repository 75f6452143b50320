"""Optimizers, by parameter name: state of each parameter as tensors, hyperparameters as plain data.

Takes any torch optimizer (or a list of them) whose parameters belong to modules of the same state, or that was built
from `named_parameters()`. State tensors lie like their parameter, or are whole (steps, factored moments); what is
neither (LBFGS's lists) is a tree. A fresh optimizer gets its state on load, without running a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, is_at_or_below
from bytecheckpoint.adapters.expectation import EntryContents, Expectation, Problem
from bytecheckpoint.adapters.frameworks.flat_optimizer_state import FlatState, differing_error
from bytecheckpoint.adapters.frameworks.flat_parameters import FlatOptimizer
from bytecheckpoint.adapters.frameworks.fsdp1 import shows_parameter
from bytecheckpoint.adapters.native.parameter_names import (
    MODEL_FQN,
    NamesParameters,
    OptimizedParameters,
    ParameterNames,
    name_parameters,
)
from bytecheckpoint.adapters.optimizers.forms import OWN, Form
from bytecheckpoint.adapters.optimizers.hyperparameters import agreed, by_first_parameter, set_hyperparameters
from bytecheckpoint.adapters.optimizers.kinds import Clash, clashes, problem_of
from bytecheckpoint.adapters.optimizers.param_state import (
    CreatedTensors,
    WholeState,
    collect_state,
    refuse_zero_redundancy,
)
from bytecheckpoint.adapters.optimizers.step_hooks import check_steps_wait
from bytecheckpoint.adapters.optimizers.stored_optimizer import StoredOptimizer, is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_data import encode_plain, keep_in_tree
from bytecheckpoint.adapters.shards import LocalShard, LocalShards
from bytecheckpoint.manifest.plain_wire import unsupported


class OptimizerEntry:
    """One optimizer, or several that share a name in the state."""

    def __init__(
        self,
        fqn: str,
        optimizers: Sequence[torch.optim.Optimizer | FlatOptimizer],
        *,
        framework: str = "",
        link: Callable[[Sequence[NamesParameters]], None] = lambda _: None,
    ) -> None:
        """`link` is called with the modules of the state before they name the parameters."""
        self.fqn = fqn
        self.wrapped = [each for each in optimizers if isinstance(each, FlatOptimizer)]
        """The optimizers that frameworks have wrapped."""
        self.framework = framework or ("deepspeed" if self.wrapped else "")
        """Name of the framework whose adapter has read the optimizers; empty for torch's own."""
        self._link = link
        self.optimizers = [each.optimizer if isinstance(each, FlatOptimizer) else each for each in optimizers]
        self._optimized = OptimizedParameters({}, {})
        """What lies in each tensor of the param_groups."""
        self._has_model = False
        """True if there is a `model`, which may have the names of other modules in it."""
        self._created: CreatedTensors = {}
        self._one_values: dict[str, Any] = {}
        """What flat memory has one of, by FQN."""
        self._found: StoredOptimizer | None = None
        """What the one load that this entry is made for has found."""
        self._is_prepared = False
        self._clashes: Mapping[int, Sequence[Clash]] | None = None

    def name_parameters(self, modules: Sequence[NamesParameters]) -> None:
        """Takes the names of the parameters from the modules of the state.

        Raises CheckpointSaveError (unsupported_value) for a parameter that none of them has, and one that two
        optimizers of this entry hold.
        """
        for optimizer in self.optimizers:
            refuse_zero_redundancy(self.fqn, optimizer)
        self._link(modules)
        self._optimized = name_parameters(self.fqn, self._parameters(), modules)
        self._has_model = any(module.fqn == MODEL_FQN for module in modules)

    def check_can_be_lazy(self) -> None:
        """Raises CheckpointSaveError (unsupported_value) where an optimizer would not wait for a lazy snapshot."""
        check_steps_wait(self.fqn, self.optimizers, self.wrapped if self.framework == "deepspeed" else ())

    def optimizer_forms(self) -> Mapping[str, Form]:
        """Returns the library's own form, by parameter."""
        return {self.fqn: OWN}

    def collect(self) -> EntryContents:
        shards = LocalShards()
        self._one_values.clear()
        tensors: list[tuple[str, torch.Tensor]] = []
        keys: set[str] = set()
        tree: dict[str, Any] = {"state": {}, "groups": {}}
        for optimizer in self.optimizers:
            for _, parameter, names in self._named(optimizer):
                state = optimizer.state.get(parameter)
                plain = collect_state(f"{self.fqn}.state.{names.name}.", state, tensors, keys) if state else None
                if plain:
                    tree["state"][names.name] = plain
        shards.add_all(tensors)
        num_whole = len(shards.found)
        for optimizer in self.optimizers:
            for flat in self._flat_states(optimizer):
                tree["state"].update(flat.collect(shards))
        by_optimizer = map(self._param_groups, self.optimizers)
        groups = ((group, self._optimized.names(parameters)) for group, parameters in chain.from_iterable(by_optimizer))
        tree["groups"] = by_first_parameter(self.fqn, groups)
        elsewhere = {
            fqn: names.name for names in self._optimized.all_names() if names.elsewhere for fqn in names.elsewhere
        }
        if elsewhere:
            tree["elsewhere"] = elsewhere
        outside = [names.name for names in self._optimized.all_names() if self._has_model and names.is_outside_model]
        if outside:
            tree["outside_model"] = dict.fromkeys(outside)  # a dict, because dicts of ranks are united
        if self.wrapped:
            tree["facts"] = self._facts()
        all_fqns = {fqn for fqn, _ in tensors}
        if len(all_fqns) < len(tensors):
            fqn = next(fqn for fqn, number in Counter(fqn for fqn, _ in tensors).items() if number > 1)
            raise unsupported(fqn, "the name of two values", "rename a parameter or a key of its state")
        encoded = encode_plain(tree, self.fqn, keep_in_tree)  # a learning rate may be a tensor
        all_fqns.update(shard.fqn for shard in shards.found[num_whole:])
        return EntryContents(shards.found, all_fqns, {self.fqn: ("shared", encoded)})

    def _facts(self) -> dict[str, Any]:
        """Those of all wrapped optimizers, which a list of them has once."""
        facts: dict[str, Any] = {}
        for key, value in chain.from_iterable(each.facts().items() for each in self.wrapped):
            fqn = f"{self.fqn}.facts.{key}"
            first = facts.setdefault(key, value)
            if encode_plain(first, fqn, keep_in_tree) != encode_plain(value, fqn, keep_in_tree):
                what = f"{value} for one optimizer of a list, and {first} for another"
                raise unsupported(fqn, what, "give each optimizer a name of its own in the state")
        return facts

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        padding: list[LocalShard] = []
        expectation = Expectation([], set(), [], padding=padding)
        found = self._find(checkpoint)
        if found is None:
            why = checkpoint.why_left_out(self.fqn)
            if why is not None:  # its tensors are there, and no use without its groups
                claims = {name for name in checkpoint.all_names() if is_at_or_below(name, {self.fqn})}
                problem = Problem("conflict", self.fqn, f"{self.fqn}: {why}")
                return expectation._replace(claims=claims, problems=[problem])
            text = f"{self.fqn}: the checkpoint holds no optimizer under this name"
            if checkpoint.entry_tree(f"{self.fqn}.1") is not None:
                text += ", but several with numbers: give each a name, as in "
                text += f'{{"{self.fqn}": {{"0": first, "1": second}}}}'
            return expectation._replace(problems=[Problem("missing_key", self.fqn, text)])
        expectation.claims.update(found.shared_claims())
        expectation.problems.extend(found.number_problems())
        for names in self._optimized.all_names():
            expectation.claims.update(found.claims(names))
        clashing = list(chain.from_iterable(self._clashing(found).values()))
        if clashing:
            kinds = {type(optimizer).__name__ for optimizer in self.optimizers}
            expectation.problems.append(problem_of(self.fqn, kinds, clashing))
        for optimizer in self.optimizers:
            for state in self._whole_states(optimizer, found):
                of_parameter = state.expect()
                expectation.shards.extend(of_parameter.shards)
                expectation.problems.extend(of_parameter.problems)
            for flat in self._flat_states(optimizer, found):
                of_flat = flat.expect(found)
                expectation.shards.extend(of_flat.shards)
                expectation.problems.extend(of_flat.problems)
                padding += of_flat.padding
            for _, parameters in self._param_groups(optimizer):
                expectation.problems.extend(self._hyperparameters(parameters, found, checkpoint)[1])
        return expectation

    def prepare(self, checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        self._is_prepared = True
        found = self._find(checkpoint)
        if found is None:
            return
        for state in self._loadable(found):
            state.prepare()
        for optimizer in self.optimizers:
            for flat in self._flat_states(optimizer, found):
                flat.prepare(found)

    def finish(self, checkpoint: CheckpointView) -> None:
        """Raises CheckpointMismatchError (conflict) at the end, where flat memory has one value for parameters that do
        not agree on it.
        """
        found = self._find(checkpoint)
        if found is None:
            return
        if found.has_subclasses and not self._is_prepared:  # a rank that holds nothing has nothing to read for them
            self.prepare(checkpoint, ())
        for state in self._loadable(found):
            state.finish(checkpoint)
        differing: list[str] = []
        for optimizer in self.optimizers:
            for flat in self._flat_states(optimizer, found):
                differing += flat.finish(found)
            for group, parameters in self._param_groups(optimizer):
                if id(group) not in self._clashing(found):
                    set_hyperparameters(group, self._hyperparameters(parameters, found, checkpoint)[0])
        for each in self.wrapped:
            each.take_facts(found.facts())
        if differing:
            raise differing_error(differing)

    def _whole_states(self, optimizer: torch.optim.Optimizer, found: StoredOptimizer) -> Iterator[WholeState]:
        clashing = self._clashing(found)
        for group, parameter, names in self._named(optimizer):
            if id(group) not in clashing and not found.is_excluded(names):
                yield WholeState(
                    self.fqn, optimizer, parameter, group=group, names=names, found=found, created=self._created
                )

    def _clashing(self, found: StoredOptimizer) -> Mapping[int, Sequence[Clash]]:
        """The parameters that were saved by another kind of optimizer, by the id of their group."""
        if self._clashes is None:
            every = [(each, *of_group) for each in self.optimizers for of_group in self._param_groups(each)]
            found_in = {
                id(group): clashes(optimizer, group, self._optimized.names(parameters), found)
                for optimizer, group, parameters in every
            }
            self._clashes = {key: of_group for key, of_group in found_in.items() if of_group}
        return self._clashes

    def _loadable(self, found: StoredOptimizer) -> Iterator[WholeState]:
        """Of the parameters whose state is loaded."""
        for optimizer in self.optimizers:
            yield from (state for state in self._whole_states(optimizer, found) if state.fits)

    def _find(self, checkpoint: CheckpointView) -> StoredOptimizer | None:
        if self._found is None:
            tree = checkpoint.object_tree(self.fqn)
            if tree is not None and is_optimizer_tree(tree.tree):
                held = [group for optimizer in self.optimizers for group in self._param_groups(optimizer)]
                names = [self._optimized.names(parameters) for _, parameters in held]
                has_order = all(self._has_order(memory) for _, parameters in held for memory in parameters)
                self._found = StoredOptimizer(self.fqn, tree, checkpoint, names, has_order=has_order)
        return self._found

    def _has_order(self, memory: torch.Tensor) -> bool:
        """True if it stands where its parameter would stand in an optimizer of the unwrapped model."""
        return id(memory) not in self._optimized.flat or shows_parameter(memory)

    def _hyperparameters(
        self, parameters: Sequence[torch.Tensor], found: StoredOptimizer, checkpoint: CheckpointView
    ) -> tuple[dict[str, Any], list[Problem]]:
        return agreed(self._optimized.names(parameters), found, checkpoint)

    def _param_groups(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[dict[str, Any], Sequence[torch.Tensor]]]:
        """The param_groups, each with the parameters in it."""
        wrapped = next((each for each in self.wrapped if each.optimizer is optimizer), None)
        if wrapped is not None:
            yield from zip(optimizer.param_groups, wrapped.parameters, strict=True)
            return
        for group in optimizer.param_groups:
            yield group, group["params"]

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str | None]]:
        for optimizer in self.optimizers:
            for group, parameters in self._param_groups(optimizer):
                names = group.get("param_names") or []
                is_of_them = len(names) == len(parameters)  # a wrapper puts other parameters in their place
                yield from zip(parameters, names if is_of_them else [None] * len(parameters), strict=True)

    def _named(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor, ParameterNames]]:
        """The parameters that are no flat memory, each with its group."""
        whole = self._optimized.whole
        for group, parameters in self._param_groups(optimizer):
            for parameter in parameters if whole else ():
                names = whole.get(id(parameter))
                if names is not None:
                    yield group, parameter, names

    def _flat_states(
        self, optimizer: torch.optim.Optimizer, found: StoredOptimizer | None = None
    ) -> Iterator[FlatState]:
        """Of all flat memory, or of what can be loaded of `found`."""
        flat = self._optimized.flat
        clashing = self._clashing(found) if flat and found is not None else {}
        for group, parameters in self._param_groups(optimizer) if flat else ():
            for memory in parameters if id(group) not in clashing else ():
                optimized = flat.get(id(memory), ())
                if any(of_parameter.part.numel for of_parameter in optimized):
                    yield FlatState(
                        self.fqn, optimizer, memory, group=group, optimized=optimized, one_values=self._one_values
                    )
