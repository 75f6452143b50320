"""The blocks of docs/migrate/from-lightning.md run: Lightning writes, and the new lines go on from what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from migration_pages import assert_doctor_prints, blocks_of, run

import bytecheckpoint as bcp

pl = pytest.importorskip("lightning.pytorch")

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]  # of the packages


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, after, go_on, load = blocks_of("from-lightning.md")
    options = {"max_steps": 4, "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
    names: dict[str, Any] = {"bcp": bcp, "model": Regression(), "loader": loader, "options": options}
    try:
        run(before, names)
        weight = names["model"].net.weight.detach().clone()
        names["model"] = Regression()
        run(after, names)
        assert "model.net.weight" in bcp.open("run/last.ckpt")
        options["max_steps"] = 6
        names["model"] = Regression()
        run(go_on, names)
        assert names["trainer"].global_step == 6
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    names["model"] = Regression()
    run(load, names)
    assert torch.equal(names["model"].net.weight, weight)
    assert_doctor_prints("old/last.ckpt", load)
