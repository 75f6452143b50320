"""Wrong paths, damaged checkpoints and wrong arguments: each is an error of the right kind that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import struct
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from training import mlp, same_module

import bytecheckpoint as bcp
from bytecheckpoint.manifest import decode_manifest, encode_manifest
from bytecheckpoint.manifest.envelope import MAGIC


def state(value: float = 0.0) -> dict[str, Any]:
    return {"a": torch.full((1000,), value), "n": value}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    bcp.save(path, state(1.0))
    return path


def read_through_load(path: Path) -> Any:
    """The error of a load, which has to leave the state as it was."""
    target = state()
    try:
        bcp.load(path, target)
    finally:
        assert not target["a"].any()
        assert target["n"] == 0.0


def read_through_open(path: Path) -> Any:
    bcp.open(path)["a"][...]


READERS = pytest.mark.parametrize("read", [read_through_load, read_through_open], ids=["load", "open"])


@READERS
def test_a_path_that_does_not_exist(tmp_path: Path, read: Any) -> None:
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"nowhere.*does not exist.*check the path") as error:
        read(tmp_path / "nowhere")
    assert error.value.kind == "not_found"
    assert not (tmp_path / "nowhere").exists()
    assert bcp.latest(tmp_path / "nowhere") is None
    assert bcp.steps(tmp_path / "nowhere") == []


@READERS
def test_an_empty_folder_and_a_folder_of_something_else(tmp_path: Path, read: Any) -> None:
    with pytest.raises(bcp.CheckpointNotFoundError, match="check the path"):
        read(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"is not a checkpoint.*notes\.txt") as error:
        read(tmp_path)
    assert error.value.kind == "not_found"


def test_a_path_that_is_not_utf8_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    Path(path).mkdir()
    calls = [partial(bcp.save, path), partial(bcp.load, path), partial(bcp.save, "below")]
    calls.append(lambda _: bcp.CheckpointManager(path))
    monkeypatch.chdir(path)
    for call in calls:
        with pytest.raises(bcp.StorageError, match=r"caf\\udce9.*are not UTF-8.*symbolic link") as error:
            call(state())
        assert error.value.kind == "unsupported"
    assert os.listdir(path) == []
    (tmp_path / "link").symlink_to(path)
    bcp.save(tmp_path / "link" / "saved", state(1.0))
    bcp.load(tmp_path / "link" / "saved", state())


def test_a_role_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    role = os.fsdecode(b"caf\xe9")
    calls = [partial(bcp.save, role=role), partial(bcp.load, role=role)]
    calls.append(lambda path, _: bcp.CheckpointManager(path, role=role))
    for call in calls:
        with pytest.raises(bcp.StorageError, match=r"caf\\udce9.*are not UTF-8") as error:
            call(tmp_path, state())
        assert error.value.kind == "unsupported"
    assert os.listdir(tmp_path) == []


def test_a_role_under_an_empty_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (partial(bcp.save, "", state()), partial(bcp.load, "", state()), partial(bcp.CheckpointManager, "")):
        with pytest.raises(bcp.StorageError, match="the path is empty") as error:
            call(role="actor")
        assert error.value.kind == "unsupported"
    assert os.listdir(tmp_path) == []


def test_a_file_of_another_program_whose_name_is_not_utf8_is_refused_or_named(tmp_path: Path) -> None:
    folder, odd = os.fsencode(tmp_path), b"/caf\xe9.bin"
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    shutil.copy(folder + b"/pytorch_model.bin", folder + odd)
    assert r"caf\udce9.bin" in bcp.open(tmp_path).info.metadata["left_out"]
    with pytest.raises(bcp.UnsafeCheckpointError, match=r"caf\\udce9.bin: files with .* not UTF-8"):
        bcp.open(os.fsdecode(folder + odd))


@READERS
def test_a_path_that_is_a_file(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(bcp.CheckpointError, match="file"):
        read(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_save_to_a_path_that_is_a_file_says_so_and_not_that_a_checkpoint_is_missing(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("precious")
    for step in (None, 3):
        with pytest.raises(bcp.CheckpointSaveError, match=f"{tmp_path}/file is a file.*nothing was saved") as error:
            bcp.save(tmp_path / name, state(), step=step)
        assert error.value.kind == "storage"
    assert (tmp_path / "file").read_text() == "precious"


@READERS
def test_a_folder_that_was_not_committed(saved: Path, read: Any) -> None:
    (saved / "manifest.bcp").unlink()
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"not committed.*did not finish") as error:
        read(saved)
    assert error.value.kind == "not_committed"


def test_a_step_that_is_not_there_or_not_committed(tmp_path: Path) -> None:
    for step in (1, 5, 9):
        bcp.save(tmp_path, state(float(step)), step=step)
    (tmp_path / "step_00000009" / "manifest.bcp").unlink()
    assert (bcp.latest(tmp_path), bcp.steps(tmp_path)) == (5, [1, 5])
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"no step 7.*5, 1") as error:
        bcp.load(tmp_path, state(), step=7)
    assert error.value.kind == "not_found"
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"step 9 .* not committed.*5, 1") as error:
        bcp.load(tmp_path, state(), step=9)
    assert (error.value.kind, error.value.step) == ("not_committed", 9)
    target = state()
    assert bcp.load(tmp_path, target).step == 5
    assert target["n"] == 5
    with pytest.raises(bcp.CheckpointNotFoundError):
        bcp.load(tmp_path, state(), step=None)


def forge(path: Path, change: Any) -> None:
    """Changes the bytes of the manifest and gives them a checksum that fits."""
    manifest = path / "manifest.bcp"
    content = change(manifest.read_bytes()[:-8])
    manifest.write_bytes(content + struct.pack("<Q", xxhash.xxh3_64_intdigest(content)))


@READERS
@pytest.mark.parametrize("keep", [0, 1, 20, 40, -1, -9])
def test_a_manifest_that_was_cut_short(saved: Path, read: Any, keep: int) -> None:
    manifest = saved / "manifest.bcp"
    manifest.write_bytes(manifest.read_bytes()[:keep])
    with pytest.raises(bcp.CheckpointCorruptError, match=r"manifest\.bcp") as error:
        read(saved)
    assert error.value.kind == "bad_manifest"


@READERS
def test_a_manifest_with_a_flipped_bit(saved: Path, read: Any) -> None:
    manifest = saved / "manifest.bcp"
    content = bytearray(manifest.read_bytes())
    content[len(content) // 2] ^= 4
    manifest.write_bytes(content)
    with pytest.raises(bcp.CheckpointCorruptError, match="checksum") as error:
        read(saved)
    assert error.value.kind == "bad_manifest"


@READERS
def test_a_manifest_from_the_future(saved: Path, read: Any) -> None:
    forge(saved, lambda content: MAGIC + struct.pack("<H", 3) + content[len(MAGIC) + 2 :])
    with pytest.raises(bcp.CheckpointCorruptError, match=r"version 3\..*nothing is wrong with the checkpoint") as error:
        read(saved)
    assert error.value.kind == "unsupported_version"


def test_a_later_minor_version_is_read(saved: Path) -> None:
    forge(saved, lambda content: MAGIC + struct.pack("<HH", 1, 7) + content[len(MAGIC) + 4 :])
    target = state()
    bcp.load(saved, target)
    assert target["a"].all()


@READERS
@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "data/../../x"])
def test_a_manifest_that_points_out_of_its_folder(saved: Path, read: Any, name: str) -> None:
    manifest = decode_manifest((saved / "manifest.bcp").read_bytes())
    fields = {field: getattr(manifest, field) for field in manifest.__dataclass_fields__}
    fields["files"] = [file._replace(name=name) for file in manifest.files]
    (saved / "manifest.bcp").write_bytes(encode_manifest(type(manifest)(**fields)))
    with pytest.raises(bcp.UnsafeCheckpointError) as error:
        read(saved)
    assert error.value.kind == "path_escape"


@READERS
def test_a_missing_data_file(saved: Path, read: Any) -> None:
    (file,) = (saved / "data").iterdir()
    file.unlink()
    with pytest.raises(bcp.CheckpointNotFoundError, match=rf"misses 1 of 1.*{file.name}.*restore") as error:
        read(saved)
    assert error.value.kind == "missing_file"


@READERS
@pytest.mark.parametrize("change", [-1, -4000, 1, 4096])
def test_a_data_file_of_the_wrong_size(saved: Path, read: Any, change: int) -> None:
    (file,) = (saved / "data").iterdir()
    os.truncate(file, file.stat().st_size + change)
    with pytest.raises(bcp.CheckpointCorruptError, match=rf"{file.name} .*expected.*restore") as error:
        read(saved)
    assert error.value.kind == "truncated"


@READERS
def test_data_files_of_two_saves_that_were_swapped(tmp_path: Path, read: Any) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        bcp.save(tmp_path / name, state(value))
    (one,), (two,) = (tmp_path / "one/data").iterdir(), (tmp_path / "two/data").iterdir()
    shutil.copyfile(two, one)
    with pytest.raises(bcp.CheckpointCorruptError, match="damaged") as error:
        bcp.open(tmp_path / "one")["a"][...] if read is read_through_open else bcp.load(tmp_path / "one", state())
    assert error.value.kind == "checksum"


def test_saving_twice_to_one_path(saved: Path) -> None:
    files = sorted(saved.rglob("*"))
    with pytest.raises(bcp.CheckpointExistsError, match=r"left as it is.*overwrite=True") as error:
        bcp.save(saved, state(2.0))
    assert error.value.kind == "exists"
    assert sorted(saved.rglob("*")) == files
    target = state()
    bcp.load(saved, target)
    assert target["n"] == 1.0


def test_overwriting_replaces_the_checkpoint_and_removes_its_files(saved: Path) -> None:
    (old,) = (saved / "data").iterdir()
    bcp.save(saved, state(2.0), options=bcp.SaveOptions(overwrite=True))
    (new,) = (saved / "data").iterdir()
    assert new != old
    target = state()
    bcp.load(saved, target)
    assert target["n"] == 2.0
    assert (target["a"] == 2).all()


def test_an_overwrite_that_is_refused_leaves_the_old_checkpoint(saved: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError):
        bcp.save(saved, {"a": torch.ones(3), "bad": object()}, options=bcp.SaveOptions(overwrite=True))
    target = state()
    bcp.load(saved, target)
    assert target["n"] == 1.0


def test_overwriting_mends_a_checkpoint_that_cannot_be_read(saved: Path) -> None:
    (saved / "manifest.bcp").write_bytes(b"nonsense")
    bcp.save(saved, state(2.0), options=bcp.SaveOptions(overwrite=True))
    target = state()
    bcp.load(saved, target)
    assert target["n"] == 2.0


@pytest.mark.parametrize("step", [-1, True, 1.0, "7", torch.tensor(1.5), np.array([1, 2])], ids=repr)
def test_a_step_that_is_none(tmp_path: Path, step: Any) -> None:
    with pytest.raises((ValueError, bcp.CheckpointError), match="a step is"):
        bcp.save(tmp_path, state(), step=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["", ".", "..", "a/b", "a:b", "a\\b"])
def test_a_role_that_is_no_folder_name(tmp_path: Path, role: str) -> None:
    with pytest.raises((ValueError, bcp.CheckpointError), match="a role is the name of a folder"):
        bcp.save(tmp_path, state(), role=role)
    assert list(tmp_path.iterdir()) == []


def test_roles_are_checkpoints_side_by_side(tmp_path: Path) -> None:
    for role, value in (("actor", 1.0), ("critic", 2.0)):
        bcp.save(tmp_path, state(value), role=role, step=4)
    target = state()
    assert bcp.load(tmp_path, target, role="critic").step == 4
    assert target["n"] == 2.0
    with pytest.raises(bcp.CheckpointNotFoundError):
        bcp.load(tmp_path, target, role="judge")


@pytest.mark.parametrize("call", [bcp.save, bcp.load])
@pytest.mark.parametrize("framework", ["tensorflow", "", "FSDP"])
def test_a_framework_that_is_not_known(tmp_path: Path, call: Any, framework: str) -> None:
    bcp.save(tmp_path / "there", state())
    with pytest.raises(bcp.CheckpointMismatchError, match=r"auto.*fsdp2") as error:
        call(tmp_path / "there" if call is bcp.load else tmp_path / "new", state(), framework=framework)
    assert error.value.kind == "conflict"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [100, np.int64(100), torch.tensor(100)], ids=["int", "numpy", "tensor"])
def test_a_step_passed_without_its_name_is_told_as_such(tmp_path: Path, step: Any) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="pass step=100 by its name"):
        bcp.save(tmp_path, state(), step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [state(), np.ones(1000)], ids=["state", "array"])
@pytest.mark.parametrize("argument", ["framework", "step", "role", "to", "metadata"])
def test_a_message_does_not_show_all_of_a_wrong_argument(tmp_path: Path, argument: str, value: Any) -> None:
    with pytest.raises(bcp.CheckpointError) as error:
        bcp.save(tmp_path, state(), **{argument: value})
    assert error.value.kind in {"conflict", "unsupported_value"}
    assert len(str(error.value)) < 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad", [[1, 2], mlp(), torch.ones(1), None, "model"], ids=["list", "module", "tensor", "none", "str"]
)
@pytest.mark.parametrize("call", [bcp.save, bcp.load])
def test_a_state_that_is_no_dict(tmp_path: Path, call: Any, bad: Any) -> None:
    bcp.save(tmp_path / "there", state())
    with pytest.raises(bcp.CheckpointError, match="pass a dict") as error:
        call(tmp_path / "there" if call is bcp.load else tmp_path / "new", bad)
    assert error.value.kind == "unsupported_value"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("call", [bcp.save, bcp.load])
def test_the_state_passed_before_the_path_is_told_as_such(tmp_path: Path, call: Any) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match=r"path takes .* of type dict; .* path is the first") as error:
        call(state(), tmp_path)
    assert error.value.kind == "conflict"
    assert "tensor(" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_state_in_place_of_the_path_of_a_memory_save_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match="the save to a dict was to go to memory"):
        bcp.save(state(), tmp_path, to="memory")  # type: ignore[arg-type]


OF_PATH = (bcp.save, bcp.load, bcp.open, bcp.latest, bcp.steps, bcp.delete, bcp.load_tree, bcp.CheckpointManager)


@pytest.mark.parametrize("call", OF_PATH, ids=lambda call: call.__name__)
@pytest.mark.parametrize("path", [None, b"/tmp/bytes", 7], ids=repr)
def test_a_path_of_another_type_is_refused(call: Any, path: Any) -> None:
    arguments = (path, state()) if call in {bcp.save, bcp.load} else (path,)
    pattern = rf"path takes a str .* of type {type(path).__name__}; .*: pass a folder or a URL"
    with pytest.raises(bcp.CheckpointMismatchError, match=pattern):
        call(*arguments)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"timeout_s": 3.0}, "a value of type dict"),
        (bcp.LoadOptions(), "a value of type LoadOptions"),
        (bcp.SaveOptions, "the class SaveOptions"),
    ],
    ids=["dict", "load", "class"],
)
def test_options_of_another_type_are_refused(tmp_path: Path, options: Any, shown: str) -> None:
    for call in (
        lambda: bcp.save(tmp_path, state(), options=options),
        lambda: bcp.warm_up(state(), options=options),
        lambda: bcp.resume(tmp_path, state(), options=options),
        lambda: bcp.recover(tmp_path, options=options),
    ):
        with pytest.raises(TypeError, match=rf"^options takes SaveOptions, not {shown}; .*: pass bcp\.SaveOptions\("):
            call()
    assert list(tmp_path.iterdir()) == []
    for_saves: Any = bcp.SaveOptions()
    for other in (
        lambda: bcp.load(tmp_path, state(), options=for_saves),
        lambda: bcp.open(tmp_path, options=for_saves),
        lambda: bcp.load_tree(tmp_path, options=for_saves),
    ):
        with pytest.raises(TypeError, match=r"^options takes LoadOptions"):
            other()
    with pytest.raises(TypeError, match=r"^load_options takes LoadOptions"):
        bcp.resume(tmp_path, state(), options=for_saves, load_options=for_saves)


@pytest.mark.parametrize("bad", ["a state", 1.5], ids=repr)
def test_a_manager_refuses_what_is_no_state(tmp_path: Path, bad: Any) -> None:
    with bcp.CheckpointManager(tmp_path, save=bcp.save_policies.EverySteps(1)) as manager:
        for call in (
            partial(manager.save, 1, bad),
            partial(manager.restore, bad),
            partial(manager.log_data, 1, bad),
            partial(manager.restore_data, bad),
        ):
            with pytest.raises(bcp.CheckpointSaveError, match=r"the state is a .* and no dict") as error:
                call()
            assert error.value.kind == "unsupported_value"
        with pytest.raises(bcp.CheckpointSaveError, match="metadata cannot be written down"):
            manager.save(1, state(), metadata=bad)


@pytest.mark.parametrize(
    "metadata",
    [
        {1: 2},
        {"a": object()},
        {"a": 2**70},
        {"a": "\ud800"},
        [1],
        {"a": "x" * (1 << 22)},
        reduce(lambda inside, _: {"a": inside}, range(64), {}),
    ],
    ids=["key", "object", "int", "surrogate", "list", "long", "deep"],
)
def test_metadata_that_cannot_be_written_down(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=r"metadata.*nothing was written") as error:
        bcp.save(tmp_path, state(), metadata=metadata)
    assert error.value.kind == "unsupported_value"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key_map", [[("(", "x")], [("a", r"\9")]], ids=["pattern", "group"])
def test_a_key_map_that_is_no_pattern(saved: Path, key_map: Any) -> None:
    target = state()
    with pytest.raises(bcp.CheckpointMismatchError, match=r"key_map rule .* is not a pattern") as error:
        bcp.load(saved, target, key_map=key_map)
    assert error.value.kind == "conflict"
    assert target["n"] == 0.0


def test_a_checkpoint_that_was_copied_and_moved_still_loads(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    shutil.rmtree(saved)
    target = state()
    bcp.load(tmp_path / "copy", target)
    assert target["a"].all()


@pytest.mark.parametrize(
    "make", [str, Path, lambda path: f"file://{path}", lambda path: f"{path}/"], ids=["str", "path", "url", "slash"]
)
def test_every_way_to_write_a_path(tmp_path: Path, make: Any) -> None:
    bcp.save(make(tmp_path / "a b"), {"model": mlp(0)}, step=2)
    model = mlp(1)
    bcp.load(make(tmp_path / "a b"), {"model": model})
    assert same_module(model, mlp(0))
    assert (tmp_path / "a b" / "step_00000002" / "manifest.bcp").exists()


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bcp.save("run/one", state(1.0))
    assert (tmp_path / "run/one/manifest.bcp").exists()
    assert bcp.open("run/one")["a"][3] == 1.0


@pytest.mark.parametrize("name", ["model", "layers[0]"])
def test_the_glob_that_is_advised_for_the_name_of_an_entry_matches(tmp_path: Path, name: str) -> None:
    bcp.save(tmp_path, {name: {"a": torch.ones(3), "b": torch.ones(2)}})
    with pytest.raises(bcp.CheckpointMismatchError, match="matches them") as error:
        bcp.load_tree(tmp_path, include=name)
    (advised,) = re.findall(r": '(\S+)' matches them", str(error.value))
    assert set(bcp.load_tree(tmp_path, include=advised)[name]) == {"a", "b"}
