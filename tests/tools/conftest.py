"""Real checkpoints for the command line to read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from program_calls import call

import bytecheckpoint as bcp

__all__ = ["call"]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(12))
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture(scope="session")
def saved_root(tmp_path_factory) -> Path:
    """Steps 5 and 1000 of a model with an optimizer; not to be changed."""
    root = tmp_path_factory.mktemp("cli") / "run"
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "large": torch.arange(1 << 20, dtype=torch.float32),
        "epoch": 3,
        "rng": bcp.RankLocal(torch.zeros(5, dtype=torch.uint8)),
    }
    for step in (5, 1000):
        bcp.save(root, state, step=step, metadata={"run": "demo"})
    return root


@pytest.fixture
def root(saved_root, tmp_path) -> Path:
    """Copy of the same, to be damaged."""
    return Path(shutil.copytree(saved_root, tmp_path / "run"))
