"""What a save that finds its place occupied, or cannot look at it, says of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.storage import inventory
from bytecheckpoint.storage.backends.posix_errors import missing_file
from bytecheckpoint.storage.open_store import open_store


def test_a_listing_that_finds_nothing_is_not_told_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path), storage_options=None, writer_threads=1)

    def no_such_place(_: str) -> None:
        raise missing_file("s3://bucket/run")

    monkeypatch.setattr(store, "list", no_such_place)
    with pytest.raises(CheckpointNotFoundError) as error:
        inventory.refuse_occupied(store, "", overwrite=False)
    assert error.value.kind == "missing_file"
