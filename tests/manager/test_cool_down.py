from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from faults.seams import Seam, after, before, files_under
from manager.steps import read_steps
from manager.test_retention import Ending, Killed
from storage.s3_service import Refuse, always

import bytecheckpoint as bcp
from bytecheckpoint.manager import cool_down, step_records
from bytecheckpoint.manager.cool_down import copy_step
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto

FOLDER = layout.step_folder(7)


def state_of(value: float, *, rows: int = 1000) -> dict[str, object]:
    return {"w": torch.full((rows, 256), value), "b": torch.full((3,), value), "note": f"step of {value}"}


def saved(root: Path, value: float = 1.0, *, rows: int = 1000, step: int = 7) -> Store:
    bcp.save(root, state_of(value, rows=rows), step=step)
    store = opened(root)
    (info,) = (info for info in read_steps(store) if info.step == step)
    step_records.write_record(store, layout.step_folder(step), info)
    return store


def opened(root: object, options: dict[str, object] | None = None) -> Store:
    return open_store(str(root), storage_options=options, writer_threads=2)


def loaded(root: object, options: dict[str, object] | None = None) -> tuple[float, str]:
    """The value of a checkpoint that is whole, and its save id."""
    state = state_of(-1.0)
    report = bcp.load(str(root), state, storage_options=options)
    values = {float(value) for value in torch.cat([state["w"].flatten(), state["b"]]).unique()}  # type: ignore[attr-defined]
    (value,) = values
    assert state["note"] == f"step of {value}"
    assert report.step == 7
    return value, layout.committed_save_id(opened(root, options), FOLDER)


@pytest.fixture(params=["folder", "s3", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, object] | None]]:
    if request.param == "s3":
        s3, prefix = request.getfixturevalue("s3"), request.getfixturevalue("s3_prefix")
        yield f"s3://{s3.bucket}/{prefix}", s3.options
    elif request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}", None
    else:
        yield str(tmp_path / "target"), None


def test_a_copy_is_the_same_byte_for_byte_and_loads_from_either(tmp_path: Path, target) -> None:
    source, there = saved(tmp_path / "source"), opened(*target)
    step_records.report(source, FOLDER, {"loss": 0.5}, time=9e9)
    step_records.pin(source, FOLDER, time=1.0)
    step_records.lease(source, FOLDER, until=9e9)
    assert copy_step(source, FOLDER, there, FOLDER)
    assert loaded(*target) == loaded(tmp_path / "source")
    assert loaded(*target)[0] == 1.0
    for name in files_under(tmp_path / "source" / FOLDER):
        own = layout.read_whole(source, f"{FOLDER}/{name}", max_bytes=1 << 30)
        if name.startswith(("pin", "leases")):
            assert name.partition("/")[0] not in there.list(FOLDER)
        else:
            assert layout.read_whole(there, f"{FOLDER}/{name}", max_bytes=1 << 30) == own
    assert read_steps(there)[0].metrics == {"loss": 0.5}


def test_a_copy_that_is_there_is_not_written_again_and_gets_the_metrics_that_came_since(tmp_path: Path, target) -> None:
    source, there = saved(tmp_path / "source"), opened(*target)
    assert copy_step(source, FOLDER, there, FOLDER)
    with before(Seam(cool_down, "copy_file"), lambda: pytest.fail("it was copied again")):
        assert not copy_step(source, FOLDER, there, FOLDER)
    step_records.report(source, FOLDER, {"loss": 0.25}, time=9e9)
    assert not copy_step(source, FOLDER, there, FOLDER)
    assert read_steps(there)[0].metrics == {"loss": 0.25}


@pytest.mark.parametrize("does_it", [False, True])
def test_a_copy_that_is_killed_at_any_call_is_none_and_the_next_one_goes_on(tmp_path: Path, does_it: bool) -> None:
    source = saved(tmp_path / "source")
    for number in count(1):
        root = tmp_path / str(number)
        there = opened(root)
        try:
            copy_step(source, FOLDER, Ending(there, number, does_it=does_it), FOLDER)
        except Killed:
            pass
        else:
            break
        if bcp.steps(root):
            assert loaded(root)[0] == 1.0
        written: list[str] = []
        copied = list(there.list(f"{FOLDER}/data")) if (root / FOLDER).exists() else []
        with before(Seam(cool_down, "copy_file"), partial(written.append, "a file")):
            copy_step(source, FOLDER, there, FOLDER)
        assert len(written) + len(copied) == len(source.list(f"{FOLDER}/data"))
        assert loaded(root)[0] == 1.0
        assert not list(root.rglob("*.tmp*"))
    assert number > 3


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("position", [0.0, 0.5, 0.999])
def test_a_damaged_source_is_named_and_not_copied(tmp_path: Path, target, position: float) -> None:
    source, there = saved(tmp_path / "source"), opened(*target)
    (file,) = (tmp_path / "source" / FOLDER / "data").iterdir()
    _flip(file, int(position * file.stat().st_size))
    with pytest.raises(bcp.CheckpointCorruptError, match="was not copied") as caught:
        copy_step(source, FOLDER, there, FOLDER)
    assert caught.value.kind == "checksum"
    assert file.name in str(caught.value)
    assert bcp.steps(*target[:1], storage_options=target[1]) == []
    assert not there.list(f"{FOLDER}/data")


def test_a_source_that_misses_a_file_or_is_gone_is_not_copied(tmp_path: Path) -> None:
    source, there = saved(tmp_path / "source"), opened(tmp_path / "target")
    (file,) = (tmp_path / "source" / FOLDER / "data").iterdir()
    file.unlink()
    with pytest.raises(bcp.CheckpointNotFoundError) as caught:
        copy_step(source, FOLDER, there, FOLDER)
    assert caught.value.kind == "missing_file"
    (tmp_path / "source" / FOLDER / "manifest.bcp").unlink()
    with pytest.raises(bcp.CheckpointNotFoundError) as gone:
        copy_step(source, FOLDER, there, FOLDER)
    assert gone.value.kind == "not_committed"
    assert bcp.steps(tmp_path / "target") == []


def test_a_file_of_another_length_there_is_copied_again(tmp_path: Path) -> None:
    source, there = saved(tmp_path / "source"), opened(tmp_path / "target")
    (name,) = source.list(f"{FOLDER}/data")
    (tmp_path / "target" / FOLDER / "data").mkdir(parents=True)
    (tmp_path / "target" / FOLDER / "data" / name).write_bytes(b"cut off")
    assert copy_step(source, FOLDER, there, FOLDER)
    assert loaded(tmp_path / "target")[0] == 1.0


def test_a_target_that_loses_a_file_is_not_committed(tmp_path: Path) -> None:
    source, there = saved(tmp_path / "source"), opened(tmp_path / "target")

    def lose() -> None:
        for path in (tmp_path / "target" / FOLDER / "data").iterdir():
            path.unlink()

    with after(Seam(cool_down, "copy_file"), lose), pytest.raises(bcp.CheckpointSaveError, match="is not there"):
        copy_step(source, FOLDER, there, FOLDER)
    assert bcp.steps(tmp_path / "target") == []


def test_another_checkpoint_there_is_replaced_only_if_it_may_be(tmp_path: Path) -> None:
    source, other = saved(tmp_path / "source", 2.0), saved(tmp_path / "target", 1.0)
    save_id = layout.committed_save_id(other, FOLDER)
    with pytest.raises(bcp.CheckpointExistsError, match=save_id):
        copy_step(source, FOLDER, other, FOLDER)
    assert loaded(tmp_path / "target")[0] == 1.0
    assert copy_step(source, FOLDER, other, FOLDER, may_replace=[save_id])
    assert loaded(tmp_path / "target") == loaded(tmp_path / "source")
    assert sorted(files_under(tmp_path / "target")) == sorted(files_under(tmp_path / "source"))


def test_a_step_is_not_copied_below_a_checkpoint(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    bcp.save(tmp_path / "target", state_of(1.0))
    with pytest.raises(bcp.CheckpointExistsError):
        copy_step(source, FOLDER, opened(tmp_path / "target"), FOLDER)


def test_a_link_is_not_copied(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    manifest = layout.read_manifest(source, FOLDER)
    link = manifest.__class__(save_id=manifest.save_id, step=7, linked_to=str(tmp_path), files=manifest.files)
    with pytest.raises(bcp.CheckpointSaveError, match="bcp convert"):
        cool_down._refuse_unchecked(link, "somewhere")


def test_memory_is_a_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the checkpoint is: here 80 MB."""
    pools: list[tuple[int, int]] = []

    class Watched(BufferPool):
        def __init__(self, block_bytes: int, num_blocks: int) -> None:
            pools.append((block_bytes, num_blocks))
            super().__init__(block_bytes, num_blocks)

    monkeypatch.setattr(cool_down, "BufferPool", Watched)
    source, there = saved(tmp_path / "source", rows=80_000), opened(tmp_path / "target")
    assert copy_step(source, FOLDER, there, FOLDER)
    assert pools == [(16 << 20, 4)]


@pytest.mark.parametrize("code", ["AccessDenied", "NoSuchBucket"])
def test_a_target_that_refuses_is_an_error_and_the_next_attempt_goes_on(tmp_path: Path, s3, s3_prefix, code) -> None:
    if s3.faults is None:
        pytest.skip("a real service refuses nothing on demand")
    source, there = saved(tmp_path / "source"), s3.store(s3_prefix)
    s3.faults.choose = always("PUT .*manifest", Refuse(403, code))
    with pytest.raises(bcp.StorageError):
        copy_step(source, FOLDER, there, FOLDER)
    s3.faults.reset()
    with before(Seam(cool_down, "copy_file"), lambda: pytest.fail("it was copied again")):
        assert copy_step(source, FOLDER, there, FOLDER)
    assert loaded(f"s3://{s3.bucket}/{s3_prefix}", s3.options)[0] == 1.0
