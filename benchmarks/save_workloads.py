"""The states that benchmarks/save.py saves, and the training that goes on beside the saves. Knows no contestant.

A state of the kind `model` is a stack of transformer blocks in bf16, the same in fp32 (the master weights), and a real
AdamW on the latter: 14 bytes a parameter, and a step counter for each tensor. Its values are random. A training step
computes matrix products for some 60 ms, which stand in for forward and backward passes, and lets the optimizer update
one matrix in turn: so a step stays short, and the whole state has changed after four steps a block.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from save_catalogue import Workload
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_dtensor

NUM_BLOCKS = 3
NUM_PARAMETERS = 151e6
"""Of the model at size 1, which makes its matrices 2048 wide, and its state 2.1 GB."""
NUM_SMALL = 20_000
COMPUTE_S = 0.06
SMALL_PARTS = 12
"""Of many small tensors a step changes this part in turn."""


class Job:
    """A workload at a size on this rank: its state, and training on it."""

    def __init__(self, workload: Workload, size: float) -> None:
        self.workload = workload
        self.is_group = dist.is_initialized()
        self.background_group = dist.new_group(backend="gloo") if self.is_group else None
        """For contestants whose background threads use collectives, which training uses at the same time."""
        self._training: ModelTraining | SmallTraining
        if workload.contents == "model":
            self._training = ModelTraining(size * workload.scale, is_sharded=workload.layout == "sharded")
        else:
            self._training = SmallTraining(round(NUM_SMALL * size), is_sharded=workload.layout == "sharded")
        self.state: dict[str, Any] = self._training.state
        """As a user of bytecheckpoint passes it: modules and optimizers where there are any."""
        self.tensors: dict[str, torch.Tensor] = self._training.tensors
        """The same tensors by name, for contestants that take only these."""
        self._compute = Compute(self)

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.is_group else 0

    @property
    def num_ranks(self) -> int:
        return self.workload.num_ranks

    @property
    def local_tensors(self) -> dict[str, torch.Tensor]:
        """What this rank holds, as plain tensors that share the state's memory."""
        return {name: local(tensor) for name, tensor in self.tensors.items()}

    @property
    def share_bytes(self) -> int:
        """What this rank writes if the ranks share the work evenly."""
        held = sum(tensor.nbytes for tensor in self.local_tensors.values())
        return held // self.num_ranks if self.workload.layout == "replicated" else held

    def barrier(self) -> None:
        if self.is_group:
            dist.barrier()

    def compute(self, *, is_done: bool) -> bool:
        """A step's forward and backward passes, as it were; returns whether all ranks say that they are done."""
        return self._compute(is_done=is_done)

    def update(self) -> None:
        """Changes a part of the state in place, another one each time."""
        self._training.update()


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Compute:
    """Matrix products for a fixed time, measured once, and the sum over all ranks that ends a backward pass."""

    def __init__(self, job: Job) -> None:
        self._is_group = job.is_group
        self._left, self._right = torch.randn(512, 512), torch.randn(512, 512)
        self._product = torch.empty(512, 512)
        self._times = 20
        self._times = self._calibrated()

    def _calibrated(self) -> int:
        self(is_done=True)
        started = time.perf_counter()
        self(is_done=True)
        times = torch.tensor([max(1.0, self._times * COMPUTE_S / (time.perf_counter() - started))])
        if self._is_group:
            dist.broadcast(times, src=0)
        return int(times)

    def __call__(self, *, is_done: bool) -> bool:
        for _ in range(self._times):
            torch.mm(self._left, self._right, out=self._product)
        flag = torch.tensor([float(is_done)])
        if self._is_group:
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)


class Block(nn.Module):
    """The parameters of a transformer block. It is never called: Compute stands in for that."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, dtype=dtype)
        self.up = nn.Linear(width, 4 * width, bias=False, dtype=dtype)
        self.down = nn.Linear(4 * width, width, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)


def meta_blocks(size: float, dtype: torch.dtype) -> nn.Sequential:
    """Without memory. Below the full size fewer, and then smaller ones, so that the bytes follow the size."""
    num_blocks = max(1, round(NUM_BLOCKS * size))
    width = 64 * max(1, round(math.sqrt(NUM_PARAMETERS * size / num_blocks / 12) / 64))
    with torch.device("meta"):
        return nn.Sequential(*(Block(width, dtype) for _ in range(num_blocks)))


class ModelTraining:
    """A bf16 model, its fp32 master weights and their optimizer."""

    def __init__(self, size: float, *, is_sharded: bool) -> None:
        seed = dist.get_rank() if is_sharded else 0  # replicas are alike, parts of a tensor are not
        self._generator = torch.Generator().manual_seed(seed)
        self._model = self._blocks(size, torch.bfloat16, is_sharded=is_sharded)
        self._master = self._blocks(size, torch.float32, is_sharded=is_sharded)
        self._optimizer = torch.optim.AdamW(self._master.parameters(), lr=1e-4, fused=True)
        self._gradients: dict[torch.Size, torch.Tensor] = {}
        parts = [*zip(self._master.parameters(), self._model.parameters(), strict=True)]
        self._turns = cycle([part for part in parts if part[0].dim() > 1])
        self._update(parts)  # the optimizer makes its state in its first step
        self._randomize()
        self.state = {"model": self._model, "master": self._master, "optimizer": self._optimizer}
        self.tensors = self._tensors()

    def _blocks(self, size: float, dtype: torch.dtype, *, is_sharded: bool) -> nn.Module:
        blocks = meta_blocks(size, dtype)
        if is_sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(blocks, mesh=mesh)
        blocks.to_empty(device="cpu")
        for parameter in blocks.parameters():
            local(parameter).normal_(std=0.02, generator=self._generator)
        return blocks

    def _randomize(self) -> None:
        for state in self._optimizer.state.values():
            local(state["exp_avg"]).normal_(std=1e-3, generator=self._generator)
            local(state["exp_avg_sq"]).normal_(std=1e-3, generator=self._generator).square_()

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        for name, parameter in self._master.named_parameters():
            tensors[f"master.{name}"] = parameter.detach()
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = value
        return tensors

    def update(self) -> None:
        self._update([next(self._turns)])

    def _update(self, parts: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        for master, _ in parts:
            master.grad = self._gradient(master)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for master, parameter in parts:
            local(parameter).copy_(local(master))

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """One for all parameters of a shape: what is in it does not matter."""
        if parameter.shape not in self._gradients:
            self._gradients[parameter.shape] = torch.full_like(parameter.detach(), 1e-4)
        return self._gradients[parameter.shape]


class SmallTraining:
    """Many tensors of 1 to 64 KB, small ones more often than large ones, without an optimizer object."""

    def __init__(self, num_tensors: int, *, is_sharded: bool) -> None:
        shapes = small_shapes(num_tensors)
        made = _made(list(shapes.values()), is_sharded=is_sharded)
        self.tensors = dict(zip(shapes, made, strict=True))
        self.state: dict[str, Any] = {"model": self.tensors}
        locals_ = [local(tensor) for tensor in self.tensors.values()]
        self._parts = cycle([locals_[start::SMALL_PARTS] for start in range(SMALL_PARTS)])

    def update(self) -> None:
        torch._foreach_mul_(next(self._parts), 0.999)


def small_shapes(num_tensors: int) -> dict[str, tuple[int, int]]:
    """Names and shapes; the rows are such that 4 ranks share them evenly."""
    rng = random.Random(0)
    return {
        f"blocks.{number // 10}.{number % 10}": (4 * round(64 ** rng.random()), 64) for number in range(num_tensors)
    }


def _made(shapes: Sequence[tuple[int, int]], *, is_sharded: bool) -> list[torch.Tensor]:
    """Random fp32 tensors; sharded ones are cut by rows over all ranks."""
    if not is_sharded:
        return [torch.randn(shape) for shape in shapes]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    tensors = [empty_dtensor(*shape, device_mesh=mesh, placements=[Shard(0)]) for shape in shapes]
    for tensor in tensors:
        local(tensor).normal_()
    return tensors
