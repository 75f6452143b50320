"""What a save that finds its place occupied, or cannot look at it, says of that."""

from __future__ import annotations

from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.errors import CheckpointNotFoundError, CheckpointSaveError
from bytecheckpoint.storage import inventory
from bytecheckpoint.storage.backends.posix_errors import missing_file
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import one_block


def test_a_listing_that_finds_nothing_is_not_told_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path), storage_options=None, writer_threads=1)

    def no_such_place(_: str) -> None:
        raise missing_file("s3://bucket/run")

    monkeypatch.setattr(store, "list", no_such_place)
    with pytest.raises(CheckpointNotFoundError) as error:
        inventory.refuse_occupied(store, "", overwrite=False)
    assert error.value.kind == "missing_file"


@pytest.mark.parametrize("kind", ["folder", "memory"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_named_as_a_step_is_told_before_anything_is_written(tmp_path: Path, kind: str, overwrite: bool) -> None:
    root = str(tmp_path) if kind == "folder" else f"memory://files-{tmp_path.name}-{overwrite}"
    store = open_store(root, storage_options=None, writer_threads=1)
    store.write("step_00000005", one_block(b"notes"), replace=False)
    with pytest.raises(CheckpointSaveError, match="step_00000005 is a file, where a folder is needed") as e:
        bcp.save(root, {"x": 1}, step=5, options=bcp.SaveOptions(overwrite=overwrite))
    assert e.value.kind == "storage"
    assert store.list("") == {"step_00000005": 5}
    bcp.save(root, {"x": 1}, step=6)
    assert bcp.steps(root) == [6]
