from __future__ import annotations

import pytest

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.backends.local_store import LocalStore

from .faulty_store import Fault, FaultyStore
from .store_contract import StoreContract, blocks_of, get, put


class TestFaultyStoreThatNeverFails(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return FaultyStore(LocalStore(str(tmp_path), writer_threads=2))


@pytest.fixture
def real(tmp_path):
    return LocalStore(str(tmp_path), writer_threads=1)


@pytest.mark.parametrize(("fault", "written"), [(Fault.BEFORE, {}), (Fault.AFTER, {"x": 4}), (Fault.CUT, {})])
def test_a_write_fails_in_each_way(real, fault, written):
    entered = []
    blocks = blocks_of(b"abcd", block_bytes=1)
    blocks = [block._replace(content=lambda block=block: entered.append(block) or block.content()) for block in blocks]
    store = FaultyStore(real, fail_at=1, fault=fault)
    with pytest.raises(StorageError):
        store.write("x", blocks, replace=False)
    assert real.list("") == written
    assert len(entered) == {Fault.BEFORE: 0, Fault.AFTER: 4, Fault.CUT: 2}[fault]
    assert store.failed


def test_only_the_chosen_operation_fails(real):
    store = FaultyStore(real, fail_at=3, make_error=lambda: KeyError("mine"))
    put(store, "x", b"1")
    assert get(store, "x", 1) == b"1"
    with pytest.raises(KeyError):
        store.list("")
    store.delete("x")
    assert store.operations == ["write x", "read_into x", "list ", "delete x"]


def test_a_store_that_stays_broken(real):
    store = FaultyStore(real, fail_at=2, broken_from_then_on=True)
    put(store, "x", b"1")
    for _ in range(3):
        with pytest.raises(StorageError):
            store.delete("x")


def test_only_some_operations_count(real):
    store = FaultyStore(real, fail_at=1, counts=lambda operation, name: (operation, name) == ("write", "m"))
    put(store, "x", b"1")
    with pytest.raises(StorageError):
        put(store, "m", b"1")
    assert store.operations == ["write m"]
