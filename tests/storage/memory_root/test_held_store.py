"""The store of a checkpoint whose data files lie inside slots of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.storage.memory_root.held_store import HeldStore
from bytecheckpoint.storage.memory_root.slot_file import FilePlace


def test_a_file_that_is_longer_than_allowed_is_refused_and_not_cut(tmp_path: Path) -> None:
    slot = tmp_path / "slot"
    slot.write_bytes(b"header" + b"content of a file")
    store = HeldStore({"data/0": FilePlace(str(slot), 6, 17)}, b"", shown="memory", elsewhere={})
    assert store.read_whole("data/0", max_bytes=17) == b"content of a file"
    with pytest.raises(bcp.UnsafeCheckpointError, match="has 17 bytes; it may have 16") as raised:
        store.read_whole("data/0", max_bytes=16)
    assert raised.value.kind == "limits_exceeded"
