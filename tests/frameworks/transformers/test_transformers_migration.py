"""The blocks of docs/migrate/from-trainer.md run: the Trainer writes, and the new lines go on from what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from migration_pages import assert_doctor_prints, assert_trained_alike, blocks_of, run

import bytecheckpoint as bcp

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]  # of the packages


def small_model(seed: int) -> Any:
    transformers.set_seed(seed)
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def arguments(folder: str, max_steps: int) -> Any:
    given = {"save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "learning_rate": 0.01}
    return transformers.TrainingArguments(folder, max_steps=max_steps, **given)


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, after, go_on, load = blocks_of("from-trainer.md")
    tokens = torch.randint(0, 20, (40, 6), generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {
        "bcp": bcp,
        "model": small_model(0),
        "dataset": [{"input_ids": row, "labels": row} for row in tokens],
        "old_arguments": arguments("old", 4),
        "arguments": arguments("run", 4),
    }
    run(before, names)
    old = {"model": names["model"], "optimizer": names["trainer"].optimizer.optimizer}
    names["model"] = small_model(1)
    run(after, names)
    assert bcp.open("run/checkpoint-4").info.format == "bytecheckpoint"
    names |= {"model": small_model(2), "arguments": arguments("run", 6)}
    run(go_on, names)
    assert names["trainer"].state.global_step == 6
    assert bcp.open("run/checkpoint-6").info.format == "bytecheckpoint"

    trainer = transformers.Trainer(small_model(3), names["old_arguments"], train_dataset=names["dataset"])
    trainer.create_optimizer_and_scheduler(4)
    new = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    run(load, {"bcp": bcp, **new})
    assert_trained_alike(new, old)
    assert new["scheduler"].last_epoch == 4
    assert_doctor_prints("old/checkpoint-4", load)
