"""Waiting costs nothing: a wait asks the store twice, whatever it lasts, and ends when its key is set."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from bytecheckpoint.distributed import waiting
from bytecheckpoint.distributed.key_value_ranks import GroupRanks
from bytecheckpoint.distributed.waiting import CallStore, WaitingClients

LATE_S = 1.0


def tcp_store(*, use_libuv: bool) -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)


@pytest.fixture(params=["libuv", "no libuv", "hash", "file", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "hash":
        return HashStore()
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), 2)
    if request.param == "prefix":
        return PrefixStore("a", PrefixStore("b", tcp_store(use_libuv=True)))
    return tcp_store(use_libuv=request.param == "libuv")


def test_a_wait_ends_when_the_key_is_set_and_holds_up_no_other_use_of_the_store(store: Any) -> None:
    call = CallStore(WaitingClients(store, 2), "call")
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(call.wait, "key", 60.0)
        time.sleep(0.3)
        store.set_timeout(timedelta(seconds=20))
        assert not call.is_set("other")  # would hang behind the wait
        assert not waited.done()
        call.store.set("key", b"")
        assert waited.result(60)


def test_a_wait_has_a_limit_and_its_connection_serves_the_next_one(store: Any) -> None:
    clients = WaitingClients(store, 2)
    call = CallStore(clients, "call")
    assert not call.wait("never", 0.2, is_own=True)
    assert not call.is_set("never")
    call.store.set("key", b"")
    assert call.wait("key", 20.0)


def test_an_abandoned_wait_that_ends_soon_is_over_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_TIMEOUT_LATER_S", 60.0)  # in which a busy machine ends the wait after its limit
    clients = WaitingClients(tcp_store(use_libuv=True), 2)
    soon, late = clients.begin("", "never", 0.3), clients.begin("", "nor this", 90.0)
    clients.await_ending()
    assert soon.done()
    assert not late.done()
    clients.store.set("nor this", b"")
    assert late.result(60)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what the ranks ask the store while they wait."""
    asked: Counter[str] = Counter()
    is_set, begin = CallStore.is_set, WaitingClients.begin

    def is_set_counted(self: CallStore, *keys: str) -> bool:
        asked["keys"] += len(keys)
        return is_set(self, *keys)

    def begin_counted(self: WaitingClients, *arguments: Any) -> Any:
        asked["waits"] += 1
        return begin(self, *arguments)

    monkeypatch.setattr(CallStore, "is_set", is_set_counted)
    monkeypatch.setattr(WaitingClients, "begin", begin_counted)
    return asked


@pytest.mark.parametrize("late_s", [0.3, 3.0])
@pytest.mark.parametrize("late_rank", [0, 1, 4])
def test_ranks_ask_the_store_no_more_the_longer_they_wait(
    late_s: float, late_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ranks = 7
    asked = counted(monkeypatch)
    clients = WaitingClients(tcp_store(use_libuv=True), num_ranks)

    def call(rank: int) -> None:
        ranks = GroupRanks(
            lambda: CallStore(clients), rank, range(num_ranks), 20.0, block_ranks=3, call="save", watch=None
        )
        if rank == late_rank:
            time.sleep(late_s)
        ranks.gather(b"")
        ranks.broadcast(b"")
        ranks.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(call, range(num_ranks)))
    # Waits: 3 leaders for their blocks, but for one without others, 6 ranks for the answer, the coordinator for all to
    # have left. Keys: one look before each of these, for failures and verdicts in blocks, and for lists of keys.
    assert asked["waits"] <= 9
    assert asked["keys"] <= 22


def test_a_store_that_cannot_block_is_polled_the_less_often_the_more_ranks_there_are(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    assert WaitingClients(store, 8).longest_poll_s == 0.02
    assert WaitingClients(store, 8192).longest_poll_s == pytest.approx(3.3, abs=0.1)


def test_a_wait_whose_connection_breaks_goes_on_through_the_store_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    clients = WaitingClients(store, 2)

    def broken(*_: Any) -> bool:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(clients, "_block", broken)
    threading.Timer(0.2, lambda: store.set("key", b"")).start()
    assert CallStore(clients).wait("key", 20.0)


def test_a_look_may_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.05)
    call = CallStore(WaitingClients(tcp_store(use_libuv=True), 2), "call")
    assert call.wait("key", 20.0, look=lambda: call.store.set("key", b""))


def test_a_wait_that_is_over_as_a_look_begins_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class JustOver(Future[bool]):
        """Is set between the moment when the caller stopped to wait for it, and that when it looks."""

        def result(self, timeout: float | None = None) -> bool:
            if not self.done():
                self.set_result(True)
                raise TimeoutError
            return super().result(timeout)

    clients = WaitingClients(HashStore(), 2)
    monkeypatch.setattr(clients, "begin", lambda *_: JustOver())
    assert CallStore(clients).wait("key", 20.0)
