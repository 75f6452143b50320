"""The state that an optimizer keeps for flat memory: tensors of its shape hold the same parts of the same parameters,
and a value that there is one of, as a count of steps is, stands for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from bytecheckpoint.adapters.flat_parts import FlatPart
from bytecheckpoint.adapters.hyperparameters import same_value
from bytecheckpoint.adapters.padding import as_stored, zero_beyond
from bytecheckpoint.adapters.parameter_names import OptimizedParameter, ParameterNames, check_state_key
from bytecheckpoint.adapters.plain_data import leaves
from bytecheckpoint.adapters.stored import Problem, StoredTensor, not_stored, placeholder
from bytecheckpoint.adapters.stored_optimizer import StoredOptimizer
from bytecheckpoint.adapters.tensors import LocalShard, LocalShards, torch_dtype, unsupported
from bytecheckpoint.errors import CheckpointMismatchError


class FlatState:
    """The optimizer state of one flat tensor, in one save or load."""

    def __init__(
        self,
        fqn: str,
        optimizer: torch.optim.Optimizer,
        memory: torch.Tensor,
        *,
        optimized: Sequence[OptimizedParameter],
        one_values: MutableMapping[str, torch.Tensor],
    ) -> None:
        self._fqn = fqn
        self._optimizer = optimizer
        self._memory = memory
        # A rank that has nothing of a parameter has nothing to say of it either.
        self._parts = [(each.names, each.part) for each in optimized if each.part.numel]
        self._one_values = one_values
        """By FQN: what a save writes and a load reads for each parameter of which the optimizer has one for all."""

    @property
    def _state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._optimizer.state.get(self._memory, {})
        return state

    def collect(self, shards: LocalShards) -> Iterator[tuple[str, dict[str, Any]]]:
        """Adds the tensors to the shards; gives names and the plain data of each that has any."""
        state, shape = self._state, self._memory.shape
        for names, part in self._parts:
            plain: dict[str, Any] = {}
            for key, value in state.items():
                fqn = self._state_fqn(names, key)
                if not isinstance(value, torch.Tensor):
                    _refuse_inside(fqn, value)
                    plain[key] = value
                elif value.shape == shape:
                    shards.found += part.shards(fqn, value)
                elif value.numel() == 1:
                    self._add_one_value(fqn, value, shards)
                else:
                    raise _refused(fqn, f"optimizer state of shape {list(value.shape)} for flat parameters")
            if plain:
                yield names.name, plain

    def _add_one_value(self, fqn: str, value: torch.Tensor, shards: LocalShards) -> None:
        """Once where several parts of one parameter lie on this rank, in this tensor or in others."""
        if fqn not in self._one_values:
            self._one_values[fqn] = value
            shards.add(fqn, value)
        elif not same_value(self._one_values[fqn], value):
            what = f"{value} for one part of a parameter and {self._one_values[fqn]} for another"
            raise unsupported(fqn, what, "give its parts names of their own, such as one for each layer")

    def expect(self, found: StoredOptimizer) -> tuple[list[LocalShard], list[Problem]]:
        shards, problems = LocalShards(), []
        for names, part in self._taken(found):
            if found.group(names) is None:
                problems.append(not_stored(f"{self._fqn}.groups.{names.name}"))
            states = found.tensors(names)
            for key, (fqn, tensor) in states.items():
                if "." in key:
                    text = f"{fqn}: a tensor inside a list, for which flat parameters have no place"
                    problems.append(Problem("shape", fqn, text))
                elif _is_one_value(tensor, part, key):
                    shards.add(fqn, self._one_values.get(fqn, placeholder(tensor)))
                else:
                    targets = part.shards(fqn, self._target(key, tensor))
                    shards.found += [as_stored(target, part.padded_axis, tensor.shape) for target in targets]
            for key, value in self._state.items():
                if key not in states and isinstance(value, torch.Tensor):
                    fqn = self._state_fqn(names, key)
                    is_flat = value.shape == self._memory.shape
                    shards.found += part.shards(fqn, value) if is_flat else []
                    problems += [] if is_flat else [not_stored(fqn)]
        return shards.found, problems

    def _target(self, key: str, stored: StoredTensor) -> torch.Tensor:
        own = self._state.get(key)
        if isinstance(own, torch.Tensor) and own.shape == self._memory.shape:
            return own
        return torch.empty(self._memory.shape, dtype=torch_dtype(stored.dtype), device="meta")

    def prepare(self, found: StoredOptimizer) -> None:
        for names, part in self._taken(found):
            for key, (fqn, tensor) in found.tensors(names).items():
                if _is_one_value(tensor, part, key):
                    self._one_values[fqn] = torch.empty_like(placeholder(tensor), device="cpu")
                elif not isinstance(self._state.get(key), torch.Tensor):
                    # Zeros, because the padding is stored nowhere and no step is to meet what lay there before.
                    new = torch.zeros_like(self._memory.detach(), dtype=torch_dtype(tensor.dtype))
                    self._optimizer.state[self._memory][key] = new

    def finish(self, found: StoredOptimizer) -> None:
        """Raises CheckpointMismatchError (conflict) where parameters do not agree on what there is one of."""
        values: dict[str, tuple[str, Any]] = {}
        for names, part in self._taken(found):
            of_parameter: dict[str, tuple[str, Any]] = {
                key: (fqn, self._one_values[fqn])
                for key, (fqn, tensor) in found.tensors(names).items()
                if _is_one_value(tensor, part, key)
            }
            self._zero_padding(part, found.tensors(names))
            of_parameter |= found.plain(names)
            for key, (fqn, value) in of_parameter.items():
                first_fqn, first = values.setdefault(key, (fqn, value))
                if not same_value(first, value):
                    raise _differ(first_fqn, first, fqn, value)
        for key, (_, value) in values.items():
            own = self._state.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
                own.copy_(value.view(own.shape))
            else:
                # Cloned, because what another part of the parameter is in has the same value, and steps count in place.
                own_value = value.clone() if isinstance(value, torch.Tensor) else value
                self._optimizer.state[self._memory][key] = own_value

    def _zero_padding(self, part: FlatPart, states: Mapping[str, tuple[str, StoredTensor]]) -> None:
        for key, (fqn, tensor) in states.items() if part.padded_axis is not None else ():
            own = self._state.get(key)
            if isinstance(own, torch.Tensor) and own.shape == self._memory.shape:
                for target in part.shards(fqn, own):
                    zero_beyond(target, part.padded_axis, tensor.shape)

    def _taken(self, found: StoredOptimizer) -> Iterator[tuple[ParameterNames, FlatPart]]:
        """The parameters whose state is loaded."""
        for names, part in self._parts:
            if not found.is_excluded(names):
                yield names, part

    def _state_fqn(self, names: ParameterNames, key: str) -> str:
        fqn = f"{self._fqn}.state.{names.name}.{key}"
        check_state_key(fqn, key)
        return fqn


def _is_one_value(stored: StoredTensor, part: FlatPart, key: str) -> bool:
    """Whether what is stored of a parameter's state is one value, and no tensor like the parameter."""
    return not stored.shape and (part.shape != () or key == "step")


def _refuse_inside(fqn: str, value: Any) -> None:
    if any(isinstance(leaf, torch.Tensor) for leaf in leaves(value, fqn).values()):
        raise _refused(fqn, f"a {type(value).__name__} of tensors in the optimizer state of flat parameters")


def _refused(fqn: str, what: str) -> Exception:
    return unsupported(fqn, what, "use an optimizer whose state has the shape of its parameters")


def _differ(first_fqn: str, first: Any, fqn: str, value: Any) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{fqn} is {value} in the checkpoint and {first_fqn} is {first}, but this rank keeps both parameters in one "
        "flat buffer, which has one value for all. Every tensor is loaded, this value is not: load into a model that "
        "keeps parameters apart (for FSDP, use_orig_params=True), or exclude one of the two",
        kind="conflict",
    )
