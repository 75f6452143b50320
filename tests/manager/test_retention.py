from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from faults.seams import files_under
from manager.steps import read_steps, step_info
from storage.s3_service import S3Service

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.manager import retention, step_records
from bytecheckpoint.manager.keep_policies import Best, EverySteps, Latest
from bytecheckpoint.manager.retention import StepDecision, decide, delete_steps, finish_deletions
from bytecheckpoint.manager.step_records import list_steps
from bytecheckpoint.storage.layout import step_folder
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


class Ending:
    """A store that ends the process at its n-th write or deletion, before or after doing it."""

    def __init__(self, store: Store, calls: float, *, does_it: bool) -> None:
        self.store, self.left, self.does_it = store, calls, does_it

    def __getattr__(self, name):
        return getattr(self.store, name)

    def __str__(self) -> str:
        return str(self.store)

    def write(self, name, blocks, *, replace) -> None:
        self._count(lambda: self.store.write(name, blocks, replace=replace))

    def delete(self, name) -> None:
        self._count(lambda: self.store.delete(name))

    def _count(self, do) -> None:
        self.left -= 1
        if self.left <= 0 and (self.left < 0 or not self.does_it):
            raise Killed
        do()
        if self.left == 0:
            raise Killed


def fill(path, steps=(1, 2, 3), options=None) -> Store:
    for step in steps:
        bcp.save(path, {"w": torch.full((50,), float(step))}, step=step, storage_options=options)
    store = open_store(path, storage_options=options, writer_threads=1)
    for info in read_steps(store):
        step_records.write_record(store, step_folder(info.step), info)
        step_records.report(store, step_folder(info.step), {"loss": 1.0 / info.step}, time=9e9)
        step_records.lease(store, step_folder(info.step), until=5.0)
    return store


def test_what_keeps_a_step_is_said() -> None:
    saved = [step_info(step, metrics={"loss": loss}) for step, loss in ((5, 0.1), (10, math.nan), (12, 0.3), (15, 0.9))]
    saved[1] = step_info(10, pinned=True)
    policy = Best(1, "loss") | EverySteps(10) | Latest(1)
    decided = decide(policy, saved, num_abandoned=0, now=0.0, held={5: "restored"})
    assert decided == [
        StepDecision(5, True, "restored, Best(1, 'loss')"),
        StepDecision(10, True, "pinned, EverySteps(10)"),
        StepDecision(12, False, "no policy keeps it"),
        StepDecision(15, True, "newest, Latest(1)"),
    ]


def test_the_newest_stays_though_it_is_the_worst() -> None:
    saved = [step_info(1, metrics={"loss": 0.1}), step_info(2, metrics={"loss": 9.0})]
    assert [item.is_kept for item in decide(Best(1, "loss"), saved, num_abandoned=0, now=0.0, held={})] == [True, True]
    assert decide(Best(1, "loss"), [], num_abandoned=0, now=0.0, held={}) == []


def test_all_of_a_step_goes_and_nothing_else(tmp_path: Path) -> None:
    store = fill(tmp_path)
    (tmp_path / step_folder(2) / "notes.txt").write_text("of the user")
    others = [name for name in files_under(tmp_path) if not name.startswith(step_folder(2))]
    assert delete_steps(store, [read_steps(store)[1]], now=10.0) == {}
    assert sorted(files_under(tmp_path)) == sorted([*others, f"{step_folder(2)}/notes.txt"])
    assert bcp.steps(tmp_path) == [1, 3]


def test_on_s3(s3: S3Service, s3_prefix: str) -> None:
    url = f"s3://{s3.bucket}/{s3_prefix}"
    store = fill(url, options=s3.options)
    assert delete_steps(store, read_steps(store)[:2], now=10.0) == {}
    assert sorted(store.list("")) == [step_folder(3)]
    assert bcp.steps(url, storage_options=s3.options) == [3]


def test_a_step_that_was_pinned_leased_or_replaced_meanwhile_stays(tmp_path: Path) -> None:
    store = fill(tmp_path)
    decided = read_steps(store)
    step_records.pin(store, step_folder(1), time=6.0)
    step_records.lease(store, step_folder(2), until=100.0)
    bcp.save(tmp_path, {"w": torch.zeros(5)}, step=3, options=bcp.SaveOptions(overwrite=True))
    assert delete_steps(store, decided, now=10.0) == {
        1: "pinned",
        2: "leased until 1970-01-01 00:01:40 UTC",
        3: "replaced meanwhile",
    }
    assert bcp.steps(tmp_path) == [1, 2, 3]


class Interrupted(Ending):
    """A store that calls a function at its n-th write or deletion, before or after doing it."""

    def __init__(self, store: Store, calls: int, *, does_it: bool, act: Callable[[], object]) -> None:
        super().__init__(store, calls, does_it=does_it)
        self.act = act

    def _count(self, do) -> None:
        self.left -= 1
        if self.left == 0 and not self.does_it:
            self.act()
        do()
        if self.left == 0 and self.does_it:
            self.act()


@pytest.mark.parametrize("does_it", [False, True])
@pytest.mark.parametrize("mark", ["pin", "lease"])
def test_a_checkpoint_that_was_protected_at_any_call_of_its_deletion_loads(
    tmp_path: Path, mark: str, does_it: bool
) -> None:
    stayed = []
    for calls in range(1, 9):
        root = tmp_path / str(calls)
        store, protected = fill(root, (1, 2)), []

        def protect(store: Store = store, protected: list[str] = protected) -> None:
            with suppress(CheckpointNotFoundError):
                if mark == "pin":
                    step_records.pin(store, step_folder(1), time=6.0)
                else:
                    step_records.lease(store, step_folder(1), until=100.0)
                protected.append(mark)

        interrupted = Interrupted(store, calls, does_it=does_it, act=protect)
        stays = delete_steps(interrupted, [read_steps(store)[0]], now=10.0)
        assert bool(stays) == (bcp.steps(root) == [1, 2])
        assert stays or not protected, f"{mark} at call {calls} was accepted, and the checkpoint deleted"
        if stays:
            bcp.load(root, {"w": torch.zeros(50)}, step=1)
        else:
            assert not [name for name in files_under(root) if name.startswith(step_folder(1))]
        assert not store.list(retention.JOURNAL_FOLDER)
        stayed.append(bool(stays))
    assert stayed[0]
    assert not stayed[-1]


@pytest.mark.parametrize("does_it", [False, True])
def test_a_deletion_that_is_killed_at_any_call_is_finished_by_the_next(tmp_path: Path, does_it: bool) -> None:
    for calls in range(1, 99):
        root = tmp_path / str(calls)
        store = fill(root, (1, 2))
        whole = [name for name in files_under(root) if name.startswith(step_folder(1))]
        survivors = [name for name in files_under(root) if not name.startswith(step_folder(1))]
        ending = Ending(store, calls, does_it=does_it)
        with suppress(Killed):
            delete_steps(ending, [read_steps(store)[0]], now=10.0)
        finish_deletions(store, now=10.0)
        left = bcp.steps(root) == [1, 2]
        assert sorted(files_under(root)) == sorted([*whole, *survivors] if left else survivors), calls
        assert bcp.load(root, {"w": torch.zeros(50)}).step == 2
        if ending.left > 0:
            assert calls > 5
            return
    pytest.fail("the deletion never ended")


@pytest.mark.parametrize("mark", ["pin", "lease"])
def test_a_mark_that_was_accepted_before_the_manifest_went_brings_the_checkpoint_back_after_a_kill(
    tmp_path: Path, mark: str
) -> None:
    store = fill(tmp_path, (1, 2))
    info = read_steps(store)[0]

    class KilledAfterTheMark(Ending):
        """Ends the process after its second call, the deletion of the manifest, before which the mark was accepted."""

        def delete(self, name) -> None:
            if mark == "pin":
                step_records.pin(self.store, step_folder(1), time=6.0)
            else:
                step_records.lease(self.store, step_folder(1), until=100.0)
            super().delete(name)

    with suppress(Killed):
        delete_steps(KilledAfterTheMark(store, 2, does_it=True), [info], now=10.0)
    assert bcp.steps(tmp_path) == [2]
    assert finish_deletions(store, now=10.0) == 0
    state = {"w": torch.zeros(50)}
    bcp.load(tmp_path, state, step=1)
    assert state["w"][0] == 1.0
    assert not store.list(retention.JOURNAL_FOLDER)
    assert [found.info.step for found in list_steps(store) if found.info.pinned or found.leased_until == 100.0] == [1]


def test_a_deletion_that_failed_after_an_accepted_pin_says_that_the_step_stays(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2))
    info = read_steps(store)[0]
    with suppress(Killed):
        delete_steps(Ending(store, 2, does_it=True), [info], now=10.0)
    step_records.write_pin(store, step_folder(1), time=6.0)  # of a call that saw the manifest before and after
    assert delete_steps(store, [info], now=10.0) == {1: "pinned"}
    assert bcp.steps(tmp_path) == [1, 2]


def test_a_pin_does_not_bring_back_what_is_no_longer_whole(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2))
    with suppress(Killed):
        delete_steps(Ending(store, 3, does_it=True), [read_steps(store)[0]], now=10.0)
    step_records.write_pin(store, step_folder(1), time=6.0)
    assert finish_deletions(store, now=10.0) == 1
    assert bcp.steps(tmp_path) == [2]
    assert [name for name in files_under(tmp_path) if name.startswith(step_folder(1))] == [f"{step_folder(1)}/pin.json"]


def test_a_forced_deletion_is_finished_in_spite_of_a_pin(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2))
    step_records.pin(store, step_folder(1), time=1.0)
    info = read_steps(store)[0]
    with suppress(Killed):
        ending = Ending(store, 2, does_it=True)
        retention.delete_one(ending, step_folder(1), save_id=info.save_id, now=1.0, force=True)
    assert finish_deletions(store, now=10.0) == 1
    assert [name for name in files_under(tmp_path) if not name.startswith(step_folder(2))] == []


def test_a_step_that_was_saved_again_meanwhile_is_not_touched(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2))
    with suppress(Killed):
        delete_steps(Ending(store, 2, does_it=True), [read_steps(store)[0]], now=10.0)
    bcp.save(tmp_path, {"w": torch.full((50,), 7.0)}, step=1)
    step_records.pin(store, step_folder(1), time=1.0)
    assert finish_deletions(store, now=10.0) == 1
    assert bcp.open(tmp_path, step=1)["w"][0] == 7.0
    assert read_steps(store)[0].pinned
    assert len(list((tmp_path / step_folder(1) / "data").iterdir())) == 1


def test_a_journal_that_names_files_of_others_deletes_none(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2))
    before = sorted(files_under(tmp_path))
    names = [f"../{step_folder(2)}/manifest.bcp", "manifest.bcp", "data/notes.txt", "data/0123456789abcdef-x/../../y"]
    journal = retention.DeletionJournal(step_folder(9), "0123456789abcdef", names)
    (tmp_path / "manager" / "deleting").mkdir(parents=True)
    (tmp_path / "manager" / "deleting" / "a.json").write_bytes(retention.msgspec.json.encode(journal))
    finish_deletions(store, now=10.0)
    assert sorted(files_under(tmp_path)) == before


def test_force_deletes_a_pinned_one(tmp_path: Path) -> None:
    store = fill(tmp_path, (1, 2))
    step_records.pin(store, step_folder(1), time=1.0)
    info = read_steps(store)[0]
    assert retention.delete_one(store, step_folder(1), save_id=info.save_id, now=1.0, force=True) == ""
    assert [name for name in files_under(tmp_path) if not name.startswith(step_folder(2))] == []
