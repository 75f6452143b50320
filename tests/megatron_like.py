"""Objects shaped like Megatron's, for tests without Megatron: what a sharded_state_dict holds, models that are split by
tensors and layers, and optimizers that keep flat shards of their parameters. Written after what is known of Megatron's
layout; how its values are spread here owes nothing to the library under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class ShardedTensor:
    key: str
    data: Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None


@dataclass
class ShardedObject:
    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0


@dataclass
class ShardedTensorFactory:
    key: str
    data: Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[[Any], Tensor]
    replica_id: int | tuple[int, ...] = 0
    flattened_range: slice | None = None


class LocalNonpersistentObject:
    def __init__(self, value: object) -> None:
        self._value = value

    def unwrap(self) -> object:
        return self._value


def sharded(key: str, data: Tensor, **fields: Any) -> ShardedTensor:
    """A tensor that is whole on this rank, but for what the fields say."""
    shape = tuple(data.shape)
    given: dict[str, Any] = {"global_shape": shape, "global_offset": (0,) * len(shape)}
    return ShardedTensor(key, data, data.dtype, shape, **given | fields)


class Grid(NamedTuple):
    """How many ranks there are along each axis, and which of them this is. Tensor parallelism is innermost."""

    tp: int
    pp: int
    dp: int
    rank: int = 0

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.tp * self.dp)


class Spec(NamedTuple):
    """One tensor of a model, and how it is split."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor, without an axis for layers."""
    layer: tuple[int, int] | None = None
    """Where layers are stacked: which this is, and how many there are."""
    tp_axis: int | None = None
    is_swiglu: bool = False
    """Two halves of the rows, of each of which every rank has a part."""
    padded_rows: int | None = None
    dtype: torch.dtype = torch.float32
    kind: str = "trained"
    """Or `frozen`, or `buffer`."""
    is_copy: bool = False
    """Of a tensor that another stage has."""

    def local(self, full: Tensor, grid: Grid) -> Tensor:
        """This rank's part of a tensor whose first axis is that of layers, if they are stacked. A copy."""
        if self.layer is not None:
            full = full[self.layer[0]]
        if self.padded_rows is not None:
            full = torch.cat([full, full.new_zeros(self.padded_rows - full.shape[0], *full.shape[1:])])
        if self.tp_axis is None:
            return full.clone()
        halves = full.chunk(2) if self.is_swiglu else [full]
        return torch.cat([half.tensor_split(grid.tp, self.tp_axis)[grid.tp_rank] for half in halves]).clone()

    @property
    def global_shape(self) -> tuple[int, ...]:
        rows = self.shape if self.padded_rows is None else (self.padded_rows, *self.shape[1:])
        return rows if self.layer is None else (self.layer[1], *rows)

    def sharded(self, data: Tensor, grid: Grid) -> ShardedTensor | ShardedTensorFactory:
        """As a sharded_state_dict describes this rank's part."""
        replica = (int(self.is_copy), grid.tp_rank if self.tp_axis is None else 0, grid.dp_rank)
        if not self.is_swiglu:
            return self._piece(data, self._tp_offset(self.global_shape, grid), replica)
        num_rows = self.shape[0] // 2

        def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
            half = (*self.global_shape[: -len(self.shape)], num_rows, *self.shape[1:])
            first = self._tp_offset(half, grid)
            return [
                self._piece(part, first + start, replica_id)
                for part, start in zip(tensor.chunk(2), (0, num_rows), strict=True)
            ]

        return ShardedTensorFactory(self.key, data, build, torch.cat, replica)

    def _tp_offset(self, shape: Sequence[int], grid: Grid) -> int:
        if self.tp_axis is None:
            return 0
        length = shape[len(shape) - len(self.shape) + self.tp_axis]
        return int(torch.arange(length).tensor_split(grid.tp)[grid.tp_rank][0])

    def _piece(self, data: Tensor, tp_offset: int, replica: Any) -> ShardedTensor:
        offsets = [0] * len(self.shape)
        if self.tp_axis is not None:
            offsets[self.tp_axis] = tp_offset
        return sharded(
            self.key,
            data,
            global_shape=self.global_shape,
            global_offset=(*(() if self.layer is None else self.layer[:1]), *offsets),
            replica_id=replica,
            prepend_axis_num=0 if self.layer is None else 1,
            allow_shape_mismatch=self.padded_rows is not None,
        )


Source = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""The whole tensor of this key, shape (with the axis for layers, without padding) and dtype."""


def full_shape(spec: Spec) -> tuple[int, ...]:
    return spec.shape if spec.layer is None else (spec.layer[1], *spec.shape)


class Model(nn.Module):
    """The tensors that one rank has of a model, or of one chunk of it."""

    def __init__(self, specs: Sequence[Spec], grid: Grid, source: Source) -> None:
        super().__init__()
        self.grid = grid
        self.specs = {str(index): spec for index, spec in enumerate(specs)}
        for name, spec in self.specs.items():
            value = spec.local(source(spec.key, full_shape(spec), spec.dtype), grid)
            if spec.kind == "buffer":
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value, requires_grad=spec.kind == "trained"))

    def sharded_state_dict(self) -> dict[str, Any]:
        tensors = self.state_dict(keep_vars=True)
        return {f"local.{name}": spec.sharded(tensors[name], self.grid) for name, spec in self.specs.items()}

    def trained(self) -> Iterator[tuple[nn.Parameter, Spec]]:
        for name, spec in self.specs.items():
            if spec.kind == "trained":
                yield self.get_parameter(name), spec


class Wrapper(nn.Module):
    """As Megatron's DistributedDataParallel and Float16Module wrap a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Bucket(NamedTuple):
    """Part of a flat buffer; in elements."""

    start: int
    end: int
    num_unpadded: int


class Layout(NamedTuple):
    places: list[range]
    """Of each parameter, in the order in which they were registered."""
    buckets: list[Bucket]

    def owned(self, dp: int, dp_rank: int) -> Iterator[tuple[int, range, int]]:
        """What a rank has: the parameter, which of its elements, and where in the buffer those begin."""
        for bucket in self.buckets:
            share = (bucket.end - bucket.start) // dp
            start = bucket.start + dp_rank * share
            for index, place in reversed(list(enumerate(self.places))):
                lo, hi = max(start, place.start), min(start + share, place.stop)
                if lo < hi and bucket.start <= place.start < bucket.end:
                    yield index, range(lo - place.start, hi - place.start), lo


def layout_of(numels: Sequence[int], dp: int, bucket_size: int | None = None) -> Layout:
    """Where parameters lie in a flat buffer: the last one first, each at a multiple of 64; buckets are padded."""
    places: dict[int, range] = {}
    buckets: list[Bucket] = []
    bucket_start = position = 0
    for index in reversed(range(len(numels))):
        start = -(-position // 64) * 64
        position = start + numels[index]
        places[index] = range(start, position)
        if index == 0 or (bucket_size is not None and position - bucket_start >= bucket_size):
            multiple = lcm(dp, 128)
            num_unpadded = position - bucket_start
            end = bucket_start + -(-num_unpadded // multiple) * multiple
            buckets.append(Bucket(bucket_start, end, num_unpadded))
            bucket_start = position = end
    return Layout([places[index] for index in range(len(numels))], buckets)


class _Range(NamedTuple):
    start: int
    end: int


class _Buffer:
    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout) -> None:
        self.param_index_map = {
            parameter: (place.start, place.stop, 0) for parameter, place in zip(parameters, layout.places, strict=True)
        }


class GradScaler:
    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor([scale])
        self.growth_tracker = 3

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale.copy_(state_dict["scale"])
        self.growth_tracker = state_dict["growth_tracker"]


class _Optimizer:
    """What all of Megatron's optimizers have."""

    is_stub_optimizer = False

    def __init__(self, scaler: GradScaler | None) -> None:
        self.grad_scaler = scaler
        self.optimizer: Any = None

    def reload_model_params(self) -> None:
        raise AssertionError

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError

    load_state_dict = state_dict


Groups = Sequence[tuple[Sequence[nn.Parameter], dict[str, Any]]]
"""Parameters, and the hyperparameters of their group."""
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class DistributedOptimizer(_Optimizer):
    """Each rank optimizes its share of a flat buffer: one of what is bf16, and one of what is fp32."""

    def __init__(
        self,
        groups: Groups,
        make: Make,
        grid: Grid,
        *,
        bucket_size: int | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        super().__init__(scaler)
        self.buffers = []
        self._ranges: dict[nn.Parameter, _Range] = {}
        everything = [parameter for parameters, _ in groups for parameter in parameters]
        for is_half in (True, False):
            of_dtype = [parameter for parameter in everything if (parameter.dtype != torch.float32) == is_half]
            layout = layout_of([parameter.numel() for parameter in of_dtype], grid.dp, bucket_size)
            self.buffers.append(_Buffer(of_dtype, layout))
            for index, elements, _ in layout.owned(grid.dp, grid.dp_rank) if of_dtype else ():
                self._ranges[of_dtype[index]] = _Range(elements.start, elements.stop)
        self.model_float16_groups, self.shard_fp32_from_float16_groups = [], []
        self.model_fp32_groups, self.shard_fp32_groups = [], []
        for parameters, _ in groups:
            here = [parameter for parameter in self._ranges if any(parameter is other for other in parameters)]
            half = [parameter for parameter in here if parameter.dtype != torch.float32]
            single = [parameter for parameter in here if parameter.dtype == torch.float32]
            self.model_float16_groups.append(half)
            self.shard_fp32_from_float16_groups.append([self._shard(parameter).clone().float() for parameter in half])
            self.model_fp32_groups.append(single)
            self.shard_fp32_groups.append([self._shard(parameter) for parameter in single])
        held = zip(self.shard_fp32_groups, self.shard_fp32_from_float16_groups, groups, strict=True)
        self.optimizer = make([{"params": [*views, *copies], **values} for views, copies, (_, values) in held])

    def _shard(self, parameter: nn.Parameter) -> Tensor:
        of_parameter = self._ranges[parameter]
        return parameter.detach().view(-1)[of_parameter.start : of_parameter.end]

    def _get_model_param_range_map(self, parameter: nn.Parameter) -> dict[str, _Range]:
        return {"param": self._ranges[parameter]}

    def held(self) -> Iterator[tuple[nn.Parameter, Tensor, slice]]:
        """Of each parameter what the inner optimizer has, and which elements of the flattened parameter that is."""
        pairs = [
            *zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True),
            *zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True),
        ]
        for parameters, shards in pairs:
            for parameter, shard in zip(parameters, shards, strict=True):
                of_parameter = self._ranges[parameter]
                yield parameter, shard, slice(of_parameter.start, of_parameter.end)


class Float16Optimizer(_Optimizer):
    """Whole fp32 copies of what is bf16."""

    def __init__(self, groups: Groups, make: Make, *, scaler: GradScaler | None = None) -> None:
        super().__init__(scaler)
        self.float16_groups, self.fp32_from_float16_groups, self.fp32_from_fp32_groups = [], [], []
        for parameters, _ in groups:
            half = [parameter for parameter in parameters if parameter.dtype != torch.float32]
            copies = [parameter.detach().clone().float() for parameter in half]
            for parameter, copy in zip(half, copies, strict=True):
                parameter.main_param = copy
            self.float16_groups.append(half)
            self.fp32_from_float16_groups.append(copies)
            self.fp32_from_fp32_groups.append(
                [parameter for parameter in parameters if parameter.dtype == torch.float32]
            )
        held = zip(self.fp32_from_fp32_groups, self.fp32_from_float16_groups, groups, strict=True)
        self.optimizer = make([{"params": [*own, *copies], **values} for own, copies, (_, values) in held])

    def held(self) -> Iterator[tuple[nn.Parameter, Tensor, slice]]:
        for parameters, copies in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
            for parameter, copy in zip(parameters, copies, strict=True):
                yield parameter, copy, slice(None)
        for parameters in self.fp32_from_fp32_groups:
            for parameter in parameters:
                yield parameter, parameter, slice(None)


class ChainedOptimizer:
    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.chained_optimizers = list(optimizers)

    @property
    def optimizer(self) -> Any:
        raise AssertionError

    def reload_model_params(self) -> None:
        raise AssertionError

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError

    load_state_dict = state_dict
