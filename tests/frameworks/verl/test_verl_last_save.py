"""The last save of a job whose saves are in the background: verl's driver waits for it by a callback."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback

import bytecheckpoint as bcp
from bytecheckpoint.integrations.verl import WaitForLastSave
from bytecheckpoint.integrations.verl.steps import RoleSaves

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TRAINER = SimpleNamespace(total_training_steps=3)


def on_save(root: Path, step: int, *, async_save: bool) -> None:
    """Calls the callback that verl's configuration names, as its driver does."""
    name = "bytecheckpoint.integrations.verl.WaitForLastSave"
    callback = build_checkpoint_callback(OmegaConf.create({"trainer": {"checkpoint_callback_class": name}}))
    assert type(callback) is WaitForLastSave
    callback.on_save(
        trainer=TRAINER, global_step=step, checkpoint_dir=str(root / f"global_step_{step}"), async_save=async_save
    )


def test_the_driver_waits_for_the_last_save_alone(tmp_path: Path) -> None:
    on_save(tmp_path, 2, async_save=True)
    on_save(tmp_path, 3, async_save=False)
    saves = RoleSaves(bcp.SaveOptions(), bcp.LoadOptions())
    state = {"model": {"w": torch.ones(2)}}
    step = tmp_path / "global_step_3"
    saves.save(str(step / "actor"), state, global_step=3, num_kept=None, async_save=True, metadata={})
    step.mkdir(exist_ok=True)
    late = threading.Timer(0.5, torch.save, ({}, step / "data.pt"))
    late.start()
    on_save(tmp_path, 3, async_save=True)
    assert (step / "data.pt").exists()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    late.join()


def test_a_last_save_that_never_commits_ends_the_job_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    monkeypatch.setattr(WaitForLastSave, "timeout_s", 0.2)
    with pytest.raises(bcp.CheckpointSaveError, match=r"global_step_3, was not committed .* names \(2\)") as caught:
        on_save(tmp_path, 3, async_save=True)
    assert caught.value.kind == "rank_missing"


def test_the_queue_of_a_driver_that_trains_while_it_generates_is_no_role(tmp_path: Path) -> None:
    saves = RoleSaves(bcp.SaveOptions(), bcp.LoadOptions())
    for number in (1, 2):
        step = tmp_path / f"global_step_{number}"
        arguments: dict[str, Any] = {"global_step": number, "num_kept": 1, "async_save": True, "metadata": {}}
        saves.save(str(step / "actor"), {"model": {"w": torch.ones(2)}}, **arguments)
        (step / "transfer_queue").mkdir(parents=True)
        torch.save({}, step / "data.pt")
        saves.wait()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    saves.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "latest_checkpointed_iteration.txt"]
