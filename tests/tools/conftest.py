"""Real checkpoints for the command line to look at, and a way to call it in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.tools.main import cli


class Ended(NamedTuple):
    """Result of a call of the program."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Call = Callable[..., Ended]


@pytest.fixture
def call() -> Call:
    """Runs `bcp` with these arguments; whatever it does not turn into an exit code fails the test."""

    def run(*args: object) -> Ended:
        result = CliRunner().invoke(cli, [str(arg) for arg in args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ended(result.exit_code, result.stdout, result.stderr)

    return run


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
