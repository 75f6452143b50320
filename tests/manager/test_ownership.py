"""A root belongs to the manager with the highest generation, which may clear what earlier ones left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointSaveError, StorageError
from bytecheckpoint.manager.ownership import claim
from bytecheckpoint.storage import garbage
from bytecheckpoint.storage.backends.local_store import LocalStore


def store_at(path: Path) -> LocalStore:
    return LocalStore(str(path), writer_threads=1)


def leave_data(path: Path, step: int, save_id: str) -> Path:
    file = path / f"step_{step:08}" / "data" / f"{save_id}-00000-0.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"half")
    return file


def test_each_manager_gets_a_higher_generation_than_all_before(tmp_path: Path) -> None:
    generations = [claim(store_at(tmp_path), time=1.0) for _ in range(3)]
    assert [generation.number for generation in generations] == [1, 2, 3]
    assert len({generation.save_id_prefix for generation in generations}) == 3


def test_of_managers_that_claim_at_once_each_gets_its_own_generation(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: claim(store_at(tmp_path), time=1.0).number, range(8)))
    assert sorted(found) == list(range(1, 9))


def test_the_owner_passes_the_check_and_an_earlier_one_learns_who_owns_the_root(tmp_path: Path) -> None:
    older = claim(store_at(tmp_path), time=1.0)
    older.check(outcome="")
    newer = claim(store_at(tmp_path), time=1234.0)
    newer.check(outcome="")
    who = r"pid \d+ on .* at 1970-01-01 00:20:34 UTC.*read_only=True"
    with pytest.raises(CheckpointSaveError, match=who) as raised:
        older.check(outcome="")
    assert raised.value.kind == "superseded"


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_save_whose_files_another_manager_has_cleared_names_that_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_staged: bool
) -> None:
    others: list[bcp.CheckpointManager] = []
    write = LocalStore.write

    def claim_and_clear(store: LocalStore, name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.endswith(".safetensors") and "step_00000003" in str(store) + name:
            others.append(bcp.CheckpointManager(tmp_path / "run"))
            raise StorageError("cannot write: No such file or directory", kind="storage")
        return write(store, name, *arguments, **keywords)

    stage = str(tmp_path / "stage") if is_staged else None
    options = bcp.ManagerOptions(save=bcp.SaveOptions(local_stage=stage))
    manager = bcp.CheckpointManager(tmp_path / "run", save=bcp.save_policies.EverySteps(1), options=options)
    monkeypatch.setattr(LocalStore, "write", claim_and_clear)
    handle = manager.save(3, {"weight": torch.ones(2)})
    assert handle is not None
    with pytest.raises(CheckpointSaveError, match="belongs to another manager") as raised:
        handle.result()
    assert raised.value.kind == "superseded"
    manager.close()
    others[0].close()


@pytest.mark.parametrize("keeps_data", [False, True])
def test_a_checkpoint_that_commits_while_its_files_are_cleared_goes_unless_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_data: bool
) -> None:
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1)) as earlier:
        earlier.save(1, {"weight": torch.ones(2)})
    manifest = tmp_path / "step_00000001" / "manifest.bcp"
    content = manifest.read_bytes()
    manifest.unlink()
    remove = garbage.remove

    def commit_late(*arguments: Any) -> None:
        if not keeps_data:
            remove(*arguments)
        manifest.parent.mkdir(exist_ok=True)
        manifest.write_bytes(content)

    monkeypatch.setattr(garbage, "remove", commit_late)
    claim(store_at(tmp_path), time=2.0).clear_earlier(before_folder=lambda: None)
    assert bcp.steps(tmp_path) == ([1] if keeps_data else [])


def test_only_what_earlier_generations_left_uncommitted_is_cleared(tmp_path: Path) -> None:
    older = claim(store_at(tmp_path), time=1.0)
    newer = claim(store_at(tmp_path), time=2.0)
    bcp.save(tmp_path, {"weight": torch.ones(2)}, step=1)
    left = leave_data(tmp_path, 2, older.save_id_prefix + "00000000")
    beside = leave_data(tmp_path, 1, older.save_id_prefix + "11111111")
    own = leave_data(tmp_path, 2, newer.save_id_prefix + "22222222")
    others = leave_data(tmp_path, 3, "fedcba9876543210")
    user_file = tmp_path / "step_00000002" / "notes.txt"
    user_file.write_text("mine")
    newer.clear_earlier(before_folder=lambda: None)
    assert [path.exists() for path in (left, beside, own, others, user_file)] == [False, False, True, True, True]
    bcp.load(tmp_path, {"weight": torch.zeros(2)}, step=1)
    newer.check(outcome="")
    with pytest.raises(CheckpointSaveError):
        older.check(outcome="")


@pytest.mark.parametrize(
    "content",
    ["{", " " * (1 << 17), '{"x": ' + "[" * 50_000, '{"save_id_prefix": "a", "host": "h", "pid": 1, "time": 1e300}'],
    ids=["damaged", "too long", "nested too deep", "a time that is no date"],
)
def test_a_damaged_claim_still_counts(tmp_path: Path, content: str) -> None:
    older = claim(store_at(tmp_path), time=1.0)
    (tmp_path / "manager" / "generations" / "00000002.json").write_text(content)
    with pytest.raises(CheckpointSaveError, match="an unknown process"):
        older.check(outcome="")
    assert claim(store_at(tmp_path), time=1.0).number == 3
