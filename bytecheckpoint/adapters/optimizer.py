"""Optimizers, by parameter name: state of each parameter as tensors, hyperparameters as plain data.

Takes any torch optimizer (or a list of them) whose parameters belong to modules of the same state, or that was built
from `named_parameters()`. State tensors lie like their parameter, or are whole (steps, factored moments); what is
neither (LBFGS's lists) is a tree. A fresh optimizer gets its state on load, without running a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.adapters.modules import ModuleEntry
from bytecheckpoint.adapters.parameter_names import ParameterNames, name_parameters
from bytecheckpoint.adapters.plain_data import TensorRef, encode_plain, join_fqn, keep_in_tree, leaves, with_leaves
from bytecheckpoint.adapters.stored import Contents, Expectation, Problem, Stored, StoredTensor, not_stored
from bytecheckpoint.adapters.stored_optimizer import StoredGroup, StoredOptimizer, is_optimizer_tree
from bytecheckpoint.adapters.stored_subclasses import SubclassState
from bytecheckpoint.adapters.subclasses import is_subclass, parts_of, restored
from bytecheckpoint.adapters.tensors import LocalShard, LocalShards, torch_dtype, unsupported
from bytecheckpoint.errors import CheckpointSaveError

_NOT_HYPERPARAMETERS = {"params", "param_names"}
_HOST_SCALARS = {"step", "mu_product"}
"""State that has no dimensions and is no DTensor, whatever the parameter is."""


class OptimizerEntry:
    """One optimizer, or several that share a name in the state."""

    def __init__(self, fqn: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.fqn = fqn
        self.optimizers = optimizers
        self._names: dict[int, ParameterNames] = {}
        """By the id of the parameter."""
        self._created: dict[str, torch.Tensor] = {}
        """Tensors inside lists of a parameter's state, which a load makes anew."""
        self._found: StoredOptimizer | None = None
        """What the one load that this entry is made for has found."""

    def name_parameters(self, modules: Sequence[ModuleEntry]) -> None:
        """Takes the names of the parameters from the modules of the state.

        Raises CheckpointSaveError (unsupported_value) for a parameter that none of them has, and one that two
        optimizers of this entry hold.
        """
        for optimizer in self.optimizers:
            if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
                raise _elsewhere(self.fqn, optimizer)
        self._names = name_parameters(self.fqn, self._parameters(), modules)

    def collect(self) -> Contents:
        shards = LocalShards()
        fqns: list[str] = []
        tree: dict[str, Any] = {"state": {}, "groups": {}}
        for optimizer in self.optimizers:
            _check_has_state(self.fqn, optimizer)
            for parameter, names in self._named(optimizer):
                plain = self._collect_state(names.name, optimizer.state.get(parameter, {}), shards, fqns)
                if plain:
                    tree["state"][names.name] = plain
            tree["groups"] |= self._groups(optimizer)
        elsewhere = {fqn: names.name for names in self._names.values() for fqn in names.elsewhere}
        if elsewhere:
            tree["elsewhere"] = elsewhere

        if len(set(fqns)) < len(fqns):
            fqn = next(fqn for fqn, number in Counter(fqns).items() if number > 1)
            raise unsupported(fqn, "the name of two values", "rename a parameter or a key of its state")
        encoded = encode_plain(tree, self.fqn, keep_in_tree)  # a learning rate may be a tensor
        return Contents(shards.found, set(fqns), {self.fqn: ("shared", encoded)})

    def _collect_state(
        self, name: str, state: Mapping[str, Any], shards: LocalShards, fqns: list[str]
    ) -> dict[str, Any]:
        """Adds one parameter's tensors to the shards, and their FQNs to these; returns the rest, with references."""
        plain: dict[str, Any] = {}
        prefix = self._state_fqn(name, "")
        for key, value in state.items():
            fqn = f"{prefix}{key}"
            if type(key) is not str or not key or "." in key:
                raise unsupported(fqn, f"optimizer state with the key {key!r}", "use names without dots as keys")
            if isinstance(value, torch.Tensor) and not is_subclass(value):
                shards.add(fqn, value)
                fqns.append(fqn)
                continue
            found = leaves(value, fqn)
            refs = {leaf: TensorRef(leaf) for leaf, tensor in found.items() if isinstance(tensor, torch.Tensor)}
            fqns += refs
            for leaf in refs:
                shards.add(leaf, found[leaf])
            plain[key] = with_leaves(_copied(value, fqn), fqn, refs)
        return plain

    def _groups(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Hyperparameters by the first parameter of their group, so that ranks with other parameters add theirs."""
        groups = {}
        for index, group in enumerate(optimizer.param_groups):
            # A dict, because ranks may hold other parameters of one group, and dicts of ranks are united.
            names = dict.fromkeys(self._names[id(parameter)].name for parameter in group["params"])
            values = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
            groups[next(iter(names), f"#{index}")] = {"params": names, "values": values}
        return groups

    def expect(self, stored: Stored) -> Expectation:
        expectation = Expectation([], set(), [])
        found = self._find(stored)
        if found is None:
            text = f"{self.fqn}: the checkpoint holds no optimizer under this name"
            expectation.problems.append(Problem("missing_key", self.fqn, text))
            return expectation
        expectation.claims.update(found.shared_claims())
        for optimizer in self.optimizers:
            for parameter, names in self._named(optimizer):
                expectation.claims.update(found.claims(names))
                if found.is_excluded(names):
                    continue
                expectation.problems.extend(self._problems(parameter, names, found))
                of_subclasses = self._subclasses(optimizer, parameter, names, found).problems()
                expectation.problems.extend(self._conflict(names, key, why) for key, why in of_subclasses)
                if _fits(parameter, names, found):
                    expectation.shards.extend(self._state_shards(optimizer, parameter, names, found))
            for group in optimizer.param_groups:
                expectation.problems.extend(self._hyperparameters(group, found, stored)[1])
        return expectation

    def _problems(self, parameter: torch.Tensor, names: ParameterNames, found: StoredOptimizer) -> Iterator[Problem]:
        """What keeps a parameter from having its state."""
        if found.group(names) is None:
            yield not_stored(f"{self.fqn}.groups.{names.name}")
        if _fits(parameter, names, found):
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
        states = found.tensors(names)
        shards = LocalShards()
        for key, (fqn, tensor) in states.items():
            target = subclasses.own.get(key, self._created.get(fqn))
            if not subclasses.takes(key):
                continue
            if not isinstance(target, torch.Tensor):
                is_nested = "." in key
                new = subclasses.new_part(key, tensor, torch.device("meta")) if is_nested else None
                target = _new_state(optimizer, parameter, key, tensor, "meta") if new is None else new
            shards.add(fqn, target)
        for key, value in subclasses.own.items():
            if isinstance(value, torch.Tensor) and key not in states and subclasses.takes(key):
                shards.add(self._state_fqn(names.name, key), value)
        return shards.found

    def prepare(self, stored: Stored) -> None:
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
                else:
                    optimizer.state[parameter][key] = _new_state(optimizer, parameter, key, tensor, None)

    def finish(self, stored: Stored) -> None:
        found = self._find(stored)
        if found is None:
            return
        for optimizer, parameter, names in self._loadable(found):
            subclasses = self._subclasses(optimizer, parameter, names, found)
            for key, (fqn, value) in found.plain(names).items():
                if not subclasses.lacks(key):
                    continue
                refs = {leaf: ref for leaf, ref in leaves(value, fqn).items() if isinstance(ref, TensorRef)}
                new = {leaf: self._created[stored.rename(ref.fqn)] for leaf, ref in refs.items()}
                optimizer.state[parameter][key] = restored(with_leaves(value, fqn, new), fqn, like=parameter)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                _set_hyperparameters(group, self._hyperparameters(group, found, stored)[0])

    def _subclasses(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, names: ParameterNames, found: StoredOptimizer
    ) -> SubclassState:
        live = optimizer.state.get(parameter, {})
        if not found.has_subclasses:
            return SubclassState(parameter, live, {}, {})
        return SubclassState(parameter, live, found.tensors(names), found.plain(names))

    def _conflict(self, names: ParameterNames, key: str, why: str) -> Problem:
        fqn = self._state_fqn(names.name, key)
        return Problem("conflict", fqn, f"{fqn}: {why}")

    def _loadable(self, found: StoredOptimizer) -> Iterator[tuple[torch.optim.Optimizer, torch.Tensor, ParameterNames]]:
        """The parameters whose state is loaded."""
        for optimizer in self.optimizers:
            for parameter, names in self._named(optimizer):
                if not found.is_excluded(names) and _fits(parameter, names, found):
                    yield optimizer, parameter, names

    def _find(self, stored: Stored) -> StoredOptimizer | None:
        if self._found is None:
            tree = stored.entry_tree(self.fqn)
            if tree is not None and is_optimizer_tree(tree.tree):
                self._found = StoredOptimizer(self.fqn, tree, stored)
        return self._found

    def _hyperparameters(
        self, group: Mapping[str, Any], found: StoredOptimizer, stored: Stored
    ) -> tuple[dict[str, Any], list[Problem]]:
        """The stored values for a group, and those on which its parameters do not agree."""
        by_parameter = [found.group(self._names[id(parameter)]) for parameter in group["params"]]
        groups = {of_parameter.fqn: of_parameter for of_parameter in by_parameter if of_parameter is not None}
        agreed, problems = {}, []
        for key in dict.fromkeys(key for of_parameters in groups.values() for key in of_parameters.values):
            taken = [of_parameters for of_parameters in groups.values() if found.takes(of_parameters, key)]
            if not taken:
                continue
            first = taken[0]
            if key in first.values and all(_has_same(first, other, key) for other in taken):
                agreed[key] = first.values[key]
                continue
            fqn = stored.rename(join_fqn(first.fqn, key))
            text = f"{fqn}: the parameters of this group were saved in groups with different values of {key!r}"
            problems.append(Problem("conflict", fqn, text))
        return agreed, problems

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str | None]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                names = group.get("param_names") or [None] * len(group["params"])
                yield from zip(group["params"], names, strict=True)

    def _named(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, ParameterNames]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, self._names[id(parameter)]

    def _state_fqn(self, name: str, key: str) -> str:
        return f"{self.fqn}.state.{name}.{key}"


def _check_has_state(fqn: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that keeps its state elsewhere than torch's do, so that none of it would be saved."""
    overrides = type(optimizer).state_dict is not torch.optim.Optimizer.state_dict
    if overrides and not optimizer.state and optimizer.state_dict().get("state"):
        raise _elsewhere(fqn, optimizer)


def _elsewhere(fqn: str, optimizer: torch.optim.Optimizer) -> CheckpointSaveError:
    what = f"a {type(optimizer).__name__}, which does not keep its state in `.state`"
    return unsupported(
        fqn, what, "pass the optimizer inside it, or shard with fully_shard (FSDP2) and a torch optimizer"
    )


def _fits(parameter: torch.Tensor, names: ParameterNames, found: StoredOptimizer) -> bool:
    """Whether the parameter has the shape that it had when its state was made, as far as the checkpoint tells."""
    return found.parameter_shape(names) in {None, tuple(parameter.shape)}


def _new_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, stored: StoredTensor, device: str | None
) -> torch.Tensor:
    """A state tensor that lies like its parameter where it has its shape, and is whole otherwise.

    On `device`, or where the optimizer itself would have made it.
    """
    dtype = torch_dtype(stored.dtype)
    is_scalar = not stored.shape and (parameter.dim() > 0 or key in _HOST_SCALARS)
    if stored.shape == tuple(parameter.shape) and not is_scalar:
        return torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    if device is None:
        group = next(group for group in optimizer.param_groups if any(own is parameter for own in group["params"]))
        is_on_host = is_scalar and not (group.get("capturable") or group.get("fused"))
        return torch.empty(stored.shape, dtype=dtype, device="cpu" if is_on_host else parameter.device)
    return torch.empty(stored.shape, dtype=dtype, device=device)


def _set_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Keeps a tensor the tensor that it is (captured graphs hold it) and a number a number."""
    for key, value in values.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor):
            own.copy_(torch.as_tensor(value))
        else:
            group[key] = value.item() if isinstance(value, torch.Tensor) and isinstance(own, int | float) else value


def _has_same(group: StoredGroup, other: StoredGroup, key: str) -> bool:
    return key in other.values and _same(group.values[key], other.values[key])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    # As bytes, so that NaN is NaN and arrays are compared whole.
    return encode_plain(a, "", keep_in_tree) == encode_plain(b, "", keep_in_tree)


def _copied(value: Any, fqn: str) -> Any:
    """The same tree in containers of its own, so that the live state is not changed. A subclass is one of its parts."""
    if isinstance(value, dict) or is_subclass(value):
        items = (value if isinstance(value, dict) else parts_of(fqn, value)).items()
        return {key: _copied(item, join_fqn(fqn, key)) for key, item in items}
    if type(value) not in (list, tuple):
        return value
    return type(value)(_copied(item, join_fqn(fqn, index)) for index, item in enumerate(value))
