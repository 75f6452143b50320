"""The state that an optimizer keeps for a parameter that lies in no flat buffer: tensors sharded like the parameter,
whole tensors, and trees of both. Scalars, such as a count of steps, are tensors without dimensions in most of torch's
optimizers and numbers in others; each is loaded as the other.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTensor, placeholder
from bytecheckpoint.adapters.expectation import Problem, not_stored
from bytecheckpoint.adapters.native.module_walk import target_device
from bytecheckpoint.adapters.native.parameter_names import ParameterNames, check_state_key
from bytecheckpoint.adapters.native.subclass_flatten import dtensor_like, is_subclass, parts_of, restored
from bytecheckpoint.adapters.native.subclass_match import SubclassState
from bytecheckpoint.adapters.optimizers.stored_optimizer import StoredOptimizer
from bytecheckpoint.adapters.plain.plain_tree import leaves, with_leaves
from bytecheckpoint.adapters.shards import PLAIN_TENSORS, dtype_name, torch_dtype
from bytecheckpoint.adapters.torch_types import DTensor
from bytecheckpoint.errors import and_more
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn, unsupported

HOST_SCALARS = frozenset({"step", "mu_product"})
"""Keys of state that has no dimensions and is no DTensor, whatever the parameter is."""

_NUM_SHOWN = 5

_ON_DEVICE = ("capturable", "fused")
"""Hyperparameters with which torch's optimizers keep scalar state on the device of the parameter."""
_OBJECT_ADVICE = (
    "give the optimizer's class a state_dict() that has plain data and tensors in place of the object, and a "
    "load_state_dict() that makes the object of them"
)
_COUNT_IN_NUMBERS = (torch.optim.SparseAdam, torch.optim.LBFGS)


class ParamGroup(NamedTuple):
    """A param_group of an optimizer."""

    optimizer: torch.optim.Optimizer
    values: dict[str, Any]
    """The group itself, a dict with the hyperparameters."""
    parameters: Sequence[torch.Tensor]
    """The parameters of the group, also while a framework keeps them elsewhere."""


CreatedTensors = MutableMapping[tuple[int, str], torch.Tensor]
"""Tensors that a load makes anew and that no state holds before it ends: those in lists, and what becomes a number. The
key is the parameter's id, because two that are no longer tied have one FQN, and the FQN."""


def refuse_zero_redundancy(fqn: str, optimizer: torch.optim.Optimizer) -> None:
    """Raises CheckpointSaveError (unsupported_value) for torch's ZeroRedundancyOptimizer."""
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        what = f"a {type(optimizer).__name__}, which keeps the state of some parameters on each rank"
        raise unsupported(fqn, what, "shard with fully_shard (FSDP2) and a torch optimizer")


def warn_of_unsaved(fqn: str, optimizer: torch.optim.Optimizer) -> None:
    """Warns of state under keys that are no tensors, and of hooks of state_dict(): neither is saved. torch's own
    state_dict() has both, without a name that ranks with other parameters could share.
    """
    all_keys: list[Any] = list(optimizer.state)
    others = [key for key in all_keys if not isinstance(key, torch.Tensor)]
    keys = [repr(key) if isinstance(key, str | int) else f"a {type(key).__name__}" for key in others]
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", {}).values()
    added = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")]
    unsaved = [f"state under {and_more(keys, _NUM_SHOWN)}, which is no parameter"] if keys else []
    if added:
        unsaved.append("a hook of its state_dict()")
    if unsaved:
        warnings.warn(
            f"{fqn}: the {type(optimizer).__name__} has {' and '.join(unsaved)}; that is not saved: pass it beside the "
            "optimizer, as a value of its own",
            stacklevel=2,
        )


def collect_state(
    prefix: str, state: Mapping[str, Any], tensors: list[tuple[str, torch.Tensor]], keys: set[str]
) -> dict[str, Any]:
    """Appends the tensors of a state to `tensors`, under FQNs that start with `prefix`. Returns its other values, with
    references to tensors in them. `keys` has the keys that were checked already; new ones are checked and added.

    Raises CheckpointSaveError (unsupported_value) for a key that is empty, no str, or has a dot, and for a value that
    is neither plain data nor a tensor.
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


def _copied(value: Any, fqn: str) -> Any:
    """Returns the tree in containers of its own: live state is not changed. A subclass becomes a dict of its parts, and
    so does, with a warning, a dict of a type that a checkpoint does not have, such as a defaultdict. Raises
    CheckpointSaveError (unsupported_value) for any other object that has attributes.
    """
    if isinstance(value, dict) or is_subclass(value):
        items = (value if isinstance(value, dict) else parts_of(fqn, value)).items()
        copied = {key: _copied(item, join_fqn(fqn, key)) for key, item in items}
        if type(value) in (OrderedDict, Counter):
            return type(value)(copied)
        if isinstance(value, dict) and type(value) is not dict:
            name = f"{type(value).__module__}.{type(value).__qualname__}"  # and no FQN: one warning for all parameters
            text = f"a {name} in an optimizer's state is saved as a dict: a load puts a dict there"
            warnings.warn(text, stacklevel=2)
        return copied
    if type(value) not in (list, tuple):
        if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):  # as the projectors of GaLore
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise unsupported(fqn, f"an object of type {name}", _OBJECT_ADVICE)
        return value
    return type(value)(_copied(item, join_fqn(fqn, index)) for index, item in enumerate(value))


class ParamState:
    """One load of the state that an optimizer keeps for a parameter: compares it with the stored one, and fills it."""

    def __init__(
        self,
        fqn: str,
        group: ParamGroup,
        parameter: torch.Tensor,
        *,
        names: ParameterNames,
        stored: StoredOptimizer,
        created: CreatedTensors,
    ) -> None:
        self._prefix = join_fqn(fqn, f"state.{names.name}.")
        self._groups_fqn = join_fqn(fqn, f"groups.{names.name}")
        self._group = group
        self.parameter = parameter
        self._names = names
        self._stored = stored
        self._tensors = stored.tensors(names)
        self._created = created
        live = group.optimizer.state.get(parameter, {})
        tensors_and_plain = (self._tensors, stored.plain(names)) if stored.has_subclasses else ({}, {})
        self._subclasses = SubclassState(parameter, live, *tensors_and_plain)

    @property
    def fits(self) -> bool:
        """True if the parameter had its shape when its state was saved, as far as the checkpoint tells."""
        return self._stored.fits(self._names, tuple(self.parameter.shape))

    def expect(self, targets: list[tuple[str, torch.Tensor]]) -> list[Problem]:
        """Adds the targets of the stored tensors to `targets`, each with its FQN. Returns what does not fit, and what
        the optimizer has that the checkpoint lacks.
        """
        stored, names, subclasses = self._stored, self._names, self._subclasses
        if stored.had_none(names):
            return []
        problems = [] if self.fits else list(stored.misfits(names, tuple(self.parameter.shape)))
        if stored.group(names) is None:
            problems.append(not_stored(self._groups_fqn))
        for key, why in subclasses.problems():
            fqn = self._prefix + key
            problems.append(Problem("conflict", fqn, f"{fqn}: {why}"))
        if not self.fits:
            return problems
        plain = stored.plain(names)
        numbers = (key for key, value in subclasses.own.items() if is_number(value))
        problems += [not_stored(self._prefix + key) for key in numbers if key not in plain and key not in self._tensors]
        targets += self._targets(plain)
        return problems

    def _targets(self, plain: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        subclasses = self._subclasses
        for key, (fqn, tensor) in self._tensors.items():
            if not subclasses.takes(key):
                continue
            own = subclasses.own.get(key)
            target = own if isinstance(own, torch.Tensor) else self._created.get((id(self.parameter), fqn))
            yield fqn, self._new(key, tensor, torch.device("meta")) if target is None else target
        for key, value in subclasses.own.items():
            is_plain = key in plain and is_number(plain[key][1]) and is_scalar(value)
            is_own = isinstance(value, torch.Tensor) and key not in self._tensors and not is_plain
            if is_own and subclasses.takes(key) and not subclasses.is_elsewhere(key):
                yield self._prefix + key, value

    def _new(self, key: str, stored: StoredTensor, device: torch.device | None) -> torch.Tensor:
        """Makes a state tensor. It is sharded like its parameter if it has the shape of the parameter, and whole
        otherwise. It is created on `device`; if that is None, on the device that the optimizer itself would choose,
        also for a parameter on the meta device. State that had the dtype of its parameter has it again, because
        steps need it, where torch converts it too.
        """
        parameter = self.parameter
        has_no_dims = not stored.shape and (parameter.dim() > 0 or key in HOST_SCALARS)
        is_of_parameter = key not in HOST_SCALARS and not has_no_dims and not self._stored.has_subclasses
        if is_of_parameter and _follows_parameters(self._group.optimizer):
            was_alike = stored.dtype == self._stored.parameter_dtype(self._names) and parameter.is_floating_point()
            stored = stored._replace(dtype=dtype_name(parameter.dtype)) if was_alike else stored
        if "." in key:
            is_factor = (key, parameter.dim() > 1) in self._stored.keys_of_factors
            return self._subclasses.new_part(key, stored, device, is_factor=is_factor)
        dtype = torch_dtype(stored.dtype)
        if device is None and has_no_dims:
            device = scalar_device(as_loaded(self._group, self._names, self._stored).values, parameter)
        elif device is None and parameter.is_meta:
            device = target_device(parameter)
        if stored.shape == tuple(parameter.shape) and not has_no_dims:
            return _plain_like(parameter, dtype, device)
        return torch.empty(stored.shape, dtype=dtype, device=device or parameter.device)

    def lacks_any(self, fqns: Collection[str]) -> bool:
        """Returns True if the load would have to make a tensor of these state FQNs."""
        return any(fqn in fqns for _, fqn, _ in self._lacking())

    def _lacking(self) -> Iterator[tuple[str, str, StoredTensor]]:
        """Yields state key, state FQN and stored tensor of each tensor that the load makes."""
        subclasses = self._subclasses
        for key, (fqn, tensor) in self._tensors.items():
            is_there = key in subclasses.own if "." in key else isinstance(subclasses.own.get(key), torch.Tensor)
            if not is_there and subclasses.takes(key):
                yield key, fqn, tensor

    def prepare(self) -> None:
        """Makes the tensors that the state lacks."""
        parameter = self.parameter
        for key, fqn, tensor in list(self._lacking()):
            if "." in key:
                self._created[id(parameter), fqn] = self._new(key, tensor, None)
            elif _becomes_number(self._subclasses.own.get(key), tensor):
                self._created[id(parameter), fqn] = torch.empty_like(placeholder(tensor), device="cpu")
            else:
                self._group.optimizer.state[parameter][key] = self._new(key, tensor, None)

    def finish(self, checkpoint: CheckpointView) -> None:
        """Puts in place plain values, and values made of several tensors. Removes all state of the parameter if the
        saved optimizer had none.
        """
        group, parameter, subclasses = self._group, self.parameter, self._subclasses
        if self._stored.had_none(self._names):
            group.optimizer.state.pop(parameter, None)
        for key, (fqn, value) in self._stored.plain(self._names).items():
            if not subclasses.lacks(key) or not can_take(subclasses.own.get(key), value):
                continue
            if is_number(value):
                put_scalar(as_loaded(group, self._names, self._stored), parameter, key, value)
                continue
            refs = {leaf: ref for leaf, ref in leaves(value, fqn).items() if isinstance(ref, TensorRef)}
            new = {leaf: self._created[id(parameter), checkpoint.rename(ref.fqn)] for leaf, ref in refs.items()}
            filled = with_leaves(copy.deepcopy(value), fqn, new)  # another parameter may have been tied to this one
            group.optimizer.state[parameter][key] = restored(filled, fqn, like=parameter)
        for key, (fqn, tensor) in self._tensors.items():
            if _becomes_number(subclasses.own.get(key), tensor):
                put_scalar(group, parameter, key, self._created[id(parameter), fqn])


def _plain_like(parameter: torch.Tensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Returns uninitialised memory of the parameter's shape, on its device if `device` is None, and sharded as it is
    where that can be. Parts are plain where the parameter's are a subclass: what an optimizer keeps as one is saved in
    parts.
    """
    if not is_subclass(parameter):
        return torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    device = device or parameter.device
    spread = dtensor_like(parameter, parameter.shape, dtype, device) if isinstance(parameter, DTensor) else None
    return torch.empty(parameter.shape, dtype=dtype, device=device) if spread is None else spread


def _follows_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if torch's own load_state_dict() converts the state of an optimizer to the dtype of the parameters.
    Optimizers whose state has dtypes of its own, as that of 8-bit ones with its tables, have a method of their own.
    """
    return all(
        getattr(type(optimizer), name, None) is getattr(torch.optim.Optimizer, name, None)
        for name in ("load_state_dict", "_process_value_according_to_param_policy")
    )


def _becomes_number(own: Any, stored: StoredTensor) -> bool:
    return is_number(own) and prod(stored.shape) == 1


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_scalar(value: Any) -> bool:
    """Returns True if a piece of state is a tensor of one element, or an int or float but no bool."""
    return value.numel() == 1 if isinstance(value, torch.Tensor) else is_number(value)


def can_take(own: Any, value: Any) -> bool:
    """Returns True if a loaded value can take the place of the optimizer's `own`: a scalar in place of a
    tensor of one element, anything in place of what is no tensor. Other pairs were refused; strict=False omits them.
    """
    return not isinstance(own, torch.Tensor) or (is_scalar(value) and own.numel() == 1)


def as_loaded(group: ParamGroup, names: ParameterNames, stored: StoredOptimizer) -> ParamGroup:
    """Returns the group with the flags that the load gives it, which say where the next step expects scalars."""
    saved = stored.group(names)
    flags = () if saved is None else (key for key in _ON_DEVICE if key in saved.values and stored.takes(saved, key))
    return group._replace(values={**group.values, **{key: saved.values[key] for key in flags if saved is not None}})


def scalar_device(group: Mapping[str, Any], parameter: torch.Tensor) -> torch.device:
    """Returns the device on which an optimizer with this param_group keeps the scalar state of a parameter."""
    return parameter.device if any(map(group.get, _ON_DEVICE)) else torch.device("cpu")


def put_scalar(group: ParamGroup, parameter: torch.Tensor, key: str, value: Any) -> None:
    """Puts a loaded value into the state of a parameter. A tensor in the state is filled, a number stays a number. A
    state that lacks the key gets a new tensor if the value is one or the optimizer keeps one under this key.

    Never puts `value` itself there: other parts of the parameter, and parameters tied to it, get the same value, and
    steps change state in place.
    """
    state: MutableMapping[str, Any] = group.optimizer.state[parameter]
    own = state.get(key)
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
        own.copy_(value.view(own.shape))
    elif isinstance(own, torch.Tensor) and is_number(value):
        own.fill_(value)
    elif isinstance(value, torch.Tensor) and is_number(own):
        number = value.item()
        state[key] = int(number) if isinstance(own, int) and float(number).is_integer() else number
    elif isinstance(value, torch.Tensor):
        state[key] = value.clone()
    elif is_number(value) and own is None and key in HOST_SCALARS and _keeps_tensors(group.optimizer):
        device = scalar_device(group.values, parameter)
        state[key] = torch.tensor(float(value), dtype=torch.float32, device=device)
    else:
        state[key] = copy.deepcopy(value)


def _keeps_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if an optimizer keeps its scalars as tensors: torch's own and those derived from them do, except
    SparseAdam, LBFGS, and those derived from these two.
    """
    bases = {cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim.")}
    return bool(bases - {torch.optim.Optimizer}) and not isinstance(optimizer, _COUNT_IN_NUMBERS)
