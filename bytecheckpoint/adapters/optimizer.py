"""Optimizers, by parameter name: state of each parameter as tensors, hyperparameters as plain data.

Takes any torch optimizer (or a list of them) whose parameters belong to modules of the same state, or that was built
from `named_parameters()`. State tensors lie like their parameter, or are whole (steps, factored moments); what is
neither (LBFGS's lists) is a tree. A fresh optimizer gets its state on load, without running a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from bytecheckpoint.adapters.flat_parts import FlatOptimizer
from bytecheckpoint.adapters.flat_state import FlatState, differing_error
from bytecheckpoint.adapters.hyperparameters import agreed, by_first_parameter, set_hyperparameters
from bytecheckpoint.adapters.one_values import holds_more, is_number, is_one, put_one_value
from bytecheckpoint.adapters.parameter_names import (
    NamesParameters,
    OptimizedParameters,
    ParameterNames,
    name_parameters,
)
from bytecheckpoint.adapters.plain_data import TensorRef, encode_plain, keep_in_tree, leaves, with_leaves
from bytecheckpoint.adapters.stored import (
    Contents,
    Expectation,
    Problem,
    Stored,
    not_stored,
    placeholder,
)
from bytecheckpoint.adapters.stored_optimizer import StoredOptimizer, is_optimizer_tree
from bytecheckpoint.adapters.stored_subclasses import SubclassState
from bytecheckpoint.adapters.subclasses import restored
from bytecheckpoint.adapters.tensors import LocalShard, LocalShards, unsupported
from bytecheckpoint.adapters.whole_state import (
    becomes_number,
    check_has_state,
    collect_state,
    kept_elsewhere,
    new_state,
)


class OptimizerEntry:
    """One optimizer, or several that share a name in the state."""

    def __init__(self, fqn: str, optimizers: Sequence[torch.optim.Optimizer | FlatOptimizer]) -> None:
        self.fqn = fqn
        self.wrapped = [each for each in optimizers if isinstance(each, FlatOptimizer)]
        """Those that frameworks have wrapped."""
        self.optimizers = [each.optimizer if isinstance(each, FlatOptimizer) else each for each in optimizers]
        self._optimized = OptimizedParameters({}, {})
        """What lies in each tensor of the param_groups."""
        self._created: dict[str, Any] = {}
        """Tensors that a load makes anew: those in lists of a parameter's state, and what becomes a number. And what
        flat memory has one of."""
        self._found: StoredOptimizer | None = None
        """What the one load that this entry is made for has found."""
        self._is_prepared = False

    def name_parameters(self, modules: Sequence[NamesParameters]) -> None:
        """Takes the names of the parameters from the modules of the state.

        Raises CheckpointSaveError (unsupported_value) for a parameter that none of them has, and one that two
        optimizers of this entry hold.
        """
        for optimizer in self.optimizers:
            if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
                raise kept_elsewhere(self.fqn, optimizer)
        self._optimized = name_parameters(self.fqn, self._parameters(), modules)

    def collect(self) -> Contents:
        shards = LocalShards()
        self._created.clear()
        fqns: list[str] = []
        tree: dict[str, Any] = {"state": {}, "groups": {}}
        for optimizer in self.optimizers:
            check_has_state(self.fqn, optimizer)
            for parameter, names in self._named(optimizer):
                state = optimizer.state.get(parameter)
                plain = collect_state(f"{self.fqn}.state.{names.name}.", state, shards, fqns) if state else None
                if plain:
                    tree["state"][names.name] = plain
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
        for each in self.wrapped:
            tree["facts"] = tree.get("facts", {}) | each.facts()

        all_fqns = set(fqns)
        if len(all_fqns) < len(fqns):
            fqn = next(fqn for fqn, number in Counter(fqns).items() if number > 1)
            raise unsupported(fqn, "the name of two values", "rename a parameter or a key of its state")
        encoded = encode_plain(tree, self.fqn, keep_in_tree)  # a learning rate may be a tensor
        all_fqns.update(shard.fqn for shard in shards.found[num_whole:])
        return Contents(shards.found, all_fqns, {self.fqn: ("shared", encoded)})

    def expect(self, stored: Stored) -> Expectation:
        padding: list[LocalShard] = []
        expectation = Expectation([], set(), [], padding=padding)
        found = self._find(stored)
        if found is None:
            text = f"{self.fqn}: the checkpoint holds no optimizer under this name"
            return expectation._replace(problems=[Problem("missing_key", self.fqn, text)])
        expectation.claims.update(found.shared_claims())
        expectation.problems.extend(found.misfits())
        for names in self._optimized.all_names():
            expectation.claims.update(found.claims(names))
        for optimizer in self.optimizers:
            for parameter, names in self._named(optimizer):
                if found.is_excluded(names):
                    continue
                expectation.problems.extend(self._problems(parameter, names, found))
                of_subclasses = self._subclasses(optimizer, parameter, names, found).problems()
                expectation.problems.extend(self._conflict(names, key, why) for key, why in of_subclasses)
                if found.fits(names, tuple(parameter.shape)):
                    expectation.shards.extend(self._state_shards(optimizer, parameter, names, found))
            for flat in self._flat_states(optimizer):
                of_flat = flat.expect(found)
                expectation.shards.extend(of_flat.shards)
                expectation.problems.extend(of_flat.problems)
                padding += of_flat.padding
            for _, parameters in self._param_groups(optimizer):
                expectation.problems.extend(self._hyperparameters(parameters, found, stored)[1])
        return expectation

    def _problems(self, parameter: torch.Tensor, names: ParameterNames, found: StoredOptimizer) -> Iterator[Problem]:
        """What keeps a parameter from having its state."""
        if found.group(names) is None:
            yield not_stored(f"{self.fqn}.groups.{names.name}")
        if found.fits(names, tuple(parameter.shape)):
            return
        for fqn, tensor in found.tensors(names).values():
            if tensor.shape:
                shape = list(found.parameter_shape(names) or ())
                text = f"{fqn}: of a parameter of shape {shape} in the checkpoint, {list(parameter.shape)} in the state"
                yield Problem("shape", fqn, text)

    def _state_shards(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, names: ParameterNames, found: StoredOptimizer
    ) -> list[LocalShard]:
        """Where the state of one parameter goes, and what the optimizer has that the checkpoint lacks."""
        subclasses = self._subclasses(optimizer, parameter, names, found)
        states, plain = found.tensors(names), found.plain(names)
        shards = LocalShards()
        for key, (fqn, tensor) in states.items():
            own = subclasses.own.get(key)
            target = own if isinstance(own, torch.Tensor) else self._created.get(fqn)
            if not subclasses.takes(key):
                continue
            if not isinstance(target, torch.Tensor):
                is_nested = "." in key
                new = subclasses.new_part(key, tensor, torch.device("meta")) if is_nested else None
                target = new_state(optimizer, parameter, key, tensor, "meta") if new is None else new
            shards.add(fqn, target)
        for key, value in subclasses.own.items():
            is_plain = key in plain and is_number(plain[key][1]) and is_one(value)
            is_own = isinstance(value, torch.Tensor) and key not in states and not is_plain
            if is_own and subclasses.takes(key) and not subclasses.is_elsewhere(key):
                shards.add(f"{self.fqn}.state.{names.name}.{key}", value)
        return shards.found

    def prepare(self, stored: Stored) -> None:
        self._is_prepared = True
        found = self._find(stored)
        if found is None:
            return
        for optimizer, parameter, names in self._loadable(found):
            subclasses = self._subclasses(optimizer, parameter, names, found)
            for key, (fqn, tensor) in found.tensors(names).items():
                is_there = key in subclasses.own if "." in key else isinstance(subclasses.own.get(key), torch.Tensor)
                if is_there or not subclasses.takes(key):
                    continue
                if "." in key:
                    self._created[fqn] = subclasses.new_part(key, tensor, None)
                elif becomes_number(subclasses.own.get(key), tensor):
                    self._created[fqn] = torch.empty_like(placeholder(tensor), device="cpu")
                else:
                    optimizer.state[parameter][key] = new_state(optimizer, parameter, key, tensor, None)
        for optimizer in self.optimizers:
            for flat in self._flat_states(optimizer):
                flat.prepare(found)

    def finish(self, stored: Stored) -> None:
        """Raises CheckpointMismatchError (conflict) at the end, where flat memory has one value for parameters that do
        not agree on it.
        """
        found = self._find(stored)
        if found is None:
            return
        if found.has_subclasses and not self._is_prepared:  # a rank that holds nothing has nothing to read for them
            self.prepare(stored)
        for optimizer, parameter, names in self._loadable(found):
            subclasses = self._subclasses(optimizer, parameter, names, found)
            for key, (fqn, value) in found.plain(names).items():
                if not subclasses.lacks(key):
                    continue
                refs = {leaf: ref for leaf, ref in leaves(value, fqn).items() if isinstance(ref, TensorRef)}
                new = {leaf: self._created[stored.rename(ref.fqn)] for leaf, ref in refs.items()}
                if is_number(value) and holds_more(subclasses.own.get(key)):
                    continue  # that was refused, and strict=False leaves it out
                if is_number(value):
                    put_one_value(optimizer, parameter, key, value)
                    continue
                optimizer.state[parameter][key] = restored(with_leaves(value, fqn, new), fqn, like=parameter)
            for key, (fqn, tensor) in found.tensors(names).items():
                if becomes_number(subclasses.own.get(key), tensor):
                    put_one_value(optimizer, parameter, key, self._created[fqn])
        differing: list[str] = []
        for optimizer in self.optimizers:
            for flat in self._flat_states(optimizer):
                differing += flat.finish(found)
            for group, parameters in self._param_groups(optimizer):
                set_hyperparameters(group, self._hyperparameters(parameters, found, stored)[0])
        for each in self.wrapped:
            each.take_facts(found.facts())
        if differing:
            raise differing_error(differing)

    def _subclasses(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, names: ParameterNames, found: StoredOptimizer
    ) -> SubclassState:
        live = optimizer.state.get(parameter, {})
        if not found.has_subclasses:
            return SubclassState(parameter, live, {}, {})
        return SubclassState(parameter, live, found.tensors(names), found.plain(names))

    def _conflict(self, names: ParameterNames, key: str, why: str) -> Problem:
        fqn = f"{self.fqn}.state.{names.name}.{key}"
        return Problem("conflict", fqn, f"{fqn}: {why}")

    def _loadable(self, found: StoredOptimizer) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor, ParameterNames]]:
        """The parameters whose state is loaded."""
        for optimizer in self.optimizers:
            for parameter, names in self._named(optimizer):
                if not found.is_excluded(names) and found.fits(names, tuple(parameter.shape)):
                    yield optimizer, parameter, names

    def _find(self, stored: Stored) -> StoredOptimizer | None:
        if self._found is None:
            tree = stored.entry_tree(self.fqn)
            if tree is not None and is_optimizer_tree(tree.tree):
                held = [group for optimizer in self.optimizers for group in self._param_groups(optimizer)]
                names = [each for _, parameters in held for each in self._optimized.names(parameters)]
                self._found = StoredOptimizer(self.fqn, tree, stored, names)
        return self._found

    def _hyperparameters(
        self, parameters: Sequence[torch.Tensor], found: StoredOptimizer, stored: Stored
    ) -> tuple[dict[str, Any], list[Problem]]:
        return agreed(self._optimized.names(parameters), found, stored)

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

    def _named(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, ParameterNames]]:
        """The parameters that are no flat memory."""
        whole = self._optimized.whole
        for _, parameters in self._param_groups(optimizer):
            for parameter in parameters if whole else ():
                names = whole.get(id(parameter))
                if names is not None:
                    yield parameter, names

    def _flat_states(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatState]:
        flat = self._optimized.flat
        for _, parameters in self._param_groups(optimizer) if flat else ():
            for parameter in parameters:
                optimized = flat.get(id(parameter), ())
                if any(of_parameter.part.numel for of_parameter in optimized):
                    yield FlatState(self.fqn, optimizer, parameter, optimized=optimized, one_values=self._created)
