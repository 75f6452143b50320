"""A path is one checkpoint, or the root of steps, and never both; where an older version has left both, nothing is
taken for what it may not be.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.saving import local_stage as local_stage_module
from bytecheckpoint.storage import object_io
from bytecheckpoint.storage.backends.fsspec_store import FsspecStore
from bytecheckpoint.tools.main import cli


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3,), value)}


def value_of(path: object, **arguments: Any) -> float:
    target = state(0.0)
    bcp.load(path, target, **arguments)  # type: ignore[arg-type]
    return float(target["w"][0])


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """What version 0.1 let be saved: a checkpoint at the path itself, and step 500 below it."""
    bcp.save(tmp_path / "r", state(1.0))
    bcp.save(tmp_path / "steps", state(2.0), step=500)
    shutil.move(tmp_path / "steps" / "step_00000500", tmp_path / "r" / "step_00000500")
    return tmp_path / "r"


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_step_is_saved_below_a_checkpoint(tmp_path: Path, overwrite: bool) -> None:
    bcp.save(tmp_path, state(1.0))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(bcp.CheckpointExistsError, match="one checkpoint, or the root of steps") as caught:
        bcp.save(tmp_path, state(2.0), step=500, options=bcp.SaveOptions(overwrite=overwrite))
    assert caught.value.kind == "exists"
    assert sorted(tmp_path.rglob("*")) == before
    assert value_of(tmp_path) == 1.0


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_checkpoint_is_saved_above_steps(tmp_path: Path, overwrite: bool) -> None:
    bcp.save(tmp_path, state(2.0), step=500)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(bcp.CheckpointExistsError, match=r"step_00000500.*overwrite=True does not change"):
        bcp.save(tmp_path, state(1.0), options=bcp.SaveOptions(overwrite=overwrite))
    assert sorted(tmp_path.rglob("*")) == before
    assert (bcp.latest(tmp_path), value_of(tmp_path)) == (500, 2.0)


def test_the_same_holds_for_each_role_and_not_between_them(tmp_path: Path) -> None:
    bcp.save(tmp_path, state(1.0), role="actor")
    bcp.save(tmp_path, state(2.0), role="critic", step=5)
    with pytest.raises(bcp.CheckpointExistsError):
        bcp.save(tmp_path, state(1.0), role="actor", step=5)
    with pytest.raises(bcp.CheckpointExistsError):
        bcp.save(tmp_path, state(1.0), role="critic")


def test_what_is_not_committed_is_not_in_the_way(tmp_path: Path) -> None:
    bcp.save(tmp_path / "a", state(1.0))
    (tmp_path / "a" / "manifest.bcp").unlink()
    bcp.save(tmp_path / "a", state(2.0), step=1)
    (tmp_path / "a" / "step_00000001" / "manifest.bcp").unlink()
    bcp.save(tmp_path / "a", state(3.0))
    assert (bcp.latest(tmp_path / "a"), value_of(tmp_path / "a")) == (None, 3.0)


def test_a_root_that_is_both_is_refused_until_the_step_says_which(mixed: Path) -> None:
    for ask in (bcp.latest, bcp.steps, bcp.open, value_of):
        with pytest.raises(bcp.CheckpointMismatchError, match=r"step=None .* step=500") as caught:
            ask(mixed)
        assert caught.value.kind == "conflict"
    assert value_of(mixed, step=None) == 1.0
    assert value_of(mixed, step=500) == 2.0
    assert float(bcp.open(mixed, None)["w"][0]) == 1.0


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.mark.parametrize(
    "command", [["show"], ["verify"], ["timeline"], ["diff", "OTHER"], ["convert", "TARGET", "--to", "bcp"]]
)
def test_commands_refuse_a_root_that_is_both(mixed: Path, tmp_path: Path, command: list[str]) -> None:
    bcp.save(tmp_path / "other", state(1.0))
    names = {"OTHER": tmp_path / "other", "TARGET": tmp_path / "converted"}
    ended = run(command[0], mixed, *(names.get(word, word) for word in command[1:]))
    assert ended.exit_code == 2
    assert "--step none" in ended.stderr
    if command[0] in {"show", "verify"}:
        assert run(command[0], mixed, "--step", "none").exit_code == 0
        assert run(command[0], mixed, "--step", "500").exit_code == 0


def test_ls_lists_both_and_warns(mixed: Path) -> None:
    ended = run("ls", mixed)
    assert ended.exit_code == 0
    assert "2 checkpoints" in ended.stdout
    assert "--step 500" in " ".join(ended.stdout.split())
    assert '"warning": null' in run("ls", mixed / "step_00000500", "--json").stdout


def test_a_conversion_does_not_make_a_step_below_a_checkpoint(tmp_path: Path) -> None:
    bcp.save(tmp_path / "source", state(2.0))
    bcp.save(tmp_path / "root", state(1.0))
    ended = run("convert", tmp_path / "source", tmp_path / "root" / "step_00000500", "--to", "bcp")
    assert ended.exit_code != 0
    assert "would be a step below it" in " ".join(ended.stderr.split())
    assert not (tmp_path / "root" / "step_00000500").exists()


def test_asking_costs_one_listing_of_a_new_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bcp.save("memory://roots-cost", state(1.0), step=1)
    listed: list[str] = []
    real = FsspecStore.list

    def counted(self: FsspecStore, folder: str) -> Any:
        listed.append(folder)
        return real(self, folder)

    monkeypatch.setattr(FsspecStore, "list", counted)
    bcp.save("memory://roots-cost", state(1.0), step=2)
    assert listed.count("") == 1
    assert listed.count("step_00000002") == 0 or listed.index("") < listed.index("step_00000002")


def interrupted_upload(path: Path, stage: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise bcp.StorageError("out of reach", kind="unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(local_stage_module, "copy_file", fail)
        handle = bcp.save(path, state(3.0), async_save=True, options=bcp.SaveOptions(local_stage=stage), **arguments)
        assert handle.exception() is not None


@pytest.mark.parametrize("step", [None, 7])
def test_recovery_commits_nothing_beside_another_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    root, stage = tmp_path / "root", tmp_path / "stage"
    interrupted_upload(root, stage, monkeypatch, step=step)
    bcp.save(root, state(1.0), step=500 if step is None else None)
    (saved,) = bcp.recover(root, options=bcp.SaveOptions(local_stage=stage))
    assert (saved.outcome, value_of(root)) == ("kept", 1.0)
    assert "one checkpoint or the root of steps" in saved.what


def test_recovery_finishes_only_one_of_two_that_may_not_stand_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, stage = tmp_path / "root", tmp_path / "stage"
    interrupted_upload(root, stage, monkeypatch)
    interrupted_upload(root, stage, monkeypatch, step=7)
    saves = bcp.recover(root, options=bcp.SaveOptions(local_stage=stage))
    assert [saved.outcome for saved in saves] == ["kept", "committed"]
    assert bcp.latest(root) == 7


def test_a_save_that_is_still_uploading_is_not_committed_beside_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, options = tmp_path / "root", bcp.SaveOptions(local_stage=tmp_path / "stage")
    may_upload = threading.Event()
    real = object_io.copy_file

    def late(*arguments: Any, **named: Any) -> None:
        may_upload.wait(30)
        real(*arguments, **named)

    monkeypatch.setattr(local_stage_module, "copy_file", late)
    first = bcp.save(root, state(1.0), async_save=True, options=options)
    first.local(30)
    second = bcp.save(root, state(2.0), step=5, async_save=True, options=options)
    may_upload.set()
    assert first.result(60).step is None
    with pytest.raises(bcp.CheckpointExistsError, match="one checkpoint, or the root of steps"):
        second.result(60)
    assert value_of(root) == 1.0
