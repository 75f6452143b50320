"""How ranks agree, with threads for ranks and a store in memory; and what happens when the store itself is gone."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from bytecheckpoint.adapters.expectation import EntryContents
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.distributed import attendance
from bytecheckpoint.distributed import departures as departures_module
from bytecheckpoint.distributed import key_value_ranks as key_value_ranks_module
from bytecheckpoint.distributed.attendance import Attendance
from bytecheckpoint.distributed.blocks import RankBlocks
from bytecheckpoint.distributed.departures import Departures
from bytecheckpoint.distributed.failures import decode_failure, encode_failure, merge_errors
from bytecheckpoint.distributed.key_value_ranks import GroupRanks
from bytecheckpoint.distributed.ranks import Ranks, SoleRank, Subject, join_ranks, together
from bytecheckpoint.distributed.waiting import CallStore, WaitingClients
from bytecheckpoint.errors import (
    ERROR_CLASSES,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
)
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.region import Region
from bytecheckpoint.saving.global_plan import AgreedPlan, exchange_plans, make_local_plan
from bytecheckpoint.saving.plans.rank_plan import PlanCache
from distributed.workers import WorkerDied, WorkerPool

ABOUT = Subject("/ckpt", 7, is_save=True)
NAMES = (4, 5, 9)
"""Global ranks of a group that is not the first."""


def call_store(store: Any) -> CallStore:
    return CallStore(WaitingClients(store, 2))


def on_all(
    function: Callable[[Ranks], Any], timeout_s: float = 20.0, has_called: Callable[[int], bool] | None = None
) -> list[Any]:
    """What the function returns or raises on each of three ranks."""
    store = HashStore()
    ranks = [
        GroupRanks(
            lambda: call_store(store),
            rank,
            NAMES,
            timeout_s,
            block_ranks=64,
            call="save",
            watch=None,
            has_called=has_called,
        )
        for rank in range(len(NAMES))
    ]

    def run(of_rank: Ranks) -> Any:
        try:
            return function(of_rank)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(len(NAMES)) as pool:
        return list(pool.map(run, ranks))


def in_blocks(function: Callable[[Ranks], Any], num_ranks: int, timeout_s: float = 20.0) -> list[Any]:
    """The same on more ranks, in blocks of two or three; None from those whose function is None."""
    store = HashStore()
    ranks = [
        GroupRanks(
            lambda: call_store(store),
            rank,
            range(10, 10 + num_ranks),
            timeout_s,
            block_ranks=3,
            call="save",
            watch=None,
        )
        for rank in range(num_ranks)
    ]

    def run(of_rank: Ranks) -> Any:
        try:
            return function(of_rank)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, ranks))


@pytest.mark.parametrize("num_ranks", [4, 6, 7, 8])
def test_blocks_of_ranks_hear_and_say_the_same(num_ranks: int) -> None:
    def exchange(ranks: Ranks) -> Any:
        gathered = [ranks.gather(b"%d-%d" % (ranks.rank, number)) for number in range(3)]
        own = ranks.scatter([b"for %d" % rank for rank in range(ranks.num_ranks)] if ranks.rank == 0 else [])
        told = ranks.broadcast(b"all")
        again = ranks.gather(own)
        ranks.close()
        return gathered, own, told, again

    (gathered, _, _, again), *others = results = in_blocks(exchange, num_ranks)
    assert gathered == [[b"%d-%d" % (rank, number) for rank in range(num_ranks)] for number in range(3)]
    assert again == [b"for %d" % rank for rank in range(num_ranks)]
    assert [result[1] for result in results] == again
    assert {result[2] for result in results} == {b"all"}
    assert all(result[0] == [[]] * 3 and result[3] == [] for result in others)


class CountedStore:
    """One rank's way to a store, which notes under which keys it reads and writes messages."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.read: list[str] = []
        self.written: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, message: bytes) -> None:
        self.written.append(key)
        self._store.set(key, message)

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.read += keys
        return self._store.multi_get(keys)


def shards_of(rank: int) -> list[LocalShard]:
    """A row of what all hold, and on every other rank a tensor of its own: so that no rank is told what another is."""
    row = LocalShard("t", "float32", (6, 4), Region((rank, 0), (1, 4)), torch.zeros(1, 4))
    own = LocalShard(f"own{rank}", "float32", (4,), Region((0,), (4,)), torch.zeros(4))
    return [row, own][: 1 + rank % 2]


def test_for_a_plan_in_blocks_no_rank_reads_a_message_of_every_other() -> None:
    shared = HashStore()
    stores = [CountedStore(shared) for _ in range(6)]

    def plan(rank: int) -> AgreedPlan:
        ranks = GroupRanks(
            lambda: call_store(stores[rank]), rank, range(6), 20.0, block_ranks=2, call="save", watch=None
        )
        contents = [EntryContents(shards_of(rank), set())]
        return exchange_plans(ranks, make_local_plan(ranks, "/ckpt", contents, SaveOptions(), plans=PlanCache()))

    with ThreadPoolExecutor(6) as pool:
        agreed = list(pool.map(plan, range(6)))
    assert [sum(len(file.chunks) for file in of_rank.rank_plan.files) for of_rank in agreed] == [1, 2] * 3
    assert stores[0].read == ["up/0/1", "up/0/block-2", "up/0/block-4"]
    assert [len(store.read) for store in stores] == [3, 2] * 3
    # Up, a leader shows that it is there and sends what its block says; down, there is a message a block and a word.
    written = [[key for key in store.written if "bell" not in key] for store in stores]
    assert [len(keys) for keys in written] == [4, 1, 2, 1, 2, 1]
    assert sorted(key for store in stores for key in store.written if "bell" in key) == [
        f"up/0/bell-{reader}" for reader in (0, 2, 4)
    ]


def test_nothing_of_a_call_in_blocks_stays_in_the_store() -> None:
    store = HashStore()
    ranks = [
        GroupRanks(lambda: call_store(store), rank, range(7), 20.0, block_ranks=3, call="save", watch=None)
        for rank in range(7)
    ]

    def call(of_rank: Ranks) -> None:
        of_rank.gather(b"x")
        of_rank.scatter([b"y"] * 7)
        of_rank.close()

    with ThreadPoolExecutor(7) as pool:
        list(pool.map(call, ranks))
    assert store.num_keys() == 0


@pytest.mark.parametrize("failing_rank", range(7))
@pytest.mark.parametrize("num_said_before", [0, 2])
def test_nothing_of_a_call_that_fails_in_blocks_stays_in_the_store(failing_rank: int, num_said_before: int) -> None:
    store = HashStore()
    ranks = [
        GroupRanks(lambda: call_store(store), rank, range(7), 20.0, block_ranks=3, call="save", watch=None)
        for rank in range(7)
    ]

    def call(of_rank: Ranks) -> None:
        with suppress(CheckpointSaveError), together(of_rank, "trying", about=ABOUT):
            for _ in range(num_said_before):
                of_rank.gather(bytes(2000))
                of_rank.scatter([b"%d" % rank for rank in range(7)])
            if of_rank.rank == failing_rank:
                raise KeyError("x")
            of_rank.gather(b"x")
            of_rank.broadcast(b"y")
            pytest.fail("one rank has failed, and another one goes on")

    with ThreadPoolExecutor(7) as pool:
        list(pool.map(call, ranks))
    assert store.num_keys() == 0


@pytest.mark.parametrize("missing", [1, 3, 4, 6])
def test_a_rank_of_a_block_that_does_not_come_is_named(missing: int) -> None:
    others = threading.Barrier(6)

    def phases(ranks: Ranks) -> Any:
        if ranks.rank == missing:
            return None
        others.wait(60)
        with together(ranks, "trying", about=ABOUT):
            ranks.gather(b"")
            ranks.broadcast(b"")
        return "fine"

    errors = [error for error in in_blocks(phases, 7, timeout_s=1.0) if error is not None]
    assert len(errors) == 6
    assert {(error.kind, error.ranks) for error in errors} == {("rank_missing", (10 + missing,))}


@pytest.mark.parametrize("failing_rank", range(7))
def test_a_rank_of_a_block_that_fails_fails_all(failing_rank: int) -> None:
    errors = in_blocks(failing(failing_rank, KeyError("x")), 7)
    assert {(type(error), error.kind, error.ranks) for error in errors} == {
        (CheckpointSaveError, "rank_failed", (10 + failing_rank,))
    }


def test_messages_arrive_in_order() -> None:
    def exchange(ranks: Ranks) -> Any:
        gathered = [ranks.gather(b"%d-%d" % (ranks.rank, number)) for number in range(3)]
        told = [ranks.broadcast(b"all%d" % number) for number in range(2)]
        own = ranks.scatter([b"\x00", b"", b"\xff+-"] if ranks.rank == 0 else [])
        ranks.close()
        return gathered, told, own

    (gathered, *_), *others = results = on_all(exchange)
    assert gathered == [[b"0-%d" % number, b"1-%d" % number, b"2-%d" % number] for number in range(3)]
    assert [result[0] for result in others] == [[[]] * 3] * 2
    assert [result[1] for result in results] == [[b"all0", b"all1"]] * 3
    assert [result[2] for result in results] == [b"\x00", b"", b"\xff+-"]


def failing(failing_rank: int, error: Exception) -> Callable[[Ranks], Any]:
    def phases(ranks: Ranks) -> Any:
        with together(ranks, "trying", about=ABOUT):
            if ranks.rank == failing_rank:
                raise error
            ranks.gather(b"")
        with together(ranks, "trying on", about=ABOUT):
            ranks.gather(b"")
            ranks.broadcast(b"")
        return "fine"

    return phases


@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_a_phase_that_fails_on_one_rank_fails_on_all_with_its_global_rank(failing_rank: int) -> None:
    errors = on_all(failing(failing_rank, KeyError("x")))
    name = NAMES[failing_rank]
    assert {type(error) for error in errors} == {CheckpointSaveError}
    assert {(error.kind, error.ranks, error.path, error.step) for error in errors} == {
        ("rank_failed", (name,), "/ckpt", 7)
    }
    assert {str(error) for error in errors} == {f"trying failed on rank {name} ({socket.gethostname()}): KeyError: 'x'"}


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_error_of_ours_keeps_class_kind_and_path(failing_rank: int) -> None:
    error = CheckpointCorruptError("bad bytes", kind="checksum", path="/file", step=3)
    errors = on_all(failing(failing_rank, error))
    assert {type(error) for error in errors} == {CheckpointCorruptError}
    assert {(error.kind, error.ranks, error.path, error.step) for error in errors} == {
        ("checksum", (NAMES[failing_rank],), "/file", 3)
    }


def test_the_error_is_chained_to_its_cause_where_it_happened() -> None:
    errors = on_all(failing(1, KeyError("x")))
    assert isinstance(errors[1].__cause__, KeyError)


def test_what_the_coordinator_finds_by_comparing_blames_nobody() -> None:
    errors = on_all(failing(0, CheckpointMismatchError("they differ", kind="conflict")))
    assert {(error.kind, error.ranks, str(error)) for error in errors} == {("conflict", (), "they differ")}


def test_what_another_rank_finds_by_itself_is_its_own() -> None:
    errors = on_all(failing(2, CheckpointMismatchError("odd local tensor", kind="conflict")))
    assert {(error.kind, error.ranks) for error in errors} == {("conflict", (9,))}
    assert all("rank 9" in str(error) for error in errors)


def test_a_rank_that_never_comes_is_named_by_its_global_rank() -> None:
    others = threading.Barrier(2)

    def one_stays_away(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            return None
        others.wait(60)
        with together(ranks, "waiting", about=ABOUT):
            ranks.gather(b"")
            ranks.broadcast(b"")
        return "fine"

    first, _, third = on_all(one_stays_away, timeout_s=1.0)
    assert (str(first), first.kind, first.ranks) == (str(third), third.kind, third.ranks)
    assert (type(first), first.kind, first.ranks) == (CheckpointSaveError, "rank_missing", (5,))


def late_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "did not make this call" in record.getMessage()]


@pytest.mark.parametrize(("late", "name"), [(0, 4), (1, 5), (2, 9)])
def test_a_rank_that_is_late_is_named_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late: int, name: int
) -> None:
    monkeypatch.setattr(attendance, "LATE_S", 0.1)

    def one_is_late(ranks: Ranks) -> Any:
        if ranks.rank == late:
            deadline = time.monotonic() + 60
            while not late_warnings(caplog) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.6)  # the others look twice more
        ranks.gather(b"")
        return ranks.broadcast(b"fine")

    with caplog.at_level("WARNING", logger="bytecheckpoint"):
        assert on_all(one_is_late, 100.0, lambda rank: rank != late) == [b"fine"] * 3
    (text,) = late_warnings(caplog)
    assert text.startswith(f"save waits for rank {name}, which did not make this call")
    assert "100 s" in text


def test_a_rank_that_has_made_the_call_and_takes_long_is_not_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attendance, "LATE_S", 0.1)
    asked: set[int] = set()

    def has_called(rank: int) -> bool:
        asked.add(rank)
        return True

    def one_prepares(ranks: Ranks) -> Any:
        if ranks.rank == 1:
            deadline = time.monotonic() + 60
            while 1 not in asked and time.monotonic() < deadline:
                time.sleep(0.01)
        ranks.gather(b"")
        return ranks.broadcast(b"fine")

    with caplog.at_level("WARNING", logger="bytecheckpoint"):
        assert on_all(one_prepares, 100.0, has_called) == [b"fine"] * 3
    assert 1 in asked
    assert late_warnings(caplog) == []


def test_the_time_of_a_late_rank_counts_from_the_begin_of_the_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [100.0]
    monkeypatch.setattr(attendance, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    waiting = Attendance(
        RankBlocks(0, 3, 64), NAMES, 600.0, None, call="save", has_called=lambda _: False, put=lambda *_: None
    )
    with caplog.at_level("WARNING", logger="bytecheckpoint"):
        for clock[0] in (200.0, 229.0):  # before, an earlier save was under way
            assert not waiting.look_for_senders(call_store(HashStore()), 0)
        assert late_warnings(caplog) == []
        for clock[0] in (231.0, 300.0):
            waiting.look_for_senders(call_store(HashStore()), 0)
    (text,) = late_warnings(caplog)
    assert "ranks [5, 9]" in text


def test_a_coordinator_that_never_comes_is_named() -> None:
    def coordinator_stays_away(ranks: Ranks) -> Any:
        if ranks.rank == 0:
            return None
        with together(ranks, "waiting", about=ABOUT):
            ranks.gather(b"")
            ranks.broadcast(b"")
        return "fine"

    _, second, third = on_all(coordinator_stays_away, timeout_s=0.3)
    assert {(error.kind, error.ranks) for error in (second, third)} == {("rank_missing", (4,))}


def test_a_sole_rank_needs_nobody() -> None:
    ranks = join_ranks(None, 1.0, about=ABOUT)
    assert isinstance(ranks, SoleRank)
    assert (ranks.gather(b"x"), ranks.broadcast(b"y"), ranks.scatter([b"z"])) == ([b"x"], b"y", b"z")
    with pytest.raises(CheckpointSaveError, match=r"\Atrying failed: KeyError: 'x'\Z") as raised:
        failing(0, KeyError("x"))(ranks)
    assert raised.value.ranks == (0,)


def lose_the_store(rank: int, world_size: int, folder: Path, end: signal.Signals) -> tuple[str, tuple[int, ...], str]:
    """Rank 0 holds the store, and is killed or stopped once rank 1 waits for it, which wakes it in the end."""
    told = folder / "port"
    if rank == 0:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        server.set("pid", str(os.getpid()))
        (folder / "to be told").write_text(str(server.port))
        (folder / "to be told").rename(told)
        server.get("is up")
        time.sleep(0.2)
        os.kill(os.getpid(), end)
        return "", (), ""
    while not told.exists():
        time.sleep(0.01)
    store = TCPStore("127.0.0.1", int(told.read_text()), is_master=False)
    pid = int(store.get("pid"))
    ranks = GroupRanks(
        lambda: call_store(PrefixStore("x", store)), 1, (0, 1), timeout_s=1.0, block_ranks=64, call="save", watch=None
    )
    store.set("is up", "yes")
    time.sleep(0.4)
    try:
        with together(ranks, "waiting", about=ABOUT):
            ranks.gather(b"")
            ranks.broadcast(b"")
    except CheckpointSaveError as error:
        return error.kind, error.ranks, str(error)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return "", (), ""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_gone_or_silent_is_an_error_and_no_hang(
    workers: WorkerPool, tmp_path: Path, end: signal.Signals
) -> None:
    outcomes = workers.run_each(lose_the_store, tmp_path, end, world_size=2, process_group=False)
    assert isinstance(outcomes[0].error, WorkerDied) == (end == signal.SIGKILL)
    assert outcomes[1].error is None, outcomes[1].error
    kind, ranks, message = outcomes[1].value
    assert (kind, ranks) == ("rank_missing", (0,))
    assert "store" in message


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("late", [(1,), (2, 6), (3,)])
def test_nothing_of_a_call_stays_in_the_store_if_a_rank_leaves_late(
    late: tuple[int, ...], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value_ranks_module, "_CLOSE_S", 0.3)
    store = HashStore()
    ranks = [
        GroupRanks(lambda: call_store(store), rank, range(7), 20.0, block_ranks=3, call="save", watch=None)
        for rank in range(7)
    ]
    leave = GroupRanks._leave

    def leave_late(self: GroupRanks, *arguments: Any, **options: Any) -> None:
        if self.rank in late:
            time.sleep(1.0 + self.rank / 10)
        leave(self, *arguments, **options)

    monkeypatch.setattr(GroupRanks, "_leave", leave_late)

    def call(of_rank: Ranks) -> None:
        with suppress(CheckpointSaveError), together(of_rank, "trying", about=ABOUT):
            of_rank.gather(bytes(2000))
            of_rank.scatter([b"%d" % rank for rank in range(7)])
            if fails and of_rank.rank == 5:
                raise KeyError("x")
            of_rank.gather(b"x")
            of_rank.broadcast(b"y")
            of_rank.close()

    with ThreadPoolExecutor(7) as pool:
        list(pool.map(call, ranks))
    assert store.num_keys() == 0


@pytest.mark.parametrize("failing", [1, 5])
@pytest.mark.parametrize("block_ranks", [3, 64])
def test_a_rank_that_fails_after_the_last_message_does_not_wait_for_a_verdict(
    monkeypatch: pytest.MonkeyPatch, block_ranks: int, failing: int
) -> None:
    """The others have left the call: it waited until its timeout, and its caller with it."""
    monkeypatch.setattr(key_value_ranks_module, "_CLOSE_S", 0.5)
    store = HashStore()
    ranks = [
        GroupRanks(lambda: call_store(store), rank, range(7), 60.0, block_ranks=block_ranks, call="save", watch=None)
        for rank in range(7)
    ]

    def call(of_rank: Ranks) -> None:
        with together(of_rank, "trying", about=ABOUT):
            of_rank.barrier()
            if of_rank.rank == failing:
                raise KeyError("x")
        of_rank.close()

    started = time.monotonic()
    with ThreadPoolExecutor(7) as pool:
        errors = [each.exception() for each in [pool.submit(call, of_rank) for of_rank in ranks]]
    assert time.monotonic() - started < 30
    assert [rank for rank, error in enumerate(errors) if error is not None] == [failing]
    assert "KeyError" in str(errors[failing])
    assert store.num_keys() == 0


@pytest.mark.parametrize("counter", [departures_module.NUM_FAILURES, departures_module._NUM_LISTS])
def test_a_rank_that_dies_before_it_puts_what_it_has_counted_holds_up_no_end(counter: str) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    departures = Departures(call_store(store), 3, 64)
    store.add(counter, 1)
    departures.leave(1)
    departures.leave(2)
    departures.end([], 5.0, missing=(), has_failed=True)
    assert store.num_keys() == 0


def test_ranks_that_make_different_calls_are_refused_by_name() -> None:
    store = HashStore()
    calls = ["save", "save", "load"]
    ranks = [
        GroupRanks(lambda: call_store(store), rank, NAMES, 20.0, block_ranks=64, call=call, watch=None)
        for rank, call in enumerate(calls)
    ]

    def run(of_rank: Ranks) -> CheckpointError:
        with pytest.raises(CheckpointMismatchError) as raised, together(of_rank, "trying", about=ABOUT):
            of_rank.reduce_scatter(b"x", lambda payloads: payloads)
        return raised.value

    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(run, ranks))
    assert {error.kind for error in errors} == {"conflict"}
    assert all("rank 9 called load while rank 4 called save" in str(error) for error in errors)


@pytest.mark.parametrize(("listener", "late"), [(1, 0), (3, 3), (4, 0), (6, 6)])
@pytest.mark.parametrize("block_ranks", [3, 64])
def test_a_rank_that_waits_in_another_call_than_the_coordinator_is_named_at_once(
    listener: int, late: int, block_ranks: int
) -> None:
    store = HashStore()
    calls = ["report" if rank == listener else "save" for rank in range(7)]
    ranks = [
        GroupRanks(lambda: call_store(store), rank, range(10, 17), 60.0, block_ranks=block_ranks, call=call, watch=None)
        for rank, call in enumerate(calls)
    ]

    def run(of_rank: Ranks) -> CheckpointError:
        time.sleep(0.6 if of_rank.rank == late else 0.0)
        exchange = partial(of_rank.broadcast, b"") if of_rank.rank == listener else of_rank.barrier
        with pytest.raises(CheckpointMismatchError) as raised, together(of_rank, "trying", about=ABOUT):
            exchange()
        return raised.value

    started = time.monotonic()
    with ThreadPoolExecutor(7) as pool:
        errors = list(pool.map(run, ranks))
    assert time.monotonic() - started < 20
    assert {(error.kind, error.ranks) for error in errors} == {("conflict", (10 + listener,))}
    assert all(f"rank {10 + listener} called report while rank 10 called save" in str(error) for error in errors)
    assert store.num_keys() == 0


def test_a_rank_that_waits_for_a_slow_coordinator_is_in_the_same_call() -> None:
    store = HashStore()
    ranks = [
        GroupRanks(lambda: call_store(store), rank, NAMES, 20.0, block_ranks=64, call="load", watch=None)
        for rank in range(3)
    ]

    def run(of_rank: Ranks) -> list[bytes]:
        if of_rank.rank == 0:
            time.sleep(0.6)
        of_rank.broadcast(b"x")
        if of_rank.rank == 1:
            time.sleep(0.6)
        gathered = of_rank.gather(b"y")
        of_rank.barrier()
        of_rank.close()
        return gathered

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, ranks)) == [[b"y"] * 3, [], []]
    assert store.num_keys() == 0


def test_a_rank_that_gets_the_answer_to_another_call_says_which_calls_were_made() -> None:
    store = HashStore()
    coordinator, other = (
        GroupRanks(lambda: call_store(store), rank, NAMES[:2], 20.0, block_ranks=64, call=call, watch=None)
        for rank, call in enumerate(["CheckpointManager", "save"])
    )
    coordinator.broadcast(b"not of a save")
    started = time.monotonic()
    with pytest.raises(CheckpointMismatchError) as raised, together(other, "trying", about=ABOUT):
        other.reduce_scatter(b"x", lambda payloads: payloads)
    assert time.monotonic() - started < 10
    assert "rank 5 called save while rank 4 called CheckpointManager; this rank did nothing" in str(raised.value)
    assert raised.value.ranks == (5,)
    coordinator.close()
    assert store.num_keys() == 0


def test_a_rank_that_failed_before_it_gets_the_answer_to_another_call_keeps_its_error_and_leaves() -> None:
    store = HashStore()
    coordinator, other = (
        GroupRanks(lambda: call_store(store), rank, NAMES[:2], 20.0, block_ranks=64, call=call, watch=None)
        for rank, call in enumerate(["CheckpointManager", "save"])
    )
    coordinator.broadcast(b"not of a save")
    with pytest.raises(CheckpointError, match="cannot plan"), together(other, "trying", about=ABOUT):
        raise ValueError("cannot plan")
    started = time.monotonic()
    coordinator.close()
    assert time.monotonic() - started < 5
    assert store.num_keys() == 0


def test_of_ranks_that_fail_the_one_that_says_what_failed_counts() -> None:
    """The others may only have missed it: a connection that ends says less than the error of the rank behind it."""
    lost = CheckpointError("rank 1 is gone", kind="rank_missing", ranks=(1,))
    damaged = CheckpointCorruptError("file x is damaged", kind="checksum", path="x", ranks=(1,))
    for errors in ([lost, damaged], [damaged, lost]):
        merged = merge_errors(errors)
        assert (type(merged), merged.kind, merged.path, merged.ranks) == (CheckpointCorruptError, "checksum", "x", (1,))
        assert merged.message == damaged.message
    assert merge_errors([lost]).kind == "rank_missing"


def test_all_ranks_that_fail_are_named_with_the_error_of_the_first() -> None:
    errors = [CheckpointSaveError(f"disk {rank} is full", kind="no_space", ranks=(rank,)) for rank in (3, 1)]
    merged = merge_errors(errors)
    assert (merged.kind, merged.ranks) == ("no_space", (1, 3))
    assert merged.message.startswith("disk 3 is full (2 ranks failed: [1, 3]")


@pytest.mark.parametrize("cls", ERROR_CLASSES.values())
def test_an_error_is_the_same_behind_the_message_that_it_travels_in(cls: type[CheckpointError]) -> None:
    error = cls("what", kind="storage", path="p", step=3, ranks=(2,))
    found = decode_failure(b"-" + encode_failure(error))
    assert (type(found), found.message, found.kind) == (cls, error.message, error.kind)
    assert (found.path, found.step, found.ranks) == ("p", 3, (2,))
