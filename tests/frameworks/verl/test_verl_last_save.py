"""The last save of a job whose saves are in the background: verl's driver waits for it by a callback."""

from __future__ import annotations

import os
import threading
import time
from contextlib import nullcontext
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
from bytecheckpoint.integrations.verl.steps import RoleSaves, is_whole

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

TRACKER = "latest_checkpointed_iteration.txt"
TRAINER = SimpleNamespace(total_training_steps=3, steps_per_epoch=3)


def callback_of(*, save_freq: int = 1) -> Any:
    """Makes the callback that verl's configuration names, as its driver does."""
    name = "bytecheckpoint.integrations.verl.WaitForLastSave"
    of_job = {"checkpoint_callback_class": name, "save_freq": save_freq, "total_epochs": 1}
    callback = build_checkpoint_callback(OmegaConf.create({"trainer": of_job}))
    assert type(callback) is WaitForLastSave
    return callback


def on_save(root: Path, step: int, *, async_save: bool, trainer: Any = TRAINER, save_freq: int = 1) -> None:
    """Calls a new callback as verl's driver does."""
    callback_of(save_freq=save_freq).on_save(
        trainer=trainer, global_step=step, checkpoint_dir=str(root / f"global_step_{step}"), async_save=async_save
    )


def save_actor(root: Path, step: int) -> RoleSaves:
    """Begins to save a step of the actor in the background."""
    saves = RoleSaves(bcp.SaveOptions(), bcp.LoadOptions())
    state = {"model": {"w": torch.ones(2)}}
    path = str(root / f"global_step_{step}" / "actor")
    saves.save(path, state, global_step=step, num_kept=None, async_save=True, metadata={})
    return saves


def test_the_driver_waits_for_the_last_save_alone(tmp_path: Path) -> None:
    on_save(tmp_path, 2, async_save=True)
    on_save(tmp_path, 3, async_save=False)
    saves = save_actor(tmp_path, 3)
    step = tmp_path / "global_step_3"
    late = threading.Timer(0.5, torch.save, ({}, step / "data.pt"))
    late.start()
    on_save(tmp_path, 3, async_save=True)
    assert (step / "data.pt").exists()
    assert (tmp_path / TRACKER).read_text() == "3"
    late.join()
    saves.wait()


def test_a_tracker_file_of_an_earlier_run_that_names_the_last_step_is_not_taken_for_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "global_step_3"
    saves = save_actor(tmp_path, 3)
    torch.save({}, step / "data.pt")
    saves.wait()
    for path in (step / "data.pt", step / "actor" / "manifest.bcp"):
        os.utime(path, (1, 1))  # of an earlier run
    assert (tmp_path / TRACKER).read_text() == "3"
    monkeypatch.setattr(WaitForLastSave, "timeout_s", 0.2)
    with pytest.raises(bcp.CheckpointSaveError, match="global_step_3, was not committed"):
        on_save(tmp_path, 3, async_save=True)


@pytest.mark.parametrize(
    ("total_steps", "steps_per_epoch", "save_freq", "step", "is_waited_for"),
    [
        (10, 10, 4, 4, False),
        (10, 10, 4, 8, False),  # step 10 is saved, too
        (10, 10, 4, 10, True),
        (20, 10, 4, 4, False),
        (20, 10, 4, 8, True),  # epochs end at step 10, which is not saved
        (7, 10, 4, 4, False),
        (7, 10, 4, 7, True),
    ],
)
def test_the_last_save_is_the_one_after_which_the_driver_saves_no_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    total_steps: int,
    steps_per_epoch: int,
    save_freq: int,
    step: int,
    is_waited_for: bool,
) -> None:
    trainer = SimpleNamespace(total_training_steps=total_steps, steps_per_epoch=steps_per_epoch)
    monkeypatch.setattr(WaitForLastSave, "timeout_s", 0.0)
    with pytest.raises(bcp.CheckpointSaveError) if is_waited_for else nullcontext():  # nothing was saved
        on_save(tmp_path, step, async_save=True, trainer=trainer, save_freq=save_freq)


def test_a_step_is_not_whole_while_a_role_has_only_begun_to_save(tmp_path: Path) -> None:
    began = time.time()
    saves = save_actor(tmp_path, 3)
    assert (tmp_path / "global_step_3" / "actor").is_dir()  # from the call on, also if the background waits for others
    saves.settle()
    torch.save({}, tmp_path / "global_step_3" / "data.pt")
    assert is_whole(tmp_path / "global_step_3", since=began)
    (tmp_path / "global_step_3" / "critic").mkdir()
    assert not is_whole(tmp_path / "global_step_3", since=began)


def test_a_last_save_that_never_commits_ends_the_job_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / TRACKER).write_text("2")
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
    assert (tmp_path / TRACKER).read_text() == "2"
    saves.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "latest_checkpointed_iteration.txt"]


def test_a_step_that_cannot_be_looked_at_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 alone would raise the error, or the thread that waits to write the tracker file would end."""

    def refuse(_: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert not is_whole(tmp_path, since=0.0)
