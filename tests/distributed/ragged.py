"""veScale's placement, for those who do not have veScale, and the true state laid out by it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from distributed import truth
from distributed.builders import StateBuilder


class Own(Placement):
    """torch's dispatch of DTensors crashes where a placement was not initialised, which a dataclass forgets."""

    def __post_init__(self) -> None:
        super().__init__()


@dataclass(frozen=True)
class RaggedShard(Own):
    """What veScale's placement is to those who do not know it."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]


def flat_of_ragged(value: torch.Tensor, placement: RaggedShard, index: int) -> torch.Tensor:
    units = placement.local_units
    flat = value.reshape(-1)
    ends = [flat.numel() // sum(units) * sum(units[:number]) for number in range(len(units) + 1)]
    return flat[ends[index] : ends[index + 1]]


def ragged_tensor(mesh: DeviceMesh, rank: int, fqn: str, value: Tensor) -> DTensor:
    """Cut at any element, elsewhere for each FQN; the last rank has the rest, which may be nothing."""
    cuts = sorted(byte * value.numel() // 200 for byte in hashlib.sha256(fqn.encode()).digest()[:3])
    ends = [min(cut, value.numel()) for cut in cuts]
    units = tuple(end - start for start, end in zip([0, *ends], [*ends, value.numel()], strict=True))
    placement = RaggedShard(tuple(range(value.ndim)), units)
    spec = DTensorSpec(mesh, (placement,), TensorMeta(value.shape, value.stride(), value.dtype))
    return DTensor(flat_of_ragged(value, placement, rank).clone(), spec, requires_grad=False)


class RaggedBuilder(StateBuilder):
    """Builds the true state, and others, on one of four ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._mesh = init_device_mesh("cpu", (4,))

    def _state(self, name: str, prefix: str, *, has_state: bool) -> dict[str, Any]:
        model = self._model(lambda fqn, tensor: truth.value(prefix + fqn, tensor))
        optimizer = truth.make_optimizer(name, model)
        if prefix:
            for group in optimizer.param_groups:
                group.update(lr=0.5, weight_decay=0.5)
        entries = truth.STATE_TENSORS[name] if has_state else ()
        shadows = {entry: self._shadow(prefix, entry) for entry in entries}
        for fqn, parameter in model.named_parameters() if has_state else ():
            if parameter.requires_grad:
                optimizer.state[parameter] = {entry: shadows[entry][fqn].detach() for entry in entries}
                optimizer.state[parameter]["step"] = truth.step(prefix + fqn, name)
        return {"model": model, "optimizer": optimizer}

    def _shadow(self, prefix: str, entry: str) -> dict[str, Tensor]:
        shadow = self._model(lambda fqn, tensor: truth.value(f"{prefix}{fqn}.{entry}", tensor))
        return dict(shadow.named_parameters())

    def _model(self, source: Callable[[str, Tensor], Tensor]) -> nn.Module:
        model = truth.Transformer()
        truth.fill(model, source)
        for fqn, parameter in list(model.named_parameters()):
            path, _, name = fqn.rpartition(".")
            sharded = ragged_tensor(self._mesh, self._rank, fqn, parameter.detach())
            model.get_submodule(path).register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
        return model
