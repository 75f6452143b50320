"""Optimizers, by parameter name: state of each parameter as tensors, hyperparameters as plain data.

Takes any torch optimizer (or a list of them) whose parameters belong to modules of the same state, or that was built
from `named_parameters()`. State tensors lie like their parameter, or are whole (steps, factored moments); what is
neither (LBFGS's lists) is a tree. A fresh optimizer gets its state on load, without running a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from bytecheckpoint.adapters.modules import ModuleEntry, plain_name
from bytecheckpoint.adapters.plain_data import TensorRef, encode_plain, join_fqn, keep_in_tree, leaves, with_leaves
from bytecheckpoint.adapters.stored import (
    Contents,
    Expectation,
    Problem,
    Stored,
    StoredTensor,
    StoredTree,
    not_stored,
    placeholder,
)
from bytecheckpoint.adapters.tensors import LocalShard, local_shards, torch_dtype, unsupported

_NOT_HYPERPARAMETERS = {"params", "param_names"}


class OptimizerEntry:
    """One optimizer, or several that share a name in the state."""

    def __init__(self, fqn: str, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.fqn = fqn
        self._optimizers = optimizers
        self._names: dict[int, str] = {}
        """The id of a parameter -> its name."""
        self._other_names: dict[str, str] = {}
        """Another name of a tied parameter -> its name."""
        self._module_fqns: dict[str, str] = {}
        """The name of a parameter -> its FQN in the state."""
        self._created: dict[str, torch.Tensor] = {}
        """Tensors inside lists of a parameter's state, which a load makes anew."""

    def name_parameters(self, modules: Sequence[ModuleEntry]) -> None:
        """Takes the names of the parameters from the modules of the state.

        Raises CheckpointSaveError (unsupported_value) for a parameter that none of them has.
        """
        owned = {id(parameter) for parameter, _ in self._parameters()}
        owners = [entry for entry in modules if any(id(parameter) in owned for parameter, _ in entry.parameters())]
        for entry in owners:
            prefix = f"{entry.fqn}." if len(owners) > 1 else ""
            for parameter, name in entry.parameters():
                self._names[id(parameter)] = prefix + name
                self._module_fqns[prefix + name] = f"{entry.fqn}.{name}"
            self._other_names |= {prefix + other: prefix + name for other, name in entry.tied_names().items()}
        for tensor, own_name in self._parameters():
            if id(tensor) not in self._names and own_name is None:
                raise unsupported(
                    self.fqn,
                    f"an optimizer with a parameter of shape {list(tensor.shape)} that no module of the state has",
                    "pass the model beside it, or build the optimizer from model.named_parameters()",
                )
            self._names.setdefault(id(tensor), plain_name(own_name or ""))

    def collect(self) -> Contents:
        shards: list[LocalShard] = []
        tree: dict[str, Any] = {"state": {}, "groups": {}}
        for optimizer in self._optimizers:
            for parameter, name in self._named(optimizer):
                plain = self._collect_state(name, optimizer.state.get(parameter, {}), shards)
                if plain:
                    tree["state"][name] = plain
            tree["groups"] |= self._groups(optimizer)

        encoded = encode_plain(tree, self.fqn, keep_in_tree)  # a learning rate may be a tensor
        return Contents(shards, {shard.fqn for shard in shards}, {self.fqn: ("shared", encoded)})

    def _collect_state(self, name: str, state: Mapping[str, Any], shards: list[LocalShard]) -> dict[str, Any]:
        """Adds the tensors of one parameter's state to the shards; returns the rest, with references."""
        plain: dict[str, Any] = {}
        for key, value in state.items():
            fqn = self._state_fqn(name, key)
            found = leaves(value, fqn)
            refs = {leaf: TensorRef(leaf) for leaf, tensor in found.items() if isinstance(tensor, torch.Tensor)}
            for leaf in refs:
                shards += local_shards(leaf, found[leaf])
            if not isinstance(value, torch.Tensor):
                plain[key] = with_leaves(_copied(value), fqn, refs)
        return plain

    def _groups(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Hyperparameters by the first parameter of their group, so that ranks with other parameters add theirs."""
        groups = {}
        for index, group in enumerate(optimizer.param_groups):
            names = [self._names[id(parameter)] for parameter in group["params"]]
            values = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
            groups[names[0] if names else f"#{index}"] = {"params": names, "values": values}
        return groups

    def expect(self, stored: Stored) -> Expectation:
        expectation = Expectation([], set(), [])
        found = self._find(stored)
        if found is None:
            text = f"{self.fqn}: the checkpoint holds no optimizer under this name"
            expectation.problems.append(Problem("missing_key", self.fqn, text))
            return expectation
        expectation.claims.update(found.plain_fqns())
        for optimizer in self._optimizers:
            for parameter, name in self._named(optimizer):
                if found.hyperparameters_of(name) is None:
                    expectation.problems.append(not_stored(f"{self.fqn}.param_groups.{name}"))
                expectation.shards.extend(self._state_shards(optimizer, parameter, name, found))
            for group in optimizer.param_groups:
                expectation.problems.extend(self._hyperparameters(group, found)[1])
        expectation.claims.update(found.copies_of_tied())
        return expectation

    def _state_shards(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, found: _StoredOptimizer
    ) -> list[LocalShard]:
        """Where the state of one parameter goes, and what the optimizer has that the checkpoint lacks."""
        own = optimizer.state.get(parameter, {})
        states = found.states_of(name)
        shards: list[LocalShard] = []
        for key, (fqn, tensor) in states.items():
            target = own.get(key, self._created.get(fqn))
            if not isinstance(target, torch.Tensor):
                target = placeholder(tensor) if "." in key else _new_state(optimizer, parameter, tensor, "meta")
            shards += local_shards(fqn, target)
        for key, value in own.items():
            if isinstance(value, torch.Tensor) and key not in states:
                shards += local_shards(self._state_fqn(name, key), value)
        return shards

    def prepare(self, stored: Stored) -> None:
        found = self._find(stored)
        if found is None:
            return
        for optimizer in self._optimizers:
            for parameter, name in self._named(optimizer):
                self._prepare_state(optimizer, parameter, found.states_of(name))

    def _prepare_state(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, states: Mapping[str, tuple[str, StoredTensor]]
    ) -> None:
        for key, (fqn, tensor) in states.items():
            if "." in key:
                self._created[fqn] = torch.empty_like(placeholder(tensor), device="cpu")
            elif not isinstance(optimizer.state[parameter].get(key), torch.Tensor):
                optimizer.state[parameter][key] = _new_state(optimizer, parameter, tensor, None)

    def finish(self, stored: Stored) -> None:
        found = self._find(stored)
        if found is None:
            return
        for optimizer in self._optimizers:
            for parameter, name in self._named(optimizer):
                for key, (fqn, value) in found.plain_states_of(name).items():
                    refs = {leaf: ref for leaf, ref in leaves(value, fqn).items() if isinstance(ref, TensorRef)}
                    new = {leaf: self._created[stored.rename(ref.fqn)] for leaf, ref in refs.items()}
                    optimizer.state[parameter][key] = with_leaves(value, fqn, new)
            for group in optimizer.param_groups:
                _set_hyperparameters(group, self._hyperparameters(group, found)[0])

    def _find(self, stored: Stored) -> _StoredOptimizer | None:
        found = stored.entry_tree(self.fqn)
        if found is None or not _is_optimizer_tree(found.tree):
            return None
        return _StoredOptimizer(self.fqn, found, stored, self._all_names(stored), self._module_fqns)

    def _hyperparameters(
        self, group: Mapping[str, Any], found: _StoredOptimizer
    ) -> tuple[dict[str, Any], list[Problem]]:
        """The stored values for a group, and those on which its parameters do not agree."""
        names = [self._names[id(parameter)] for parameter in group["params"]]
        stored = [values for values in map(found.hyperparameters_of, names) if values is not None]
        if not stored:
            return {}, []
        agreed, problems = {}, []
        for key, value in stored[0].items():
            if all(key in values and _same(values[key], value) for values in stored):
                agreed[key] = value
                continue
            fqn = f"{self.fqn}.param_groups.{names[0]}.{key}"
            text = f"{fqn}: the parameters of this group were saved in groups with different values of {key!r}"
            problems.append(Problem("conflict", fqn, text))
        return agreed, problems

    def _all_names(self, stored: Stored) -> dict[str, list[str]]:
        """Every parameter's name, first its own, then those under which a tied tensor may have been stored."""
        names = {name: [name] for name in self._names.values()}
        for other, name in self._other_names.items():
            names[name].append(other)
        for name, of_parameter in names.items():
            module_fqn = self._module_fqns.get(name, "")
            if module_fqn in stored.tensors:
                prefix = module_fqn[: len(module_fqn) - len(name)]
                of_parameter.append(stored.rename(stored.tensors[module_fqn].fqn).removeprefix(prefix))
        return names

    def _parameters(self) -> Iterator[tuple[torch.Tensor, str | None]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                names = group.get("param_names") or [None] * len(group["params"])
                yield from zip(group["params"], names, strict=True)

    def _named(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, self._names[id(parameter)]

    def _state_fqn(self, name: str, key: str) -> str:
        return f"{self.fqn}.state.{name}.{key}"


class _StoredOptimizer:
    """An optimizer in a checkpoint, by the names that the parameters have in the state."""

    def __init__(
        self,
        fqn: str,
        found: StoredTree,
        stored: Stored,
        names: Mapping[str, Sequence[str]],
        module_fqns: Mapping[str, str],
    ) -> None:
        self._fqn = fqn
        self._found = found
        self._stored = stored
        self._names = names
        self._known = {other for others in names.values() for other in others}
        self._prefixes = {module_fqn[: len(module_fqn) - len(name)] for name, module_fqn in module_fqns.items()}
        self._groups = {
            self._in_state(name): self._taken(group["values"], f"{found.fqn}.groups.{first}.values")
            for first, group in found.tree["groups"].items()
            for name in group["params"]
        }
        self._plain = {
            self._in_state(name): (name, self._taken(state, f"{found.fqn}.state.{name}"))
            for name, state in found.tree["state"].items()
        }
        self._tensors = self._tensors_by_name()

    def _taken(self, values: Mapping[str, Any], fqn: str) -> dict[str, Any]:
        """Those values of the dict with this checkpoint FQN that include and exclude leave."""
        takes = self._stored.takes
        return {key: value for key, value in values.items() if all(map(takes, leaves(value, join_fqn(fqn, key))))}

    def plain_fqns(self) -> Iterator[str]:
        """State FQNs of all its plain data."""
        return map(self._stored.rename, leaves(self._found.tree, self._found.fqn))

    def hyperparameters_of(self, name: str) -> Mapping[str, Any] | None:
        return next((self._groups[other] for other in self._names[name] if other in self._groups), None)

    def states_of(self, name: str) -> Mapping[str, tuple[str, StoredTensor]]:
        """State key -> its FQN in `Stored.tensors`, and the stored tensor."""
        return next((self._tensors[other] for other in self._names[name] if other in self._tensors), {})

    def plain_states_of(self, name: str) -> dict[str, tuple[str, Any]]:
        """State key -> its checkpoint FQN, and the tree that is its value."""
        stored_name, state = next((self._plain[other] for other in self._names[name] if other in self._plain), ("", {}))
        return {key: (f"{self._found.fqn}.state.{stored_name}.{key}", value) for key, value in state.items()}

    def copies_of_tied(self) -> Iterator[str]:
        """FQNs of states that were stored once more under another name of a tied tensor."""
        for others in self._names.values():
            for other in [other for other in others if other in self._tensors][1:]:
                yield from (fqn for fqn, _ in self._tensors[other].values())

    def _tensors_by_name(self) -> dict[str, dict[str, tuple[str, StoredTensor]]]:
        prefix = f"{self._fqn}.state."
        tensors: dict[str, dict[str, tuple[str, StoredTensor]]] = {}
        for fqn, tensor in self._stored.tensors.items():
            if not fqn.startswith(prefix):
                continue
            name, _, key = fqn[len(prefix) :].rpartition(".")
            while name and self._in_state(name) not in self._known:
                name, _, head = name.rpartition(".")
                key = f"{head}.{key}"
            if name:
                tensors.setdefault(self._in_state(name), {})[key] = (fqn, tensor)
        return tensors

    def _in_state(self, name: str) -> str:
        """A stored parameter name in the state: renamed as key_map renames the parameter in its module."""
        if name in self._known:
            return name
        renamed = ((prefix, self._stored.rename(prefix + name)) for prefix in self._prefixes)
        return next((new.removeprefix(prefix) for prefix, new in renamed if new != prefix + name), name)


def _is_optimizer_tree(tree: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(tree, dict) and {"state", "groups"} <= tree.keys()


def _new_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, stored: StoredTensor, device: str | None
) -> torch.Tensor:
    """A state tensor that lies like its parameter where it has its shape, and is whole otherwise.

    On `device`, or where the optimizer itself would have made it.
    """
    dtype = torch_dtype(stored.dtype)
    if stored.shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    if device is None:
        group = next(group for group in optimizer.param_groups if any(own is parameter for own in group["params"]))
        is_on_host = not stored.shape and not (group.get("capturable") or group.get("fused"))
        device = "cpu" if is_on_host else parameter.device.type
    return torch.empty(stored.shape, dtype=dtype, device=device)


def _set_hyperparameters(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Keeps a tensor the tensor that it is (captured graphs hold it) and a number a number."""
    for key, value in values.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor):
            own.copy_(torch.as_tensor(value))
        else:
            group[key] = value.item() if isinstance(value, torch.Tensor) and isinstance(own, int | float) else value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    return type(a) is type(b) and bool(a == b)


def _copied(value: Any) -> Any:
    """The same tree in containers of its own, so that the live state is not changed."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
