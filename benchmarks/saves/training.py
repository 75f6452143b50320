"""A workload on one rank of the save benchmark, and training on it.

A training step computes matrix products for some 60 ms, which stand in for forward and backward passes, and changes a
part of the state in place: of a model, the optimizer updates one matrix in turn. So a step stays short, and the whole
state has changed after four steps a block. Values are random.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle

import torch
import torch.distributed as dist
from torch import nn

from shared.states import HeldState, held_by, local
from shared.workloads import Workload

COMPUTE_S = 0.06
SMALL_PARTS = 12
"""Number of steps in which all of many small tensors have changed."""


class Job:
    """A workload at a size on this rank: its state, and training on it."""

    def __init__(self, workload: Workload, size: float) -> None:
        self.is_group = dist.is_initialized()
        self.num_ranks = workload.source.num_ranks
        self.background_group = dist.new_group(backend="gloo") if self.is_group else None
        """Group for candidates whose background threads use collectives, which training uses at the same time."""
        self.held = held_by(workload, "source", size)
        seed = 0 if self.held.is_replicated or not self.is_group else dist.get_rank()
        generator = torch.Generator().manual_seed(seed)  # replicas are alike, parts of a tensor are not
        for name, tensor in self.held.local_tensors.items():
            randomize(name, tensor, generator)
        self._training = ModelTraining(self.held) if workload.contents == "model" else SmallTraining(self.held)
        self._compute = Compute(is_group=self.is_group)

    @property
    def share_bytes(self) -> int:
        """Bytes that this rank writes if the ranks share the work evenly."""
        num_bytes = sum(tensor.nbytes for tensor in self.held.local_tensors.values())
        return num_bytes // self.num_ranks if self.held.is_replicated else num_bytes

    def compute(self, *, is_done: bool) -> bool:
        """Stands in for a step's forward and backward passes; returns True if all ranks say that they are done."""
        return self._compute(is_done=is_done)

    def update(self) -> None:
        """Changes a part of the state in place, another one each time."""
        self._training.update()


def randomize(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if name.endswith(".step"):
        tensor.fill_(1.0)
        return
    tensor.normal_(std=1e-3 if ".exp_avg" in name else 0.02, generator=generator)
    if name.endswith(".exp_avg_sq"):
        tensor.square_()


class Compute:
    """Matrix products for a fixed time, measured once, and the sum over all ranks that ends a backward pass."""

    def __init__(self, *, is_group: bool) -> None:
        self._is_group = is_group
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


class ModelTraining:
    """Steps of the optimizer on the fp32 master weights, each on another matrix, which the bf16 model follows."""

    def __init__(self, held: HeldState) -> None:
        self._optimizer: torch.optim.Optimizer = held.state["optimizer"]
        self._gradients: dict[torch.Size, torch.Tensor] = {}
        pairs = [*zip(held.state["master"].parameters(), held.state["model"].parameters(), strict=True)]
        self._update(pairs)
        self._next = cycle([pair for pair in pairs if pair[0].dim() > 1])

    def update(self) -> None:
        self._update([next(self._next)])

    def _update(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        for master, _ in pairs:
            master.grad = self._gradient(master)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for master, parameter in pairs:
            local(parameter).copy_(local(master))

    def _gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns one for all parameters of a shape: its values do not matter."""
        if parameter.shape not in self._gradients:
            self._gradients[parameter.shape] = torch.full_like(parameter.detach(), 1e-4)
        return self._gradients[parameter.shape]


class SmallTraining:
    """Steps without an optimizer: each multiplies another part of the tensors."""

    def __init__(self, held: HeldState) -> None:
        tensors = list(held.local_tensors.values())
        self._parts = cycle([tensors[start::SMALL_PARTS] for start in range(SMALL_PARTS)])

    def update(self) -> None:
        torch._foreach_mul_(next(self._parts), 0.999)
