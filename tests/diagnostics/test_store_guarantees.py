"""A store that breaks a promise is found out, and a probe leaves nothing behind."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from broken_stores import ForgetfulStore, GenerousStore, KeepingStore, ReplacingStore, TornStore
from faults.seams import files_under

from bytecheckpoint.diagnostics.store_guarantees import ProbeStore, check_guarantees
from bytecheckpoint.errors import CheckpointExistsError, StorageError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.backends.local_store import LocalStore

BROKEN = {
    ForgetfulStore: {"fresh_listing"},
    ReplacingStore: {"create_only", "create_race"},
    KeepingStore: {"replace"},
    TornStore: {"large_objects", "whole_or_nothing"},
    GenerousStore: {"exact_ranges"},
    LocalStore: set(),
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_promise_is_seen(tmp_path, kind) -> None:
    store = ProbeStore(kind(str(tmp_path), writer_threads=2), "probe")
    checks = list(check_guarantees(store))
    broken = {check.name for check in checks if not check.is_kept}
    assert broken >= BROKEN[kind]
    assert bool(broken) == bool(BROKEN[kind])
    store.clear()
    assert files_under(tmp_path) == []


def test_a_replace_that_is_ignored_is_called_one(tmp_path) -> None:
    store = ProbeStore(KeepingStore(str(tmp_path), writer_threads=1), "probe")
    (check,) = (check for check in check_guarantees(store) if check.name == "replace")
    assert (check.is_kept, check.what) == (False, "the old bytes are read after they were replaced")


def test_a_refused_name_whose_bytes_changed_is_told_as_such(tmp_path, monkeypatch) -> None:
    write = LocalStore.write

    def refuse_late(store: LocalStore, name: str, blocks, *, replace: bool) -> None:
        is_taken = (tmp_path / name).exists()
        write(store, name, blocks, replace=replace or is_taken)
        if is_taken and not replace:
            raise CheckpointExistsError("taken", kind="exists")

    monkeypatch.setattr(LocalStore, "write", refuse_late)
    store = ProbeStore(LocalStore(str(tmp_path), writer_threads=1), "probe")
    (check,) = (check for check in check_guarantees(store) if check.name == "create_only")
    assert (check.is_kept, check.what) == (False, "a name that is taken is refused, and yet its bytes are others now")


def test_clearing_goes_on_where_one_object_stays(tmp_path) -> None:
    store = ProbeStore(LocalStore(str(tmp_path), writer_threads=1), "probe")
    for name in "abc":
        store.write(name, [Block(0, 1, lambda: nullcontext(memoryview(b"x")))], replace=False)
    (tmp_path / "probe" / "b").unlink()
    (tmp_path / "probe" / "b").mkdir()
    with pytest.raises(StorageError):
        store.clear()
    assert files_under(tmp_path) == []
