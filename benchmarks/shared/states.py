"""Builds the states of the workloads in any layout, fills them with values that tell where in which tensor they belong,
and compares them after a load.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shared.workloads import Layout, Workload

NUM_BLOCKS = 3
NUM_PARAMETERS = 151e6
"""Parameters of the model at size 1, which makes its matrices 2048 wide, and its state 2.1 GB."""
NUM_SMALL = 20_000
LARGE_SHAPE = (65_536, 8_192)
"""Shape of the one large fp32 tensor at size 1, which has 2.1 GB: fewer rows below it."""
PART = (0.45, 0.55)
"""Part of the rows that a slice takes."""
WRONG = 7.0
"""A value that no tensor has."""
PRIME = 65_521
ROWS_AT_ONCE = 1 << 24
"""Number of elements that are made and compared at once."""


class HeldState:
    """The part of a state that one rank holds, without values until `fill`."""

    def __init__(self, contents: str, layout: Layout, size: float) -> None:
        self.layout = layout
        self.state: dict[str, Any] = {}
        """State as a user of bytecheckpoint passes it: modules and optimizers where there are any."""
        if contents == "model":
            self.state = model_state(size, layout)
        elif contents == "small":
            self.state = {"model": small_tensors(round(NUM_SMALL * size), is_sharded=layout.kind == "fsdp")}
        else:
            self.state = {"model": {"tensor": torch.empty(self._large_shape(size))}}
        self.global_rows = round(LARGE_SHAPE[0] * size)

    def _large_shape(self, size: float) -> tuple[int, int]:
        rows = round(LARGE_SHAPE[0] * size)
        part = slice_rows(rows) if self.layout.kind == "slice" else slice(0, rows)
        return part.stop - part.start, LARGE_SHAPE[1]

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of the state by name, for candidates that take only these."""
        if "optimizer" not in self.state:
            return dict(self.state["model"])
        tensors = {f"model.{name}": tensor for name, tensor in self.state["model"].state_dict().items()}
        for name, parameter in self.state["master"].named_parameters():
            tensors[f"master.{name}"] = parameter.detach()
            for key, value in self.state["optimizer"].state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    @property
    def local_tensors(self) -> dict[str, torch.Tensor]:
        """Local parts of the tensors, which share the state's memory."""
        return {name: local(tensor) for name, tensor in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranks together; replicas count once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def is_replicated(self) -> bool:
        """True if all ranks hold the same."""
        return self.layout.kind == "replicated"

    @property
    def part(self) -> slice:
        """Rows of the large tensor that a slice takes."""
        return slice_rows(self.global_rows)

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def fill(self) -> None:
        for name, piece in self._pieces():
            for rows, values in true_values(name, piece):
                piece.tensor[rows].copy_(values)

    def spoil(self) -> None:
        for _, piece in self._pieces():
            piece.tensor.fill_(WRONG)

    def check(self) -> None:
        """Raises ValueError for the first tensor whose values are not the true ones."""
        for name, piece in self._pieces():
            for rows, values in true_values(name, piece):
                if not torch.equal(piece.tensor[rows], values.to(piece.tensor.dtype)):
                    raise ValueError(f"{name} has wrong values after the load on rank {self.rank}")

    def _pieces(self) -> Iterator[tuple[str, Piece]]:
        for name, tensor in self.tensors.items():
            if isinstance(tensor, DTensor):
                _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                yield name, Piece(local(tensor), tuple(offsets), tuple(tensor.shape))
            elif self.layout.kind == "slice":
                yield name, Piece(tensor, (self.part.start, 0), (self.global_rows, LARGE_SHAPE[1]))
            else:
                yield name, Piece(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))


class Piece(NamedTuple):
    """The region of a tensor that a rank holds; all in elements."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]


def slice_rows(num_rows: int) -> slice:
    return slice(round(num_rows * PART[0]), round(num_rows * PART[1]))


def true_values(name: str, piece: Piece) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yields some rows of the piece at a time with their values in fp32: the sum of a term for the row and one for the
    column.
    """
    lengths = tuple(piece.tensor.shape)
    terms = [
        axis_terms(f"{name} {axis}", offset, length)
        for axis, (offset, length) in enumerate(zip(piece.offsets, lengths, strict=True))
    ]
    if len(terms) < 2:
        yield ..., terms[0] if terms else axis_terms(name, 0, 1)[0]
        return
    step = max(1, ROWS_AT_ONCE // max(1, lengths[1]))
    for start in range(0, lengths[0], step):
        rows = slice(start, min(start + step, lengths[0]))
        yield rows, terms[0][rows, None] + terms[1][None, :]


def axis_terms(seed: str, offset: int, length: int) -> torch.Tensor:
    """Returns values between 0 and 1, as if by chance."""
    positions = torch.arange(offset, offset + length, dtype=torch.int64)
    start = zlib.crc32(seed.encode())
    return ((positions * positions * 31 + positions * 4_099 + start) % PRIME).float() / PRIME


def small_tensors(num_tensors: int, *, is_sharded: bool) -> dict[str, torch.Tensor]:
    shapes = small_shapes(num_tensors)
    if not is_sharded:
        return {name: torch.empty(shape) for name, shape in shapes.items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: empty_dtensor(*shape, device_mesh=mesh, placements=[Shard(0)]) for name, shape in shapes.items()}


def model_state(size: float, layout: Layout) -> dict[str, Any]:
    """Returns a bf16 model, its fp32 master weights and an AdamW on them that has its state: all without values."""
    cut = cutter(layout)
    model, master = (built(size, dtype, cut) for dtype in (torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-4, fused=True)
    for parameter in master.parameters():
        moments = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return {"model": model, "master": master, "optimizer": optimizer}


def built(size: float, dtype: torch.dtype, cut: Callable[[nn.Sequential], None]) -> nn.Sequential:
    blocks = meta_blocks(size, dtype)
    cut(blocks)
    return blocks.to_empty(device="cpu")


def cutter(layout: Layout) -> Callable[[nn.Sequential], None]:
    """Returns a function that spreads a model without memory over the ranks. Makes their mesh, once."""
    if layout.kind == "fsdp":
        mesh = init_device_mesh("cpu", (layout.num_ranks,))
        return lambda blocks: shard(blocks, mesh)
    if layout.kind == "columns":
        mesh = init_device_mesh("cpu", (layout.num_ranks,))
        return lambda blocks: parallelize(blocks, mesh, first=RowwiseParallel)
    if layout.kind == "tp-fsdp":
        mesh = init_device_mesh("cpu", (layout.num_ranks // 2, 2), mesh_dim_names=("dp", "tp"))

        def cut(blocks: nn.Sequential) -> None:
            parallelize(blocks, mesh["tp"], first=ColwiseParallel)
            shard(blocks, mesh["dp"])

        return cut
    return lambda blocks: None  # noqa: ARG005  there is nothing to spread


def shard(blocks: nn.Sequential, mesh: Any) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(blocks, mesh=mesh)


def parallelize(blocks: nn.Sequential, mesh: Any, *, first: type[ParallelStyle]) -> None:
    """Cuts each pair of matrices, the first one by `first`. RowwiseParallel cuts the input's dimension: by columns."""
    plan = {"qkv": first(), "up": first(), "out": RowwiseParallel(), "down": RowwiseParallel()}
    for block in blocks:
        parallelize_module(block, mesh, {**plan, "norm": SequenceParallel()})


def held_by(workload: Workload, side: str, size: float) -> HeldState:
    """Builds this rank's part of the `source` or `target` of a workload."""
    layout = workload.source if side == "source" else workload.target
    return HeldState(workload.contents, layout, size * workload.scale)


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Block(nn.Module):
    """The parameters of a transformer block, which is never called."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, bias=False, dtype=dtype)
        self.down = nn.Linear(4 * width, width, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)


def meta_blocks(size: float, dtype: torch.dtype) -> nn.Sequential:
    """Returns blocks without memory: below size 1 fewer, and then smaller ones, so that the bytes follow the size."""
    num_blocks = max(1, round(NUM_BLOCKS * size))
    width = 64 * max(1, round(math.sqrt(NUM_PARAMETERS * size / num_blocks / 12) / 64))
    with torch.device("meta"):
        return nn.Sequential(*(Block(width, dtype) for _ in range(num_blocks)))


def small_shapes(num_tensors: int) -> dict[str, tuple[int, int]]:
    """Returns names and shapes of many tensors of 1 to 64 KB, small ones more often than large ones. 4 ranks share the
    rows evenly.
    """
    rng = random.Random(0)
    return {
        f"blocks.{number // 10}.{number % 10}": (4 * round(64 ** rng.random()), 64) for number in range(num_tensors)
    }
