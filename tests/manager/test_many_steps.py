"""A root with many steps: neither the constructor nor latest nor restore looks at each of them."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from storage.s3_service import S3Service

import bytecheckpoint as bcp
from bytecheckpoint import keep_policies, save_policies
from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.step_records import StoredStep
from bytecheckpoint.storage.backends.local_store import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto

RARELY = save_policies.EverySteps(100_000)


def state_at(value: float) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(value))}


def fill(root: Path, num_steps: int) -> None:
    """Makes steps 0 to num_steps - 1 that have a manifest each, of which the newest loads."""
    bcp.save(root, state_at(1), step=num_steps - 1)
    manifest = root / f"step_{num_steps - 1:08d}" / "manifest.bcp"
    for step in range(num_steps - 1):
        (root / f"step_{step:08d}").mkdir()
        shutil.copy(manifest, root / f"step_{step:08d}" / "manifest.bcp")


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts the steps whose records this thread reads."""
    real, counts, this = step_records.read_step, [], threading.get_ident()

    def read(*arguments: Any, **keywords: Any) -> StoredStep | None:
        counts.append("training" if threading.get_ident() == this else "background")
        return real(*arguments, **keywords)

    monkeypatch.setattr(step_records, "read_step", read)
    return counts


def test_training_waits_for_no_record_but_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 50)
    counts = count_reads(monkeypatch)
    with bcp.CheckpointManager(tmp_path, save=RARELY, keep=keep_policies.Latest(3)) as manager:
        assert manager.latest() == 49
        assert manager.restore(state_at(0)) is not None
        manager.save(60, state_at(60), force=True)
    assert counts.count("training") == 1
    assert counts.count("background") == 51
    assert bcp.steps(tmp_path) == [48, 49, 60]


def test_a_policy_that_needs_the_steps_gets_all_of_them(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    seen: list[int] = []
    policy = save_policies.When(lambda _, saved: seen.append(len(saved)))
    with bcp.CheckpointManager(tmp_path, save=policy) as manager:
        manager.save(9, state_at(9))
    assert seen == [5]


def test_the_steps_that_a_policy_needs_are_read_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 5)
    counts = count_reads(monkeypatch)
    policy = save_policies.When(lambda _, saved: len(saved) == 5)
    with bcp.CheckpointManager(tmp_path, save=policy) as manager:
        manager.wait()
        assert sorted(counts) == ["background"] * 5 + ["training"]  # of the newest
        assert manager.save(9, state_at(9)) is not None
    assert counts.count("training") == 1


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts the folders that this thread looks into."""
    real_list, real_in_folders, looks, this = LocalStore.list, LocalStore.in_folders, [], threading.get_ident()

    def note(folders: Sequence[str]) -> None:
        if threading.get_ident() == this:
            looks.extend(folders)

    def list_folder(store: LocalStore, folder: str) -> Mapping[str, int | None]:
        note([folder])
        return real_list(store, folder)

    def in_folders(store: LocalStore, folders: Sequence[str], name: str) -> Sequence[bool | None]:
        note(folders)
        return real_in_folders(store, folders, name)

    monkeypatch.setattr(LocalStore, "list", list_folder)
    monkeypatch.setattr(LocalStore, "in_folders", in_folders)
    return looks


def test_latest_is_quick_with_ten_thousand_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 10_000)
    with bcp.CheckpointManager(tmp_path, save=RARELY) as manager:
        looks = count_looks(monkeypatch)
        began = time.thread_time()
        assert manager.latest() == 9_999
        assert time.thread_time() - began < 2, "of a tenth"
        assert looks == ["", "step_00009999"]


def requests_for(s3: S3Service, prefix: str, num_steps: int, tmp_path: Path) -> list[int]:
    """Returns the numbers of requests of the constructor, latest and restore."""
    assert s3.faults is not None
    root = f"s3://{s3.bucket}/{prefix}/{num_steps}"
    bcp.save(root, state_at(1), step=num_steps - 1, storage_options=s3.options)
    fill(tmp_path / str(num_steps), 2)
    manifest = (tmp_path / str(num_steps) / "step_00000000" / "manifest.bcp").read_bytes()
    for step in range(num_steps - 1):
        key = f"{prefix}/{num_steps}/step_{step:08d}/manifest.bcp"
        s3.client().put_object(Bucket=s3.bucket, Key=key, Body=manifest)
    counts = []
    s3.faults.reset()
    manager = bcp.CheckpointManager(root, save=RARELY, storage_options=s3.options)
    manager.wait()  # for the background, which looks for deletions that were cut off
    counts.append(len(s3.faults.requests))
    assert manager.latest() == num_steps - 1
    counts.append(len(s3.faults.requests))
    manager.restore(state_at(0))
    counts.append(len(s3.faults.requests))
    manager.close()
    return counts


def test_the_number_of_steps_is_no_number_of_requests(s3: S3Service, s3_prefix: str, tmp_path: Path) -> None:
    if s3.faults is None:
        pytest.skip("a real service does not count requests")
    assert requests_for(s3, s3_prefix, 40, tmp_path) == requests_for(s3, s3_prefix, 2, tmp_path)
