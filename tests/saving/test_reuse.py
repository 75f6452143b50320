"""Saves that take files of the newest checkpoint instead of writing them again: which ones they take, and that every
checkpoint stays complete by itself.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from storage.s3_service import S3Service

import bytecheckpoint as bcp
from bytecheckpoint.manifest import decode_manifest
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.saving import write
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.staging import reuse
from bytecheckpoint.staging.reuse import ReuseHistory, content_digest
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.backends import local_store
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.garbage import find_leftovers
from bytecheckpoint.storage.inventory import inventory_of

REUSE = bcp.SaveOptions(reuse=True)
HEADER_BYTES = 8192
BASE_BYTES = 4 * (512 * 512 + 512) * 4


class Adapted(torch.nn.Module):
    """A frozen base with an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        self.adapter = torch.nn.Linear(512, 8)
        self.base.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.adapter.parameters())

    def train_step(self) -> None:
        for parameter in self.adapter.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        return {"model": self, "optimizer": self.optimizer}


@pytest.fixture(autouse=True)
def _no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    restart(monkeypatch)


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets what the process knows of earlier saves, as a new process would."""
    monkeypatch.setattr(process_state(), "reuse", ReuseHistory())


def is_restored(root: object, model: Adapted, step: int, **arguments: object) -> bool:
    loaded = Adapted()
    for parameter in loaded.parameters():
        torch.nn.init.zeros_(parameter)
    bcp.load(root, loaded.state(), step=step, **arguments)
    return all(torch.equal(*pair) for pair in zip(model.parameters(), loaded.parameters(), strict=True))


def refuse(*_arguments: object, **_more: object) -> None:
    raise bcp.StorageError("refused", kind="permission", path="")


def disk_bytes(root: Path) -> int:
    """Bytes of data files below a folder, each file once however many names it has."""
    return sum({(status := path.stat()).st_ino: status.st_size for path in root.glob("**/*.safetensors")}.values())


@pytest.mark.parametrize("way", ["sync", "copy", "lazy", "zstd", "local stage"])
def test_frozen_parameters_are_written_once_and_every_step_loads(tmp_path: Path, way: str) -> None:
    options = bcp.SaveOptions(
        reuse=True,
        snapshot="lazy" if way == "lazy" else "auto",
        codec="zstd" if way == "zstd" else "none",
        local_stage=tmp_path / "stage" if way == "local stage" else None,
    )
    model, root = Adapted(), tmp_path / "root"
    kept = []
    for step in range(4):
        model.train_step()
        info = bcp.save(root, model.state(), step=step, async_save=way != "sync", options=options).result()
        kept.append({name: value.clone() for name, value in model.state_dict().items()})
        assert (info.reused_bytes > 0) == (step > 0)
    changed = sum(tensor.nbytes for tensor in model.adapter.parameters()) * 3
    written = info.num_bytes - info.reused_bytes
    assert written <= changed + HEADER_BYTES
    for step, values in enumerate(kept):
        model.load_state_dict(values)
        assert is_restored(root, model, step)
    assert disk_bytes(root) < 1.2 * info.num_bytes


def test_each_checkpoint_is_complete_when_all_others_are_deleted(tmp_path: Path) -> None:
    model = Adapted()
    for step in range(3):
        model.train_step()
        bcp.save(tmp_path, model.state(), step=step, options=REUSE)
    bcp.delete(tmp_path, step=0)
    bcp.delete(tmp_path, step=1)
    assert is_restored(tmp_path, model, 2)


def test_an_overwriting_save_takes_files_of_the_checkpoint_that_it_replaces(tmp_path: Path) -> None:
    options = bcp.SaveOptions(reuse=True, overwrite=True)
    model = Adapted()
    for number in range(3):
        model.train_step()
        info = bcp.save(tmp_path / "last", model.state(), options=options).result()
        assert (info.reused_bytes > 0) == (number > 0)
    loaded = Adapted()
    bcp.load(tmp_path / "last", loaded.state())
    assert torch.equal(loaded.base[3].weight, model.base[3].weight)
    assert torch.equal(loaded.adapter.weight, model.adapter.weight)


def test_a_new_process_takes_files_of_the_newest_checkpoint_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Adapted()
    bcp.save(tmp_path, model.state(), step=1, options=REUSE)
    restart(monkeypatch)
    assert bcp.save(tmp_path, model.state(), step=2, options=REUSE).result().reused_bytes >= BASE_BYTES


def test_frozen_parameters_that_change_are_written_and_later_share_no_file_with_frozen_ones(tmp_path: Path) -> None:
    model, teacher = Adapted(), Adapted()
    teacher.adapter.requires_grad_(False)  # an average of weights: no gradient, and new values at each step
    reused = []
    for step in range(4):
        model.train_step()
        with torch.no_grad():
            teacher.adapter.weight.lerp_(model.adapter.weight, 0.5)
        info = bcp.save(tmp_path, {"model": model, "teacher": teacher}, step=step, options=REUSE).result()
        reused.append(info.reused_bytes)
        assert torch.equal(bcp.open(tmp_path, step=step)["teacher.adapter.weight"][:], teacher.adapter.weight)
    # 0 and 1 have the teacher in a file with the bases; 2 has new files; 3 takes those of 2.
    assert reused[:3] == [0, 0, 0]
    assert reused[3] >= 2 * 4 * 512 * 512 * 4  # small tensors that share an extent with the teacher are written


def test_tensors_without_a_module_are_found_unchanged_by_two_saves(tmp_path: Path) -> None:
    state = {"table": torch.randn(1 << 19), "counter": torch.zeros(1 << 19)}
    reused = []
    for step in range(5):
        state["counter"] += 1
        reused.append(bcp.save(tmp_path, state, step=step, options=REUSE).result().reused_bytes)
    assert reused[:3] == [0, 0, 0]  # the third has files of their own
    assert all(num_bytes >= 1 << 21 for num_bytes in reused[3:])
    state["table"][7] = 5.0
    bcp.save(tmp_path, state, step=5, options=REUSE)
    assert bcp.open(tmp_path, step=5)["table"][7] == 5.0
    assert bcp.open(tmp_path, step=4)["table"][7] != 5.0


def test_tensors_that_all_change_cost_no_digest_and_no_new_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests: list[object] = []
    monkeypatch.setattr(write, "content_digest", lambda blocks: digests.append(blocks) or b"")
    state, plans = {"weight": torch.zeros(1 << 18)}, []
    for step in range(4):
        state["weight"] += 1
        bcp.save(tmp_path, state, step=step, options=REUSE)
        plans.append(len(process_state().plans._plans))
    assert digests == []
    assert len(set(plans)) == 1


def test_values_that_change_while_a_synchronous_save_writes_are_not_taken_for_those_that_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Adapted()
    bcp.save(tmp_path, model.state(), step=0, options=REUSE)
    with torch.no_grad():
        model.base[0].weight.add_(1.0)
    restart(monkeypatch)
    wanted = model.base[0].weight.clone()

    def digest_then_change(blocks: Sequence[Block]) -> bytes:
        digest = content_digest(blocks)
        with torch.no_grad():
            model.base[0].weight.zero_()  # as another thread may
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(write, "content_digest", digest_then_change)
        bcp.save(tmp_path, model.state(), step=1, options=REUSE)
    with torch.no_grad():
        model.base[0].weight.copy_(wanted)
    bcp.save(tmp_path, model.state(), step=2, options=REUSE)
    assert is_restored(tmp_path, model, 2)


def test_a_first_save_hashes_what_later_ones_may_take_only_as_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "content_digest", refuse)
    model = Adapted()
    bcp.save(tmp_path, model.state(), step=0, options=REUSE)
    monkeypatch.undo()
    assert bcp.save(tmp_path, model.state(), step=1, options=REUSE).result().reused_bytes >= BASE_BYTES


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_file_of_an_earlier_step_that_is_gone_or_cut_is_written(tmp_path: Path, damage: str) -> None:
    model = Adapted()
    bcp.save(tmp_path, model.state(), step=0, options=REUSE)
    if damage == "gone":
        shutil.rmtree(tmp_path / "step_00000000")
    else:
        largest = max((tmp_path / "step_00000000/data").iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, 100)
    assert bcp.save(tmp_path, model.state(), step=1, options=REUSE).result().reused_bytes == 0
    assert is_restored(tmp_path, model, 1)


def test_a_file_system_without_hard_links_gets_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_store, "link", lambda _existing, _path: False)
    model = Adapted()
    for step in range(2):
        assert bcp.save(tmp_path, model.state(), step=step, options=REUSE).result().reused_bytes == 0
    assert is_restored(tmp_path, model, 1)


def test_a_store_that_cannot_copy_gets_every_file() -> None:
    model = Adapted()
    for step in range(2):
        assert bcp.save("memory://reuse", model.state(), step=step, options=REUSE).result().reused_bytes == 0


def test_a_failed_save_leaves_the_files_that_it_had_taken_with_the_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Adapted()
    bcp.save(tmp_path, model.state(), step=0, options=REUSE)
    with monkeypatch.context() as patch:
        patch.setattr(layout, "commit", refuse)
        with pytest.raises(bcp.StorageError):
            bcp.save(tmp_path, model.state(), step=1, options=REUSE)
    assert list((tmp_path / "step_00000001").glob("data/*")) == []
    assert is_restored(tmp_path, model, 0)
    assert bcp.save(tmp_path, model.state(), step=2, options=REUSE).result().reused_bytes > 0


def test_a_file_that_was_taken_looks_as_new_to_garbage_collection(tmp_path: Path) -> None:
    model = Adapted()
    bcp.save(tmp_path, model.state(), step=0, options=REUSE)
    for path in tmp_path.glob("**/*.safetensors"):
        os.utime(path, (1, 1))
    bcp.save(tmp_path, model.state(), step=1, options=REUSE)
    (tmp_path / "step_00000001/manifest.bcp").unlink()  # as before the commit
    store = LocalStore(str(tmp_path), writer_threads=1)
    now_s = max(item.modified_s or 0 for item in inventory_of(store, ""))
    (leftover,) = find_leftovers(store, "").found
    assert not leftover.is_dead(now_s=now_s, min_age_s=3600)


def test_only_files_that_may_be_taken_have_a_digest_in_the_manifest(tmp_path: Path) -> None:
    bcp.save(tmp_path, Adapted().state(), step=0, options=REUSE)
    bcp.save(tmp_path, Adapted().state(), step=1)
    manifests = [decode_manifest(path.read_bytes()) for path in sorted(tmp_path.glob("*/manifest.bcp"))]
    assert [sorted(len(file.content_digest) for file in manifest.files) for manifest in manifests] == [[0, 16], [0]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto
def test_files_in_s3_are_copied_by_the_service(s3: S3Service, s3_prefix: str) -> None:
    model, root, options = Adapted(), f"s3://{s3.bucket}/{s3_prefix}", s3.options
    for step in range(3):
        model.train_step()
        info = bcp.save(root, model.state(), step=step, options=REUSE, storage_options=options).result()
        assert (info.reused_bytes >= BASE_BYTES) == (step > 0)
    bcp.delete(root, step=0, storage_options=options)
    bcp.delete(root, step=1, storage_options=options)
    assert is_restored(root, model, 2, storage_options=options)


def test_staging_in_waves_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no staging_bytes"):
        bcp.SaveOptions(reuse=True, staging_bytes=64 << 20)


def test_what_is_unchanged_is_found_in_each_of_many_roots_that_are_saved_to_in_turn(tmp_path: Path) -> None:
    base = torch.randn(1 << 18)
    for step in range(4):
        for root in range(12):
            state = {"base": base, "head": torch.randn(1 << 10)}
            bcp.save(tmp_path / str(root), state, step=step, options=bcp.SaveOptions(reuse=True))
    for root in range(12):
        assert 3 * base.nbytes < disk_bytes(tmp_path / str(root)) < 4 * base.nbytes  # the third plan has a file of it


def test_histories_of_paths_that_are_saved_to_once_do_not_pile_up() -> None:
    histories = ReuseHistory()
    first, second = histories.of_root("0"), histories.of_root("1")
    for number in range(2, reuse._MAX_ROOTS + 1):
        assert histories.of_root("0") is first
        histories.of_root(str(number))
    assert histories.of_root("0") is first
    assert histories.of_root("1") is not second
