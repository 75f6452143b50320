"""The state that an optimizer keeps for flat memory: tensors of its shape hold the same parts of the same parameters,
and a single value, such as a count of steps, stands for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch

from bytecheckpoint.adapters.checkpoint_view import StoredTensor, placeholder
from bytecheckpoint.adapters.expectation import Expectation, Problem, not_stored
from bytecheckpoint.adapters.frameworks.flat_parameters import FlatParamPart, same_but_for_padding, split_padding
from bytecheckpoint.adapters.native.parameter_names import OptimizedParameter, ParameterNames, check_state_key
from bytecheckpoint.adapters.optimizers.hyperparameters import same_value
from bytecheckpoint.adapters.optimizers.param_state import (
    HOST_SCALARS,
    ParamGroup,
    as_loaded,
    can_take,
    is_number,
    is_scalar,
    put_scalar,
    scalar_device,
)
from bytecheckpoint.adapters.optimizers.stored_optimizer import StoredOptimizer
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.shards import LocalShard, LocalShards, torch_dtype
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn, unsupported

_ADVICE = "use an optimizer whose state has the shape of its parameters"


class FlatParamState:
    """The optimizer state of one flat tensor, in one save or load."""

    def __init__(
        self,
        fqn: str,
        group: ParamGroup,
        memory: torch.Tensor,
        *,
        optimized: Sequence[OptimizedParameter],
        scalars: MutableMapping[str, Any],
    ) -> None:
        self._fqn = fqn
        self._memory = memory
        self._group = group
        # A rank without elements of a parameter saves no state of it.
        self._parts = [(each.names, each.part) for each in optimized if each.part.numel]
        self._scalars = scalars
        """Scalars by FQN: a save writes and a load reads one for each parameter, the optimizer has one for all."""

    @property
    def _state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._group.optimizer.state.get(self._memory, {})
        return state

    def collect(self, shards: LocalShards) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields name and plain state of each parameter that has plain state. Adds the tensors to `shards` while the
        iterator is consumed. Raises CheckpointSaveError (unsupported_value) for state that has neither the shape of
        this memory nor a single value, the same for all parts of a parameter.
        """
        state, shape = self._state, self._memory.shape
        for names, part in self._parts:
            plain: dict[str, Any] = {}
            for key, value in state.items():
                fqn = self._state_fqn(names, key)
                if not isinstance(value, torch.Tensor) and _holds(torch.Tensor, value, fqn):
                    what = f"a {type(value).__name__} of tensors in the optimizer state of flat parameters"
                    raise unsupported(fqn, what, _ADVICE)
                if not isinstance(value, torch.Tensor):
                    self._note_value(fqn, value)
                    plain[key] = value
                elif value.shape == shape:
                    shards.found += part.shards(fqn, value)
                elif value.numel() == 1:
                    # Once, where several parts of one parameter lie on this rank.
                    shards.add_all([] if fqn in self._scalars else [(fqn, value)])
                    self._note_value(fqn, value)
                else:
                    what = f"optimizer state of shape {list(value.shape)} for flat parameters"
                    raise unsupported(fqn, what, _ADVICE)
            if plain:
                yield names.name, plain

    def _note_value(self, fqn: str, value: Any) -> None:
        """Notes the value of one part of a parameter. Raises CheckpointSaveError (unsupported_value) if another part
        has another value or form.
        """
        other = self._scalars.setdefault(fqn, value)
        if isinstance(other, torch.Tensor) != isinstance(value, torch.Tensor) or not same_value(other, value):
            what = f"{value} for one part of a parameter and {other} for another"
            raise unsupported(fqn, what, "give its parts names of their own, such as one for each layer")

    def _had_none(self, stored: StoredOptimizer) -> bool:
        """Returns True if a load removes the state: the optimizer kept nothing for any of the parameters."""
        return all(stored.had_none(names) and not stored.is_excluded(names) for names, _ in self._parts)

    def expect(self, stored: StoredOptimizer) -> Expectation:
        if self._had_none(stored):
            return Expectation([], set(), [])
        shards = LocalShards(with_addresses=True)
        problems: list[Problem] = []
        padding: list[LocalShard] = []
        are_scalars: dict[str, set[bool]] = {}
        for names, part in self._not_excluded(stored):
            if stored.group(names) is None:
                problems.append(not_stored(join_fqn(self._fqn, f"groups.{names.name}")))
            if not same_but_for_padding(part.padded_axis, part.shape, _stored_as(names, part, stored)):
                problems += stored.misfits(names, part.shape)
        for names, part, stored_shape in self._loaded_parts(stored):
            states = stored.tensors(names)
            for key, (fqn, tensor) in states.items():
                if "." in key:
                    text = f"{fqn}: a tensor inside a list, for which flat parameters have no place"
                    problems.append(Problem("shape", fqn, text))
                elif _is_stored_scalar(tensor, stored_shape, key):
                    are_scalars.setdefault(key, set()).add(True)
                    shards.add(fqn, self._scalars.get(fqn, placeholder(tensor)))
                elif isinstance(own := self._state.get(key), torch.Tensor) and own.shape != self._memory.shape:
                    shapes = f"shape {list(tensor.shape)} in the checkpoint, {list(own.shape)} in the state"
                    problems.append(Problem("shape", fqn, f"{fqn}: {shapes}, for a flat buffer"))
                else:
                    are_scalars.setdefault(key, set()).add(False)
                    new = torch.empty(self._memory.shape, dtype=torch_dtype(tensor.dtype), device="meta")
                    targets = part.shards(fqn, own if isinstance(own, torch.Tensor) else new)
                    split = [split_padding(each, part.padded_axis, tensor.shape) for each in targets]
                    shards.found += [of_stored for of_stored, _ in split]
                    padding += chain.from_iterable(beyond for _, beyond in split)
            plain = stored.plain(names)
            for key, value in self._state.items():
                is_number_there = key in plain and is_number(plain[key][1]) and is_scalar(value)
                if key not in states and isinstance(value, torch.Tensor) and not is_number_there:
                    fqn = self._state_fqn(names, key)
                    is_flat = value.shape == self._memory.shape
                    shards.found += part.shards(fqn, value) if is_flat else []
                    problems += [] if is_flat else [not_stored(fqn)]
                elif is_number(value) and key not in states and key not in plain:
                    problems.append(not_stored(self._state_fqn(names, key)))
        problems += chain.from_iterable(self._clashes(key, of_key, stored) for key, of_key in are_scalars.items())
        return Expectation(shards.found, set(), problems, padding=padding)

    def _clashes(self, key: str, are_scalars: Collection[bool], stored: StoredOptimizer) -> Iterator[Problem]:
        """Yields a problem for each parameter that has a scalar under this key of its state in the checkpoint, where
        another parameter or the live state has a tensor. `are_scalars` has True if a parameter in the checkpoint has a
        scalar there, and False if one has a tensor.
        """
        own = self._state.get(key)
        if True in are_scalars and (False in are_scalars or (isinstance(own, torch.Tensor) and own.numel() != 1)):
            for names, _, stored_shape in self._loaded_parts(stored):
                fqn, tensor = stored.tensors(names).get(key, ("", None))
                if tensor is not None and _is_stored_scalar(tensor, stored_shape, key):
                    text = (
                        f"{fqn}: one value of shape {list(tensor.shape)} in the checkpoint, and in the state a tensor "
                        "with an element for each of the parameter"
                    )
                    yield Problem("shape", fqn, text)

    def prepare(self, stored: StoredOptimizer) -> None:
        for names, _, stored_shape in self._loaded_parts(stored):
            for key, (fqn, tensor) in _whole_tensors(names, stored).items():
                if _is_stored_scalar(tensor, stored_shape, key):
                    device = scalar_device(as_loaded(self._group, names, stored).values, self._memory)
                    self._scalars[fqn] = torch.empty_like(placeholder(tensor), device=device)
                elif not isinstance(self._state.get(key), torch.Tensor):
                    # Zeros: padding is not stored, and no step of the optimizer may use what was in that memory before.
                    new = torch.zeros_like(self._memory.detach(), dtype=torch_dtype(tensor.dtype))
                    self._group.optimizer.state[self._memory][key] = new

    def finish(self, stored: StoredOptimizer) -> list[str]:
        """Puts scalars in place. Returns a message for each that parameters disagree about: it stays as it is."""
        if self._had_none(stored):
            self._group.optimizer.state.pop(self._memory, None)
        values: dict[str, tuple[str, Any]] = {}
        differing: dict[str, str] = {}
        group = self._group
        for names, _, stored_shape in self._loaded_parts(stored):
            group = as_loaded(self._group, names, stored)
            of_parameter: dict[str, tuple[str, Any]] = {
                key: (fqn, self._scalars[fqn])
                for key, (fqn, tensor) in _whole_tensors(names, stored).items()
                if _is_stored_scalar(tensor, stored_shape, key)
            }
            # Trees of tensors were refused, and strict=False leaves them out.
            plain = stored.plain(names).items()
            of_parameter |= {key: (fqn, value) for key, (fqn, value) in plain if not _holds(TensorRef, value, fqn)}
            for key, (fqn, value) in of_parameter.items():
                first_fqn, first = values.setdefault(key, (fqn, value))
                if key not in differing and not same_value(first, value):
                    differing[key] = f"{fqn} is {value} in the checkpoint and {first_fqn} is {first}"
        for key, (_, value) in values.items():
            if key not in differing and can_take(self._state.get(key), value):
                put_scalar(group, self._memory, key, value)
        return list(differing.values())

    def _loaded_parts(self, stored: StoredOptimizer) -> Iterator[tuple[ParameterNames, FlatParamPart, tuple[int, ...]]]:
        """Yields names and part of each parameter whose state is loaded, and its shape when its state was saved."""
        for names, part in self._not_excluded(stored):
            stored_shape = _stored_as(names, part, stored)
            if same_but_for_padding(part.padded_axis, part.shape, stored_shape):
                yield names, part, stored_shape

    def _not_excluded(self, stored: StoredOptimizer) -> Iterator[tuple[ParameterNames, FlatParamPart]]:
        return ((names, part) for names, part in self._parts if not stored.is_excluded(names))

    def _state_fqn(self, names: ParameterNames, key: str) -> str:
        fqn = join_fqn(self._fqn, f"state.{names.name}.{key}")
        check_state_key(fqn, key)
        return fqn


def _whole_tensors(names: ParameterNames, stored: StoredOptimizer) -> dict[str, tuple[str, StoredTensor]]:
    """Returns the tensors of a parameter's state by key, without those inside lists, which were refused."""
    return {key: of_key for key, of_key in stored.tensors(names).items() if "." not in key}


def _stored_as(names: ParameterNames, part: FlatParamPart, stored: StoredOptimizer) -> tuple[int, ...]:
    """Returns the shape of the parameter when its state was saved; its shape now, if the checkpoint does not tell."""
    shape = stored.parameter_shape(names)
    return part.shape if shape is None else shape


def _is_stored_scalar(stored: StoredTensor, shape: tuple[int, ...], key: str) -> bool:
    """Returns True if the stored state of a parameter of this shape is a scalar, and no tensor like the parameter."""
    return prod(stored.shape) == 1 and (stored.shape != shape or key in HOST_SCALARS)


def _holds(kind: type[torch.Tensor | TensorRef], value: Any, fqn: str) -> bool:
    return any(isinstance(leaf, kind) for leaf in leaves(value, fqn).values())


def differing_error(texts: Sequence[str]) -> CheckpointMismatchError:
    """Returns the error for the values that `FlatParamState.finish` left unchanged."""
    return CheckpointMismatchError(
        f"{'; '.join(texts)}; but this rank keeps both parameters in one flat buffer, which has one value for all. "
        "What else the checkpoint has for this rank is loaded, and this value is as it was: load into a model that "
        "keeps parameters apart (for FSDP, use_orig_params=True), or exclude one of the two",
        kind="conflict",
    )
