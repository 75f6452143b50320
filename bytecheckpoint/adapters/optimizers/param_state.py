"""The state that an optimizer keeps for a parameter that it has as it is: tensors that lie like the parameter, those
that are whole, and trees of others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from math import prod
from typing import Any

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTensor, placeholder
from bytecheckpoint.adapters.expectation import Expectation, Problem, not_stored
from bytecheckpoint.adapters.materialize import target_device
from bytecheckpoint.adapters.native.parameter_names import ParameterNames, check_state_key
from bytecheckpoint.adapters.native.subclass_flatten import is_subclass, parts_of, restored
from bytecheckpoint.adapters.native.subclass_match import SubclassState
from bytecheckpoint.adapters.optimizers.scalar_state import (
    HOST_SCALARS,
    can_take,
    is_number,
    is_scalar,
    put_scalar,
    scalar_device,
)
from bytecheckpoint.adapters.optimizers.stored_optimizer import StoredOptimizer
from bytecheckpoint.adapters.plain.plain_data import leaves, with_leaves
from bytecheckpoint.adapters.shards import PLAIN_TENSORS, LocalShard, LocalShards, torch_dtype
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn, unsupported


def refuse_zero_redundancy(fqn: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointSaveError (unsupported_value) for torch's ZeroRedundancyOptimizer, which has whole parameters
    and the state of some of them on each rank.
    """
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        what = f"a {type(optimizer).__name__}, which keeps the state of some parameters on each rank"
        raise unsupported(fqn, what, "shard with fully_shard (FSDP2) and a torch optimizer")


def collect_state(
    prefix: str, state: Mapping[str, Any], tensors: list[tuple[str, torch.Tensor]], keys: set[str]
) -> dict[str, Any]:
    """Adds the tensors with their FQNs, which start with `prefix`, to these; returns the rest, with references. `keys`
    are those that were found to be good as names, for other parameters.
    """
    if PLAIN_TENSORS.issuperset(map(type, state.values())) and keys.issuperset(state):  # nearly always
        tensors += [(prefix + key, value) for key, value in state.items()]
        return {}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        fqn = f"{prefix}{key}"
        if type(key) is not str or not key or "." in key:
            check_state_key(fqn, key)
        keys.add(key)
        if type(value) in PLAIN_TENSORS or (isinstance(value, torch.Tensor) and not is_subclass(value)):
            tensors.append((fqn, value))
            continue
        found = leaves(value, fqn)
        refs = {leaf: TensorRef(leaf) for leaf, tensor in found.items() if isinstance(tensor, torch.Tensor)}
        tensors += [(leaf, found[leaf]) for leaf in refs]
        plain[key] = with_leaves(_copied(value, fqn), fqn, refs)
    return plain


CreatedTensors = MutableMapping[tuple[int, str], torch.Tensor]
"""Tensors that a load makes anew and that no state holds before it ends: those in lists, and what becomes a number. By
the parameter's id, because two that are no longer tied have one FQN, and by FQN."""


class WholeState:
    """The state that an optimizer keeps for one parameter, in one load."""

    def __init__(
        self,
        fqn: str,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        *,
        group: Mapping[str, Any],
        names: ParameterNames,
        found: StoredOptimizer,
        created: CreatedTensors,
    ) -> None:
        self._fqn = fqn
        self._optimizer = optimizer
        self._parameter = parameter
        self._group = group
        self._names = names
        self._found = found
        self._tensors = found.tensors(names)
        self._created = created
        live = optimizer.state.get(parameter, {})
        if found.has_subclasses:
            self._subclasses = SubclassState(parameter, live, self._tensors, found.plain(names))
        else:
            self._subclasses = SubclassState(parameter, live, {}, {})

    @property
    def fits(self) -> bool:
        """True if the parameter had its shape when its state was saved, as far as the checkpoint tells."""
        return self._found.fits(self._names, tuple(self._parameter.shape))

    def expect(self) -> Expectation:
        """Where the state goes, and what the optimizer has that the checkpoint lacks."""
        found, names = self._found, self._names
        problems = [] if self.fits else list(found.misfits(names, tuple(self._parameter.shape)))
        if found.group(names) is None:
            problems.append(not_stored(f"{self._fqn}.groups.{names.name}"))
        for key, why in self._subclasses.problems():
            fqn = self._state_fqn(key)
            problems.append(Problem("conflict", fqn, f"{fqn}: {why}"))
        if not self.fits:
            return Expectation([], set(), problems)
        plain = found.plain(names)
        lacking = (key for key, own in self._subclasses.own.items() if is_number(own))
        problems += [
            not_stored(self._state_fqn(key)) for key in lacking if key not in plain and key not in self._tensors
        ]
        return Expectation(self._shards(plain), set(), problems)

    def _shards(self, plain: Mapping[str, tuple[str, Any]]) -> list[LocalShard]:
        subclasses = self._subclasses
        shards = LocalShards(with_addresses=True)
        for key, (fqn, tensor) in self._tensors.items():
            own = subclasses.own.get(key)
            target = own if isinstance(own, torch.Tensor) else self._created.get((id(self._parameter), fqn))
            if not subclasses.takes(key):
                continue
            if not isinstance(target, torch.Tensor):
                target = self._new(key, tensor, torch.device("meta"))
            shards.add(fqn, target)
        for key, value in subclasses.own.items():
            is_plain = key in plain and is_number(plain[key][1]) and is_scalar(value)
            is_own = isinstance(value, torch.Tensor) and key not in self._tensors and not is_plain
            if is_own and subclasses.takes(key) and not subclasses.is_elsewhere(key):
                shards.add(self._state_fqn(key), value)
        return shards.found

    def _new(self, key: str, stored: StoredTensor, device: torch.device | None) -> torch.Tensor:
        if "." in key:
            return self._subclasses.new_part(key, stored, device)
        return new_state(self._parameter, key, stored, device, group=self._group)

    def prepare(self) -> None:
        """Makes the tensors that the state lacks."""
        optimizer, parameter, subclasses = self._optimizer, self._parameter, self._subclasses
        for key, (fqn, tensor) in self._tensors.items():
            is_there = key in subclasses.own if "." in key else isinstance(subclasses.own.get(key), torch.Tensor)
            if is_there or not subclasses.takes(key):
                continue
            if "." in key:
                self._created[id(parameter), fqn] = self._new(key, tensor, None)
            elif becomes_number(subclasses.own.get(key), tensor):
                self._created[id(parameter), fqn] = torch.empty_like(placeholder(tensor), device="cpu")
            else:
                optimizer.state[parameter][key] = self._new(key, tensor, None)

    def finish(self, checkpoint: CheckpointView) -> None:
        """Puts in place what is no tensor, or made of several."""
        optimizer, parameter, subclasses = self._optimizer, self._parameter, self._subclasses
        for key, (fqn, value) in self._found.plain(self._names).items():
            if not subclasses.lacks(key):
                continue
            refs = {leaf: ref for leaf, ref in leaves(value, fqn).items() if isinstance(ref, TensorRef)}
            new = {leaf: self._created[id(parameter), checkpoint.rename(ref.fqn)] for leaf, ref in refs.items()}
            if not can_take(subclasses.own.get(key), value):
                continue
            if is_number(value):
                put_scalar(optimizer, parameter, key, value, group=self._group)
                continue
            filled = with_leaves(copy.deepcopy(value), fqn, new)  # another parameter may have been tied to this one
            optimizer.state[parameter][key] = restored(filled, fqn, like=parameter)
        for key, (fqn, tensor) in self._tensors.items():
            if becomes_number(subclasses.own.get(key), tensor):
                value = self._created[id(parameter), fqn]
                put_scalar(optimizer, parameter, key, value, group=self._group)

    def _state_fqn(self, key: str) -> str:
        return f"{self._fqn}.state.{self._names.name}.{key}"


def becomes_number(own: Any, stored: StoredTensor) -> bool:
    """True if a stored tensor goes to where the optimizer has a number."""
    return is_number(own) and prod(stored.shape) == 1


def new_state(
    parameter: torch.Tensor,
    key: str,
    stored: StoredTensor,
    device: torch.device | None,
    *,
    group: Mapping[str, Any],
) -> torch.Tensor:
    """A state tensor that lies like its parameter where it has its shape, and is whole otherwise.

    On `device`, or where the optimizer itself would have made it; also for a parameter on the meta device that is left
    there.
    """
    dtype = torch_dtype(stored.dtype)
    is_scalar = not stored.shape and (parameter.dim() > 0 or key in HOST_SCALARS)
    if device is None and is_scalar:
        device = scalar_device(group, parameter)
    elif device is None and parameter.is_meta:
        device = target_device(parameter)
    if stored.shape == tuple(parameter.shape) and not is_scalar:
        return torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    return torch.empty(stored.shape, dtype=dtype, device=parameter.device if device is None else device)


def _copied(value: Any, fqn: str) -> Any:
    """The same tree in containers of its own, so that the live state is not changed. A subclass is one of its parts."""
    if isinstance(value, dict) or is_subclass(value):
        items = (value if isinstance(value, dict) else parts_of(fqn, value)).items()
        return {key: _copied(item, join_fqn(fqn, key)) for key, item in items}
    if type(value) not in (list, tuple):
        return value
    return type(value)(_copied(item, join_fqn(fqn, index)) for index, item in enumerate(value))
