"""A run that is killed and resumed against one that nothing disturbed: the same batches, parameters, optimizer and
random numbers to the last bit, on as many ranks or on fewer. Ranks that are new have random numbers of their own.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint as bcp
from distributed.workers import WorkerDied, WorkerError, WorkerPool

NUM_STEPS = 9
SAVED_EVERY = 3
KILLED_AFTER = 5
NUM_SAMPLES, BATCH = 20, 4


class Batches:
    """The ids of samples in an order that is shuffled anew in each epoch."""

    def __init__(self) -> None:
        self._left: list[int] = []

    def next(self) -> list[int]:
        if len(self._left) < BATCH:
            self._left = torch.randperm(NUM_SAMPLES).tolist()
        batch, self._left = self._left[:BATCH], self._left[BATCH:]
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self._left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = list(state["left"])


class Run:
    """A training run that draws from every random number generator. Each rank sees the whole batch, so that gradients
    are the same bits on 1, 2 and 4 ranks.
    """

    def __init__(self, *, seed: int, num_ranks: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  the global one is saved
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.25), nn.LayerNorm(16), nn.Linear(16, 4))
        if num_ranks > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (num_ranks,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.batches = Batches()
        self.step = 0
        self.ids: list[list[int]] = []

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "batches": self.batches,
            "rng": bcp.RngState(),
        }

    def train(self, path: str, *, until: int) -> None:
        while self.step < until:
            self._take_step()
            if self.step % SAVED_EVERY == 0:
                self.handle = bcp.save(path, self.state, step=self.step, async_save=True)

    def _take_step(self) -> None:
        ids = self.batches.next()
        data = torch.arange(NUM_SAMPLES * 8, dtype=torch.float32).reshape(NUM_SAMPLES, 8).sin()[ids]
        scale = random.random() + np.random.random()  # noqa: NPY002
        self.model(data * scale).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.ids.append(ids)
        self.step += 1

    def bits(self) -> dict[str, Any]:
        """All that the rest of the run depends on, in a form that can be compared."""
        tensors = {f"model {name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, of_one in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer {index} {name}": tensor for name, tensor in of_one.items()}
        whole = {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
        }
        return {
            "tensors": {name: tensor.detach().numpy().tobytes() for name, tensor in whole.items()},
            "rate": self.scheduler.get_last_lr(),
            "batches": self.batches.state_dict(),
            "random": (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()),  # type: ignore[index]  # noqa: NPY002
        }


def undisturbed(rank: int, num_ranks: int, path: str) -> tuple[list[list[int]], dict[str, Any]]:
    run = Run(seed=0, num_ranks=num_ranks)
    run.train(path, until=NUM_STEPS)
    return run.ids, run.bits()


def killed(rank: int, num_ranks: int, path: str) -> None:
    """Some steps after a save that is committed by then: the resumed run does them again."""
    run = Run(seed=0, num_ranks=num_ranks)
    run.train(path, until=KILLED_AFTER)
    run.handle.result(30)
    if num_ranks > 1:
        dist.barrier()  # or a rank could die that the others have yet to hear of the commit from
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank: int, num_ranks: int, path: str) -> tuple[list[list[int]], dict[str, Any]]:
    run = Run(seed=99, num_ranks=num_ranks)
    info = bcp.load(path, run.state, step="latest")
    run.step = info.step
    run.train(path, until=NUM_STEPS)
    run.handle.result(30)
    return run.ids, run.bits()


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.long), pytest.param(4, 2, marks=pytest.mark.long)],
)
def test_a_run_that_was_killed_and_resumed_is_the_run_that_was_not(
    workers: WorkerPool, tmp_path: Path, before: int, after: int
) -> None:
    ((ids, bits),) = workers.run(undisturbed, str(tmp_path / "undisturbed"), world_size=1)
    path = tmp_path / "run"
    with pytest.raises(WorkerError) as raised:
        workers.run(killed, str(path), world_size=before)
    assert {type(error) for error in raised.value.errors.values()} == {WorkerDied}
    assert bcp.steps(path) == [SAVED_EVERY]
    for own_ids, own_bits in workers.run(resumed, str(path), world_size=after):
        assert own_ids == ids[SAVED_EVERY:]
        assert own_bits["tensors"] == bits["tensors"]
        assert own_bits["rate"] == bits["rate"]
        assert own_bits["batches"] == bits["batches"]
        assert own_bits["random"] == bits["random"]
    assert bcp.steps(path) == list(range(SAVED_EVERY, NUM_STEPS + 1, SAVED_EVERY))
