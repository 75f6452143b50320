"""The store of a checkpoint whose data files lie inside slots of this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.manifest import DataFile, Manifest
from bytecheckpoint.storage.layout import check_files
from bytecheckpoint.storage.memory_root.held_store import HeldStore, StoredAt
from bytecheckpoint.storage.memory_root.slot_file import FilePlace
from bytecheckpoint.storage.open_store import open_store
from bytecheckpoint.storage.store import one_block


def test_a_file_that_is_longer_than_allowed_is_refused_and_not_cut(tmp_path: Path) -> None:
    slot = tmp_path / "slot"
    slot.write_bytes(b"header" + b"content of a file")
    store = HeldStore({"data/0": FilePlace(str(slot), 6, 17)}, b"", shown="memory", elsewhere={})
    assert store.read_whole("data/0", max_bytes=17) == b"content of a file"
    with pytest.raises(bcp.UnsafeCheckpointError, match="has 17 bytes; it may have 16") as raised:
        store.read_whole("data/0", max_bytes=16)
    assert raised.value.kind == "limits_exceeded"


def test_all_files_that_memory_misses_are_named() -> None:
    store = HeldStore({}, b"", shown="memory", elsewhere={"data/1": 8})
    manifest = Manifest(save_id="x", files=[DataFile(f"data/{number}", 8) for number in range(3)])
    with pytest.raises(bcp.CheckpointNotFoundError, match=r"misses 2 of 3 data files: data/0, data/2"):
        check_files(store, "", manifest, range(3))


def test_files_at_a_store_without_lengths_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = open_store("memory://held-store", storage_options=None, writer_threads=1)
    for number in range(20):
        stored.write(f"step/data/{number}", one_block(bytes(8)), replace=True)
    listed: list[str] = []
    monkeypatch.setattr(type(stored), "list", listing(type(stored).list, listed))
    store = HeldStore({}, b"", shown="memory", elsewhere={}, stored=StoredAt(stored, "step"))
    check_files(store, "", Manifest(save_id="x", files=[DataFile(f"data/{n}", 8) for n in range(20)]), range(20))
    assert listed == ["step/data"]


def listing(list_folder: Any, listed: list[str]) -> Any:
    def list_and_note(store: Any, folder: str) -> Any:
        listed.append(folder)
        return list_folder(store, folder)

    return list_and_note
