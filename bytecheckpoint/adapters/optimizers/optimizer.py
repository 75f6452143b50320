"""Optimizers, by parameter name: state of each parameter as tensors, hyperparameters as plain data.

Takes any torch optimizer (or a list of them) whose parameters belong to modules of the same state, or that was built
from `named_parameters()`. State tensors lie like their parameter, or are whole (steps, factored moments); what is
neither (LBFGS's lists) is a tree. A fresh optimizer gets its state on load, without running a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, placeholder
from bytecheckpoint.adapters.expectation import EntryContents, Expectation, Problem, not_stored
from bytecheckpoint.adapters.frameworks.flat_optimizer_state import FlatParamState, differing_error
from bytecheckpoint.adapters.frameworks.flat_parameters import FlatOptimizer
from bytecheckpoint.adapters.frameworks.fsdp1 import shows_parameter
from bytecheckpoint.adapters.native.parameter_names import (
    MODEL_FQN,
    HoldsTensors,
    NamesParameters,
    OptimizedParameters,
    ParameterNames,
    name_parameters,
)
from bytecheckpoint.adapters.optimizers.forms import OWN, Form
from bytecheckpoint.adapters.optimizers.hyperparameters import (
    Clash,
    TornState,
    after_load,
    agreed,
    by_first_parameter,
    clash_problem,
    clashes,
    set_hyperparameters,
    subclass_clashes,
    tensors_to_load,
    torn_problem,
    torn_states,
)
from bytecheckpoint.adapters.optimizers.inner_optimizers import check_steps_wait
from bytecheckpoint.adapters.optimizers.param_state import (
    CreatedTensors,
    ParamGroup,
    ParamState,
    collect_state,
    refuse_zero_redundancy,
    warn_of_unsaved,
)
from bytecheckpoint.adapters.optimizers.stored_optimizer import StoredOptimizer, is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.adapters.shard_columns import ShardBlocks, WholeTensors
from bytecheckpoint.adapters.shards import LocalShard, LocalShards
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest.plain_wire import is_at_or_below, join_fqn, unsupported


class _Refused(NamedTuple):
    """The param_groups of which nothing is loaded, and why."""

    groups: Collection[int]
    """Their ids."""
    problems: Sequence[Problem]


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
        self.optimizers = [each.optimizer if isinstance(each, FlatOptimizer) else each for each in optimizers]
        self._link = link
        self._optimized = OptimizedParameters({}, {})
        """Parameters in each tensor of the param_groups."""
        self._has_model = False
        """True if the state has an entry `model`, whose parameters may have the FQNs of other entries' as names."""
        self._created: CreatedTensors = {}
        self._hyperparameters: dict[str, torch.Tensor] = {}
        """Memory that the load fills, by state FQN, for tensors of groups that lie in data files."""
        self._known_problems: set[str] = set()
        """FQNs of the hyperparameters that were problems before anything was read."""
        self._scalars: dict[str, Any] = {}
        """Scalars by FQN. Flat memory has one of each for several parameters."""
        self._found: StoredOptimizer | None = None
        """The optimizer in the checkpoint of the one load that this entry is made for."""
        self._is_prepared = False
        self._refused: _Refused | None = None
        self._left: set[int] = set()
        """Ids of parameters whose state is left as it is, because it lacks tensors that do not fit."""

    def name_parameters(self, modules: Sequence[NamesParameters], others: Sequence[HoldsTensors]) -> None:
        """Takes the names of the parameters from the modules of the state, and from the other entries with tensors.

        Raises CheckpointSaveError (unsupported_value) for a parameter that neither they nor its optimizer name, or
        that two optimizers of this entry hold, and for a ZeroRedundancyOptimizer.
        """
        for optimizer in self.optimizers:
            refuse_zero_redundancy(self.fqn, optimizer)
        self._link(modules)
        parameters: list[tuple[torch.Tensor, str | None]] = []
        for group in self._groups():
            names = group.values.get("param_names") or []
            are_all_named = len(names) == len(group.parameters)  # a wrapper puts other parameters in their place
            parameters += zip(group.parameters, names if are_all_named else [None] * len(group.parameters), strict=True)
        self._optimized = name_parameters(self.fqn, parameters, modules, others)
        self._has_model = MODEL_FQN in {*(module.fqn for module in modules), *(other.fqn for other in others)}

    def check_can_be_lazy(self) -> None:
        """Raises CheckpointSaveError (unsupported_value) where an optimizer would not wait for a lazy snapshot."""
        check_steps_wait(self.fqn, self.optimizers, self.wrapped if self.framework == "deepspeed" else ())

    def optimizer_forms(self) -> Mapping[str, Form]:
        """Returns the library's own form of optimizers, under the FQN of this entry."""
        return {self.fqn: OWN}

    def collect(self) -> EntryContents:
        shards = LocalShards()
        self._scalars.clear()
        tensors: list[tuple[str, torch.Tensor]] = []
        keys: set[str] = set()
        tree: dict[str, Any] = {"state": {}, "groups": {}}
        whole, prefix = self._optimized.whole, join_fqn(self.fqn, "state")
        for optimizer in {id(group.optimizer): group.optimizer for group in self._groups()}.values():
            warn_of_unsaved(self.fqn, optimizer)
        for group in self._groups() if whole else ():
            state_of = group.optimizer.state
            for parameter in group.parameters:
                names, state = whole.get(id(parameter)), state_of.get(parameter)
                if names is None or not state:
                    continue
                plain = collect_state(f"{prefix}.{names.name}.", state, tensors, keys)
                if plain:
                    tree["state"][names.name] = plain
        fqns = tuple(fqn for fqn, _ in tensors)
        whole_tensors = WholeTensors(fqns, [tensor for _, tensor in tensors])
        for flat in self._flat_states():
            tree["state"].update(flat.collect(shards))
        groups = ((group.values, self._optimized.names(group.parameters)) for group in self._groups())
        tree["groups"] = by_first_parameter(self.fqn, groups)
        all_names = list(self._optimized.all_names())
        elsewhere = {fqn: names.name for names in all_names if names.elsewhere for fqn in names.elsewhere}
        if elsewhere:
            tree["elsewhere"] = elsewhere
        outside = [names.name for names in all_names if names.is_outside_model] if self._has_model else []
        if outside:
            tree["outside_model"] = dict.fromkeys(outside)  # a dict, because dicts of ranks are united
        if self.wrapped:
            tree["facts"] = self._facts()
        all_fqns = set(fqns)
        if len(all_fqns) < len(tensors):
            fqn = next(fqn for fqn, number in Counter(fqns).items() if number > 1)
            raise unsupported(fqn, "the name of two values", "rename a parameter or a key of its state")
        encoded = encode_plain(tree, self.fqn)  # a learning rate may be a tensor
        all_fqns |= shards.names()
        return EntryContents(ShardBlocks([whole_tensors, shards.found]), all_fqns, {self.fqn: ("shared", encoded)})

    def _facts(self) -> dict[str, Any]:
        """Returns the other data (facts) that the frameworks of the wrapped optimizers save with them, by key. Raises
        CheckpointSaveError (unsupported_value) if two optimizers have different values of a key.
        """
        facts: dict[str, Any] = {}
        for key, value in chain.from_iterable(each.facts().items() for each in self.wrapped):
            fqn = f"{self.fqn}.facts.{key}"
            first = facts.setdefault(key, value)
            if encode_plain(first, fqn) != encode_plain(value, fqn):
                what = f"{value} for one optimizer of a list, and {first} for another"
                raise unsupported(fqn, what, "give each optimizer a name of its own in the state")
        return facts

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        stored = self._find(checkpoint)
        if stored is None:
            return self._not_found(checkpoint)
        padding: list[LocalShard] = []
        skipped: set[str] = set()
        claims, problems = set(stored.shared_claims()), stored.number_problems()
        expectation = Expectation([], claims, problems, padding=padding, skipped=skipped)
        parameters = list(self._optimized.all_names())
        claims.update(*map(stored.claims, parameters))
        left_out = () if checkpoint.takes_all else set(stored.excluded_claims(parameters))
        claims.update(left_out)
        skipped.update(fqn for fqn in left_out if fqn in checkpoint.tensors or fqn in checkpoint.tree_leaves)
        expectation.problems.extend(self._find_refused(stored).problems)
        targets: list[tuple[str, torch.Tensor]] = []
        for whole in self._param_states(stored):
            expectation.problems.extend(whole.expect(targets))
        shards = LocalShards(with_addresses=True)
        shards.add_all(targets)  # at once, as there may be 100,000 parameters
        expectation.shards.extend(shards.found)
        for of_state in (state.expect(stored) for state in self._flat_states(stored)):
            expectation.shards.extend(of_state.shards)
            expectation.problems.extend(of_state.problems)
            padding += of_state.padding
        for group in self._groups():
            of_group = self._optimized.names(group.parameters)
            _, problems = agreed(of_group, stored, checkpoint, {})
            expectation.problems.extend(problems)
            self._known_problems.update(problem.fqn for problem in problems)
            to_load = tensors_to_load(of_group, stored, checkpoint)
            for fqn in sorted(to_load - self._hyperparameters.keys()):
                tensor = checkpoint.tensors.get(fqn)
                if tensor is None:
                    expectation.problems.append(not_stored(fqn))
                else:
                    self._hyperparameters[fqn] = torch.empty_like(placeholder(tensor), device="cpu")
        made = LocalShards(with_addresses=True)
        made.add_all(self._hyperparameters.items())
        expectation.shards.extend(made.found)
        return expectation

    def _not_found(self, checkpoint: CheckpointView) -> Expectation:
        """Returns what the load reports where the checkpoint has no optimizer for this entry: no targets, a problem."""
        why = checkpoint.why_left_out(self.fqn)
        if why is not None:  # its tensors are there, and no use without its groups
            claims = {name for name in checkpoint.all_names() if is_at_or_below(name, {self.fqn})}
            return Expectation([], claims, [Problem("conflict", self.fqn, f"{self.fqn}: {why}")])
        text = f"{self.fqn}: the checkpoint holds no optimizer under this name"
        if checkpoint.entry_tree(f"{self.fqn}.1") is not None:
            text += ", but several with numbers: give each a name, as in "
            text += f'{{"{self.fqn}": {{"0": first, "1": second}}}}'
        return Expectation([], set(), [Problem("missing_key", self.fqn, text)])

    def prepare(self, checkpoint: CheckpointView, refused: Collection[str]) -> None:
        self._is_prepared = True
        stored = self._find(checkpoint)
        if stored is None:
            return
        for state in self._param_states(stored):
            if state.lacks_any(refused):  # without values a new tensor must not stay
                self._left.add(id(state.parameter))
            elif state.fits:
                state.prepare()
        for flat in self._flat_states(stored):
            flat.prepare(stored)

    def finish(self, checkpoint: CheckpointView) -> None:
        """Puts loaded values in place.

        Raises CheckpointMismatchError (conflict) at the end, if parameters disagree on a value of flat memory, or on a
        tensor of their group that lay in data files.
        """
        stored = self._find(checkpoint)
        if stored is None:
            return
        if stored.has_subclasses and not self._is_prepared:  # `prepare` is called only where a load creates memory
            self.prepare(checkpoint, ())
        for state in self._param_states(stored):
            if state.fits:
                state.finish(checkpoint)
        differing = [text for flat in self._flat_states(stored) for text in flat.finish(stored)]
        filled: dict[int, torch.Tensor] = {}
        disagreeing: list[str] = []
        for group in self._groups():
            if id(group.values) not in self._find_refused(stored).groups:
                parameters = self._optimized.names(group.parameters)
                values, problems = agreed(parameters, stored, checkpoint, self._hyperparameters)
                disagreeing += [problem.text for problem in problems if problem.fqn not in self._known_problems]
                set_hyperparameters(group.optimizer, group.values, values, filled)
        for each in self.wrapped:
            each.take_facts(stored.facts())
        if differing:
            raise differing_error(differing)
        if disagreeing:
            advice = "make the optimizer with a group for each value, or exclude what differs"
            raise CheckpointMismatchError(f"{'; '.join(disagreeing)}: {advice}", kind="conflict")

    def _find(self, checkpoint: CheckpointView) -> StoredOptimizer | None:
        if self._found is None:
            tree = checkpoint.object_tree(self.fqn)
            if tree is not None and is_optimizer_tree(tree.tree):
                groups = [group.parameters for group in self._groups()]
                # True if each is at the position that its parameter would have in an optimizer of the unwrapped model.
                flat = self._optimized.flat
                has_order = all(id(each) not in flat or shows_parameter(each) for of_one in groups for each in of_one)
                names = list(map(self._optimized.names, groups))
                self._found = StoredOptimizer(self.fqn, tree, checkpoint, names, has_order=has_order)
        return self._found

    def trained_fqns(self, checkpoint: CheckpointView) -> set[str]:
        """Returns, of parameters with several state FQNs, those under which the checkpoint's optimizer has them."""
        stored = self._find(checkpoint)
        several = (names.fqns for names in self._optimized.all_names() if len(names.fqns) > 1)
        return set() if stored is None else {fqn for fqns in several for fqn in fqns if stored.has(fqn)}

    def _find_refused(self, stored: StoredOptimizer) -> _Refused:
        """Returns the groups that another kind of optimizer saved, or of which the load would leave torn state."""
        if self._refused is None:
            clashing: list[Clash] = []
            torn: list[TornState] = []
            refused: set[int] = set()
            for group in self._groups():
                optimizer, values, parameters = group
                names = self._optimized.names(parameters)
                of_group = clashes(optimizer, values, names, stored)
                of_group = of_group or subclass_clashes(optimizer, self._to_load(group, stored), stored)
                torn_here: list[TornState] = []
                may_tear = not (of_group or stored.takes_all)
                new_values = after_load(values, names, stored) if may_tear else {}
                for parameter in parameters if may_tear else ():
                    contents = self._optimized.names([parameter])
                    torn_here += torn_states(optimizer, new_values, parameter, contents, stored)
                clashing += of_group
                torn += torn_here
                refused.update([id(values)] if of_group or torn_here else [])
            kinds = {type(optimizer).__name__ for optimizer in self.optimizers}
            problems = [clash_problem(self.fqn, kinds, clashing)] if clashing else []
            problems += [torn_problem(self.fqn, kinds, torn)] if torn else []
            self._refused = _Refused(refused, problems)
        return self._refused

    def _groups(self) -> Iterator[ParamGroup]:
        for optimizer in self.optimizers:
            wrapped = next((each for each in self.wrapped if each.optimizer is optimizer), None)
            groups = optimizer.param_groups
            parameters = [group["params"] for group in groups] if wrapped is None else wrapped.parameters
            for group, of_group in zip(groups, parameters, strict=True):
                yield ParamGroup(optimizer, group, of_group)

    def _param_states(self, stored: StoredOptimizer) -> Iterator[ParamState]:
        """Yields the state of each parameter that is not flat memory, stored or not, but for parameters that `exclude`
        leaves out, groups that are refused, and those in `_left`.
        """
        refused = self._find_refused(stored).groups
        for group in self._groups() if self._optimized.whole else ():
            for parameter, names in self._to_load(group, stored) if id(group.values) not in refused else ():
                if id(parameter) not in self._left:
                    yield ParamState(self.fqn, group, parameter, names=names, stored=stored, created=self._created)

    def _to_load(self, group: ParamGroup, stored: StoredOptimizer) -> Iterator[tuple[torch.Tensor, ParameterNames]]:
        """Yields the parameters of a group that are not flat memory, but for those that `exclude` leaves out."""
        for parameter in group.parameters:
            names = self._optimized.whole.get(id(parameter))
            if names is not None and not stored.is_excluded(names):
                yield parameter, names

    def _flat_states(self, stored: StoredOptimizer | None = None) -> Iterator[FlatParamState]:
        """Yields the state of all flat memory with elements of parameters; with `stored`, not of refused groups."""
        flat = self._optimized.flat
        refused = self._find_refused(stored).groups if flat and stored is not None else ()
        for group in self._groups() if flat else ():
            for memory in group.parameters if id(group.values) not in refused else ():
                optimized = flat.get(id(memory), ())
                if any(of_parameter.part.numel for of_parameter in optimized):
                    yield FlatParamState(self.fqn, group, memory, optimized=optimized, scalars=self._scalars)
