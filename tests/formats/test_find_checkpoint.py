"""Which checkpoint a path means: files and folders, roots with steps, URLs; this library's own before all others."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import assert_same
from safetensors.torch import save, save_file

import bytecheckpoint as bcp
from bytecheckpoint.formats.find_checkpoint import Opening, find_checkpoint, split_path
from bytecheckpoint.storage.backends.local_store import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TENSORS = {"layers.0.weight": torch.arange(6.0).reshape(2, 3), "layers.1.weight": torch.ones(4)}


def save_dcp(path: Path) -> None:
    dcp.save(dict(TENSORS), checkpoint_id=path, no_dist=True)


def test_files_and_folders_at_a_url_are_read_as_local_ones(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/foreign/hf/model.safetensors", save(TENSORS))
    save_dcp(tmp_path / "dcp")
    for file in (tmp_path / "dcp").iterdir():
        memory.pipe(f"/foreign/dcp/{file.name}", file.read_bytes())
    torch.save(TENSORS, tmp_path / "x.pt")
    memory.pipe("/foreign/x.pt", (tmp_path / "x.pt").read_bytes())
    for path in ("hf", "hf/model.safetensors", "dcp", "x.pt"):
        url = f"memory://foreign/{path}"
        checkpoint = bcp.open(url)
        assert_same(checkpoint.state_dict(), TENSORS)
        assert checkpoint.info.path == url
        model = {"layers.0.weight": torch.zeros(2, 3), "layers.1.weight": torch.zeros(4)}
        bcp.load(url, {"anything": model})
        assert_same(model, TENSORS)


def test_the_librarys_own_checkpoint_comes_first(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    bcp.save(tmp_path, {"own": torch.zeros(2)})
    assert bcp.open(tmp_path).info.format == "bytecheckpoint"
    bcp.save(tmp_path / "root", {"own": torch.zeros(2)}, step=3)
    save_file(TENSORS, tmp_path / "root" / "model.safetensors")
    assert bcp.open(tmp_path / "root").info.step == 3


def test_a_root_of_megatron_is_read_at_its_newest_step_and_at_any(tmp_path: Path) -> None:
    for step in (10, 20):
        save_dcp(tmp_path / f"iter_{step:07d}")
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    assert bcp.open(tmp_path).info.path == str(tmp_path / "iter_0000020")
    assert bcp.open(tmp_path, step=10).info.path == str(tmp_path / "iter_0000010")
    with pytest.raises(bcp.CheckpointNotFoundError) as caught:
        bcp.open(tmp_path, step=30)
    assert caught.value.step == 30
    with pytest.raises(bcp.CheckpointNotFoundError):
        bcp.open(tmp_path, step=None)


@pytest.mark.parametrize("text", ["../elsewhere", "/etc", "a/../../b", "\n"])
def test_a_pointer_that_names_nothing_in_the_folder_is_not_followed(tmp_path: Path, text: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    save_dcp(tmp_path / "elsewhere")
    (root / "latest").write_text(text)
    with pytest.raises(bcp.CheckpointNotFoundError) as caught:
        bcp.open(root)
    assert str(root) in caught.value.message


def test_a_folder_that_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "latest").write_text("gone")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "nothing" / "at.all"):
        with pytest.raises(bcp.CheckpointNotFoundError) as caught:
            bcp.open(path)
        assert caught.value.kind == "not_found"


def test_a_snapshot_that_was_copied_without_its_blobs_is_said_to_have_dead_links(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "model.safetensors").symlink_to("../../blobs/0123")
    with pytest.raises(bcp.CheckpointNotFoundError, match="only dead links"):
        bcp.open(tmp_path / "copy")


@pytest.fixture
def unlisted_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the folder of the test not be listed, as a policy for the objects below one prefix does."""
    listed = LocalStore.list

    def list_below(store: LocalStore, folder: str) -> Any:
        if str(store) == str(tmp_path):
            raise bcp.StorageError("not allowed to list it", kind="permission")
        return listed(store, folder)

    monkeypatch.setattr(LocalStore, "list", list_below)


@pytest.mark.usefixtures("unlisted_above")
def test_nothing_there_is_not_found_though_the_folder_above_must_not_be_listed(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointNotFoundError) as caught:
        bcp.open(tmp_path / "nothing")
    assert caught.value.kind == "not_found"


@pytest.mark.usefixtures("unlisted_above")
@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_checkpoint_in_a_folder_called_snapshots_is_found_though_the_one_above_must_not_be_listed(
    tmp_path: Path, is_foreign: bool
) -> None:
    path = tmp_path / "snapshots" / "run"
    if is_foreign:
        path.mkdir(parents=True)
        save_file(TENSORS, path / "model.safetensors")
    else:
        bcp.save(path, dict(TENSORS))
    assert_same(bcp.open(path).state_dict(), TENSORS)


def test_a_snapshot_is_read_though_the_folder_of_its_model_may_be_entered_and_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots" / "0123"
    for folder in (tmp_path / "blobs", snapshot):
        folder.mkdir(parents=True)
    save_file(TENSORS, tmp_path / "blobs" / "4567")
    (snapshot / "model.safetensors").symlink_to("../../blobs/4567")
    listed = LocalStore.list

    def list_below(store: LocalStore, folder: str) -> Any:
        if str(store) == str(tmp_path) and not folder:
            raise bcp.StorageError("not allowed to list it", kind="permission")
        return listed(store, folder)

    monkeypatch.setattr(LocalStore, "list", list_below)
    for path in (snapshot, snapshot / "model.safetensors"):
        assert_same(bcp.open(path).state_dict(), TENSORS)


def test_a_folder_that_is_no_part_of_the_checkpoint_need_not_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lost+found, where a disk is mounted at the folder."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "lost+found").mkdir()
    listed = LocalStore.list

    def list_allowed(store: LocalStore, folder: str) -> Any:
        if folder == "lost+found":
            raise bcp.StorageError("not allowed to list it", kind="permission")
        return listed(store, folder)

    monkeypatch.setattr(LocalStore, "list", list_allowed)
    checkpoint = bcp.open(tmp_path)
    assert_same(checkpoint.state_dict(), TENSORS)
    assert checkpoint.info.metadata["left_out"].startswith("lost+found/: ")


@pytest.mark.parametrize("path", ["x.pt", "./x.pt", "{}/x.pt", "file://{}/x.pt"])
def test_a_file_is_found_however_its_path_is_spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(TENSORS, "x.pt")
    found = find_checkpoint(path.format(tmp_path), "latest", Opening(None))
    assert found.path == str(tmp_path / "x.pt")


@pytest.mark.parametrize("path", ["", "s3:/key:secret@bucket/run"])
def test_what_is_no_path_is_not_taken_for_one_below_this_folder(path: str) -> None:
    with pytest.raises(bcp.StorageError) as caught:
        bcp.open(path)
    assert caught.value.kind == "unsupported"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("root", ["memory://", "s3://bucket", "/"])
def test_a_root_has_no_folder_above_it(root: str) -> None:
    assert split_path(root) == (root, "")


def unstacked(stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """By the formula of Megatron's sources, for two dimensions."""
    counts = stored.shape[:2]
    part = [length // count for length, count in zip(shape, counts, strict=True)]
    return stored.reshape(*counts, *part).permute(0, 2, 1, 3).reshape(shape)


def test_what_megatron_has_stacked_up_to_0_14_has_its_true_shape(tmp_path: Path) -> None:
    stored = torch.arange(24.0).reshape(2, 3, 4)
    dcp.save({"flat": stored, "plain": torch.ones(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp" / ".metadata"
    metadata: Any = pickle.loads(path.read_bytes())
    metadata.mcore_data = {"flat": {"nd_reformulated_orig_global_shape": (4, 6)}, "plain": {}}
    path.write_bytes(pickle.dumps(metadata))
    checkpoint = bcp.open(tmp_path / "dcp")
    assert_same(checkpoint.state_dict(), {"flat": unstacked(stored, (4, 6)), "plain": torch.ones(3)})
    assert torch.equal(checkpoint["flat"][1:3, 1:5], unstacked(stored, (4, 6))[1:3, 1:5])
    metadata.mcore_data["flat"]["nd_reformulated_orig_global_shape"] = (5, 6)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(bcp.CheckpointCorruptError) as caught:
        bcp.open(tmp_path / "dcp")
    assert caught.value.kind == "bad_manifest"
