"""A save to a root that has an owner: it is refused before its commit once another owner has claimed the root."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from faults.seams import Seam, before, raising

import bytecheckpoint as bcp
from bytecheckpoint import phases
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.saving import local_stage
from bytecheckpoint.saving.target import SaveOwner


def save_owned(
    path: Path, owner: SaveOwner, *, options: bcp.SaveOptions | None = None, value: float = 1.0
) -> bcp.CheckpointInfo:
    return phases.run_save(
        path,
        {"weight": torch.full((4,), value)},
        "auto",
        step=1,
        async_save=False,
        process_group=None,
        role=None,
        storage_options=None,
        options=options or bcp.SaveOptions(),
        owner=owner,
    ).result()


def superseded(then: Callable[[], object] = lambda: None) -> Callable[[], None]:
    def check() -> None:
        then()
        raise CheckpointSaveError("another one owns it", kind="superseded")

    return check


def may_go_on() -> None:
    pass


def replaces_nothing() -> bool:
    return False


def files_in(path: Path) -> Iterator[str]:
    return (found.name for found in path.rglob("*") if found.is_file())


def test_the_ids_of_its_saves_begin_with_the_prefix_of_the_owner(tmp_path: Path) -> None:
    ids = [
        save_owned(tmp_path / name, SaveOwner("0123abcd", replaces_nothing, may_go_on, may_go_on)).save_id
        for name in "ab"
    ]
    assert [(len(save_id), save_id[:8]) for save_id in ids] == [(16, "0123abcd")] * 2
    assert ids[0] != ids[1]


def test_a_save_that_was_superseded_before_its_commit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointSaveError, match="another one owns it") as raised:
        save_owned(tmp_path, SaveOwner("0123abcd", replaces_nothing, superseded(), may_go_on))
    assert raised.value.kind == "superseded"
    assert list(files_in(tmp_path)) == []


def test_a_save_that_was_superseded_while_it_committed_says_that_it_is_complete(tmp_path: Path) -> None:
    with pytest.raises(CheckpointSaveError, match="committed all the same, and is complete") as raised:
        save_owned(tmp_path, SaveOwner("0123abcd", replaces_nothing, may_go_on, superseded()))
    assert raised.value.kind == "superseded"
    assert bcp.steps(tmp_path) == [1]
    bcp.load(tmp_path, {"weight": torch.zeros(4)})


def test_a_save_whose_data_the_new_owner_has_cleared_is_withdrawn(tmp_path: Path) -> None:
    cleared = superseded(lambda: shutil.rmtree(tmp_path / "step_00000001" / "data"))
    with pytest.raises(CheckpointSaveError, match="was withdrawn") as raised:
        save_owned(tmp_path, SaveOwner("0123abcd", replaces_nothing, may_go_on, cleared))
    assert raised.value.kind == "superseded"
    assert bcp.steps(tmp_path) == []


def test_a_recovery_replaces_what_the_owner_let_the_save_replace(tmp_path: Path) -> None:
    """As a step that an earlier manager committed late: the save has no `overwrite`, and `local()` calls it durable."""
    options = bcp.SaveOptions(local_stage=tmp_path / "nvme", timeout_s=20)
    bcp.save(tmp_path / "run", {"weight": torch.ones(4)}, step=1)
    owner = SaveOwner("0123abcd", lambda: True, may_go_on, may_go_on)
    failing = before(Seam(local_stage, "copy_file"), raising(bcp.StorageError("gone", kind="unavailable")))
    with failing, pytest.raises(bcp.StorageError, match=r"gone.*bcp\.recover"):
        save_owned(tmp_path / "run", owner, options=options, value=2.0)
    assert [save.outcome for save in bcp.recover(tmp_path / "run", options=options)] == ["committed"]
    state = {"weight": torch.zeros(4)}
    bcp.load(tmp_path / "run", state, step=1)
    assert state["weight"].tolist() == [2.0] * 4
