"""Messages between ranks that are longer than a value of a store may be, over every kind of store."""

from __future__ import annotations

import os
import random
import signal
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from bytecheckpoint.distributed.key_value_ranks import GroupRanks
from bytecheckpoint.distributed.ranks import Ranks, Subject, together
from bytecheckpoint.distributed.store_values import PART_BYTES, get_message, get_messages, keys_of, put_message
from bytecheckpoint.distributed.waiting import CallStore, WaitingClients
from bytecheckpoint.errors import CheckpointError, CheckpointSaveError
from distributed.workers import WorkerDied, WorkerPool

MiB = 1 << 20
MAX_VALUE_BYTES = 8 * MiB
"""What torch's TCPStore takes as one value, without being told otherwise."""
SIZES = {
    "nothing": 0,
    "a part": PART_BYTES,
    "more than a part": PART_BYTES + 1,
    "the limit": MAX_VALUE_BYTES,
    "more than the limit": MAX_VALUE_BYTES + 1,
    "9 MiB": 9 * MiB,
    "20 MiB": 20 * MiB,
}
MAX_RANKS = 6
PATIENT_S = 120.0
ABOUT = Subject("/ckpt", 7, is_save=True)


class Meeting(NamedTuple):
    """A store, as each of the ranks that meet there has it."""

    stores: Sequence[Store]
    count_keys: Callable[[], int]
    calls: Iterator[int]
    """Each call has keys of its own."""


@pytest.fixture(scope="module", params=["libuv", "no libuv", "hash", "file"])
def meeting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Meeting:
    """One for all tests: connections take long where addresses are looked up."""
    if request.param == "hash":
        shared = HashStore()
        return Meeting([shared] * MAX_RANKS, shared.num_keys, count())
    if request.param == "file":
        path = str(tmp_path_factory.mktemp("store") / "store")
        files = [FileStore(path, -1) for _ in range(MAX_RANKS)]
        return Meeting(files, files[0].num_keys, count())
    server = serve(use_libuv=request.param == "libuv")
    clients = [client(server.port, use_libuv=request.param == "libuv") for _ in range(MAX_RANKS)]
    return Meeting(clients, server.num_keys, count())


def serve(*, use_libuv: bool = True) -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)


def client(port: int, *, use_libuv: bool = True) -> TCPStore:
    limit = timedelta(seconds=PATIENT_S)
    return TCPStore("127.0.0.1", port, is_master=False, timeout=limit, use_libuv=use_libuv)


def call_store(store: Any) -> CallStore:
    return CallStore(WaitingClients(store, 2))


def on_all(meeting: Meeting, function: Callable[[Ranks], Any], *, num_ranks: int = 4, block_ranks: int) -> list[Any]:
    """What the function returns or raises on each rank."""
    prefix = f"call {next(meeting.calls)}"
    stores = [PrefixStore(prefix, store) for store in meeting.stores]

    def run(rank: int) -> Any:
        try:
            return function(
                GroupRanks(
                    lambda: call_store(stores[rank]),
                    rank,
                    range(num_ranks),
                    PATIENT_S,
                    block_ranks=block_ranks,
                    call="save",
                    watch=None,
                )
            )
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def content_of(rank: int, num_bytes: int) -> bytes:
    """No part of it is like another one, nor like one of another rank."""
    period = random.Random(rank).randbytes(99_991)
    return (period * (num_bytes // len(period) + 1))[:num_bytes]


@pytest.mark.parametrize(("num_ranks", "block_ranks"), [(2, 64), (4, 2)], ids=["one block", "blocks"])
@pytest.mark.parametrize("num_bytes", SIZES.values(), ids=SIZES.keys())
def test_a_message_of_any_length_arrives_and_nothing_of_it_stays(
    meeting: Meeting, num_bytes: int, num_ranks: int, block_ranks: int
) -> None:
    contents = [content_of(rank, num_bytes) for rank in range(num_ranks)]

    def exchange(ranks: Ranks) -> list[bool]:
        own, is_coordinator = contents[ranks.rank], ranks.rank == 0
        outcomes = [
            ranks.gather(own) == (contents if is_coordinator else []),
            ranks.scatter(contents if is_coordinator else []) == own,
            ranks.broadcast(own if is_coordinator else b"") == contents[0],
            ranks.reduce_scatter(own, lambda said: [b"yes" if said == contents else b"no"] * num_ranks) == b"yes",
        ]
        ranks.close()
        return outcomes

    num_keys = meeting.count_keys()
    outcomes = on_all(meeting, exchange, num_ranks=num_ranks, block_ranks=block_ranks)
    assert outcomes == [[True] * 4] * num_ranks
    assert meeting.count_keys() == num_keys


def test_what_a_block_says_may_be_longer_than_what_each_of_its_ranks_says(meeting: Meeting) -> None:
    contents = [content_of(rank, MAX_VALUE_BYTES // 2 + rank) for rank in range(6)]
    assert all(len(content) < MAX_VALUE_BYTES for content in contents)

    def exchange(ranks: Ranks) -> tuple[bool, bool]:
        is_heard = ranks.gather(contents[ranks.rank]) == (contents if ranks.rank == 0 else [])
        is_told = ranks.scatter(contents if ranks.rank == 0 else []) == contents[ranks.rank]
        ranks.close()
        return is_heard, is_told

    num_keys = meeting.count_keys()
    assert on_all(meeting, exchange, num_ranks=6, block_ranks=3) == [(True, True)] * 6
    assert meeting.count_keys() == num_keys


@pytest.mark.parametrize("block_ranks", [64, 2], ids=["one block", "blocks"])
@pytest.mark.parametrize("failing_rank", [0, 3])
def test_an_error_whose_text_is_long_is_raised_on_all_and_nothing_stays(
    meeting: Meeting, failing_rank: int, block_ranks: int
) -> None:
    text = "no " * (3 * MiB)

    def fail(ranks: Ranks) -> None:
        with together(ranks, "trying", about=ABOUT):
            if ranks.rank == failing_rank:
                raise CheckpointSaveError(text, kind="no_space")
            ranks.gather(content_of(ranks.rank, 2 * PART_BYTES))
            ranks.broadcast(b"")

    num_keys = meeting.count_keys()
    errors = on_all(meeting, fail, block_ranks=block_ranks)
    assert {(type(error), error.kind, error.ranks) for error in errors} == {
        (CheckpointSaveError, "no_space", (failing_rank,))
    }
    assert all(text in error.message for error in errors)
    assert meeting.count_keys() == num_keys


def test_a_short_message_is_one_value_of_the_store() -> None:
    store = HashStore()
    assert put_message(store, "a", b"short") == ["a"]
    assert (store.num_keys(), store.get("a")) == (1, b"short")


@pytest.mark.parametrize("num_bytes", [PART_BYTES, 2 * PART_BYTES - 1, 2 * PART_BYTES])
def test_the_keys_of_a_message_are_all_that_it_takes_of_the_store(num_bytes: int) -> None:
    store = HashStore()
    message = content_of(0, num_bytes)
    keys = put_message(store, "a", message)
    assert keys == keys_of("a", message)
    assert store.num_keys() == len(keys) == num_bytes // PART_BYTES + 1
    assert max(len(store.get(key)) for key in keys) == PART_BYTES
    assert get_message(store, "a") == message
    for key in keys:
        store.delete_key(key)
    assert store.num_keys() == 0


def test_long_and_short_messages_are_read_at_once() -> None:
    server = serve()
    store = client(server.port)
    contents = [content_of(rank, num_bytes) for rank, num_bytes in enumerate([0, 5, PART_BYTES, 3 * PART_BYTES + 7])]
    for rank, content in enumerate(contents):
        put_message(store, str(rank), content)
    assert get_messages(store, ["3", "0", "2", "1"]) == [contents[rank] for rank in (3, 0, 2, 1)]


def test_a_long_message_is_not_in_memory_twice_while_it_is_read() -> None:
    store = HashStore()
    put_message(store, "a", bytes(64 * MiB))
    tracemalloc.start()
    try:
        message = get_message(store, "a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(message) == 64 * MiB
    assert peak < 64 * MiB * 5 // 4


class DeadlyStore:
    """A way to a store on which the process is killed once it has written so many values."""

    def __init__(self, store: Store, num_values: int) -> None:
        self._store = store
        self._num_values = num_values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        self._num_values -= 1
        if not self._num_values:
            self._store.check([key])  # once that is answered, the value has arrived
            os.kill(os.getpid(), signal.SIGKILL)


def die_between_parts(rank: int, world_size: int, port: int, dying_rank: int, block_ranks: int) -> tuple[Any, ...]:
    store: Any = PrefixStore("a call", client(port))
    way = DeadlyStore(store, 2) if rank == dying_rank else store
    store.set(f"here is {rank}", b"")
    store.wait([f"here is {each}" for each in range(world_size)])  # they begin to wait together
    # Others name rank 0 where it begins to wait so much later than they do, which on a busy machine is soon.
    ranks = GroupRanks(
        lambda: call_store(way),
        rank,
        range(world_size),
        timeout_s=4.0,
        block_ranks=block_ranks,
        call="save",
        watch=None,
    )
    try:
        with together(ranks, "trying", about=ABOUT):
            ranks.gather(bytes(3 * PART_BYTES) if rank == dying_rank else b"")
            ranks.broadcast(bytes(3 * PART_BYTES))
    except CheckpointSaveError as error:
        return error.kind, error.ranks
    return ()


@pytest.mark.parametrize(("dying_rank", "block_ranks"), [(0, 64), (1, 64), (1, 2), (2, 2), (3, 2)])
def test_a_rank_that_dies_between_parts_is_named(workers: WorkerPool, dying_rank: int, block_ranks: int) -> None:
    server = serve()
    outcomes = workers.run_each(
        die_between_parts, server.port, dying_rank, block_ranks, world_size=4, process_group=False
    )
    assert isinstance(outcomes.pop(dying_rank).error, WorkerDied)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, ("rank_missing", (dying_rank,)))] * 3
