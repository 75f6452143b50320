"""Random numbers of a resumed run with real loaders, which draw from the global generator when they are first read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bytecheckpoint as bcp

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

NUM_BATCHES, SAVED_AFTER = 6, 3
"""Batches of an epoch, and of it before the save."""


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    state = bcp.RngState().state_dict()
    yield
    bcp.RngState().load_state_dict(state)


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))


def dataset() -> TensorDataset:
    return TensorDataset(torch.ones(NUM_BATCHES * 2, 8))  # the same batch each time: only the dropout differs


def step(net: torch.nn.Module, batch: torch.Tensor) -> float:
    loss = net(batch).pow(2).mean()
    return float(loss.detach())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_restored", [True, False])
def test_steps_with_loaders_of_accelerate(tmp_path: Path, num_workers: int, is_restored: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)

    def batches() -> Any:
        return accelerator.prepare(DataLoader(dataset(), batch_size=2, num_workers=num_workers))

    net, losses = model(), []
    for number, (batch,) in enumerate(batches(), start=1):
        losses.append(step(net, batch))
        if number == SAVED_AFTER:
            bcp.save(tmp_path, {"model": net, "rng": bcp.RngState()}, step=number)

    net = model()
    report = bcp.load(tmp_path, {"model": net, "rng": bcp.RngState()})
    resumed = iter(accelerate.skip_first_batches(batches(), SAVED_AFTER))
    (batch,) = next(resumed)
    if is_restored:
        report.restore_rng()
    again = [step(net, batch), *(step(net, batch) for (batch,) in resumed)]
    assert (again == losses[SAVED_AFTER:]) == is_restored
    assert len(set(losses)) == NUM_BATCHES


@pytest.mark.parametrize("is_restored", [True, False])
def test_steps_with_loaders_of_fabric(tmp_path: Path, is_restored: bool) -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)

    def batches() -> Any:
        return fabric.setup_dataloaders(DataLoader(dataset(), batch_size=2))

    net, losses = model(), []
    for number, (batch,) in enumerate(batches(), start=1):
        losses.append(step(net, batch))
        if number == SAVED_AFTER:
            bcp.save(tmp_path, {"model": net, "rng": bcp.RngState()}, step=number)

    net = model()
    report = bcp.load(tmp_path, {"model": net, "rng": bcp.RngState()})
    resumed = iter(batches())
    (batch,) = next(resumed)
    if is_restored:
        report.restore_rng()
    again = [step(net, batch) for _ in range(NUM_BATCHES - SAVED_AFTER)]
    assert (again == losses[SAVED_AFTER:]) == is_restored


@pytest.mark.parametrize("is_restored", [True, False])
def test_steps_of_a_trainer_of_lightning(tmp_path: Path, is_restored: bool) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = model(), []

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = self.net(batch[0]).pow(2).mean()
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.0)

    class Saves(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, _trainer: Any, task: Any, _outputs: Any, _batch: Any, index: int) -> None:
            if index + 1 == SAVED_AFTER:
                bcp.save(tmp_path, {"model": task.net, "rng": bcp.RngState()}, step=index + 1)

    class Resumes(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_fit_start(self, _trainer: Any, task: Any) -> None:
            self.report = bcp.load(tmp_path, {"model": task.net, "rng": bcp.RngState()})

        def on_train_batch_start(self, _trainer: Any, _task: Any, _batch: Any, index: int) -> None:
            if index == 0 and is_restored:
                self.report.restore_rng()

    def losses_of(callback: Any, num_batches: int) -> list[float]:
        task = Task()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            limit_train_batches=num_batches,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
        )
        trainer.fit(task, DataLoader(dataset(), batch_size=2))
        return task.losses

    losses = losses_of(Saves(), NUM_BATCHES)
    again = losses_of(Resumes(), NUM_BATCHES - SAVED_AFTER)
    assert (again == losses[SAVED_AFTER:]) == is_restored
