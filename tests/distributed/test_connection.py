"""Connections between ranks: who may connect, and what is said when one does not come, is stuck or is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from bytecheckpoint.distributed.connection import Connection, Peer, PeerLeftError
from bytecheckpoint.distributed.rendezvous import Address, Listener, connect
from bytecheckpoint.distributed.sender import Activity, Outbox
from bytecheckpoint.distributed.wire import FAREWELL, HEADER_BYTES, SIGN_OF_LIFE, Header, Parcel, decode_header
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.overwrite_state import StateChanges
from bytecheckpoint.loading.receive import Arrivals
from bytecheckpoint.manifest.ranges import FlatPart
from bytecheckpoint.planner.exchange_split import Arrival, Unit
from bytecheckpoint.runtime.buffers import ByteBudget

READER, TAKER = Peer(0, 40), Peer(1, 41)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener(towards="127.0.0.1")) as made:
        yield made


def admit(listener: Listener, timeout_s: float = 10.0) -> tuple[Connection, bytes]:
    found = [item for item in listener.accept([TAKER], timeout_s, patience_s=timeout_s) if item[0] is not None]
    assert found[0][0] is not None
    return found[0]


def knock(
    address: Address, timeout_s: float = 10.0, request: bytes = b"", is_wanted: Callable[[], bool] = lambda: True
) -> Connection:
    return connect(READER, address, TAKER.rank, request, timeout_s=timeout_s, is_wanted=is_wanted)


def pair(listener: Listener, timeout_s: float) -> tuple[Connection, Connection]:
    """The reader's end and the taker's."""
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(admit, listener, timeout_s)
        theirs = knock(listener.address, timeout_s, b"request")
        connection, request = ours.result()
    assert (connection.peer, request) == (TAKER, b"request")
    return connection, theirs


def test_what_is_sent_arrives(listener: Listener) -> None:
    ours, theirs = pair(listener, 10.0)
    content = bytes(range(256)) * 20_000
    received = bytearray(len(content))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ours.send, content)
        theirs.receive_into(memoryview(received))
        sent.result()
    assert received == content
    for connection in (ours, theirs):
        connection.close()


def test_a_stranger_is_turned_away(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.address.port)) as stranger, ThreadPoolExecutor(1) as pool:
        stranger.sendall(bytes(28))
        ours = pool.submit(admit, listener)
        assert stranger.recv(1) == b""
        theirs = knock(listener.address)
        ours.result()[0].close()
        theirs.close()


def test_a_taker_that_does_not_come_is_named(listener: Listener) -> None:
    with pytest.raises(CheckpointError, match="rank 41 did not connect") as raised:
        admit(listener, timeout_s=0.2)
    assert (raised.value.kind, raised.value.ranks) == ("rank_missing", (41,))


def test_a_reader_that_cannot_be_reached_is_named(listener: Listener) -> None:
    port = listener.address.port
    listener.close()
    with pytest.raises(CheckpointError, match=r"rank 40 cannot be reached .*exchange=\"off\"") as raised:
        knock(Address(["127.0.0.1"], port, bytes(32)), 1.0)
    assert (raised.value.kind, raised.value.ranks) == ("rank_missing", (40,))


def test_somebody_else_at_the_address_is_not_taken_for_the_reader(listener: Listener) -> None:
    elsewhere = Address(listener.address.hosts, listener.address.port, b"x" * 32)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: list(listener.accept([TAKER], 0.5, patience_s=0.5)))
        with pytest.raises(CheckpointError, match="rank 40 cannot be reached"):
            knock(elsewhere, 5.0)


def test_silent_strangers_delay_nobody(listener: Listener) -> None:
    """The address of a listener is known to everybody who looks for open ports."""
    with ExitStack() as strangers:
        silent = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", listener.address.port))) for _ in range(200)
        ]
        for number, stranger in enumerate(silent[:50]):
            stranger.sendall(bytes(number % 27))
        started = time.monotonic()
        ours, theirs = pair(listener, 10.0)
        assert time.monotonic() - started < 5
        ours.send(b"to the taker")
        assert theirs.receive(12) == b"to the taker"
        assert silent[0].recv(1) == b""  # those who are not let in are turned away in the end
        ours.close()
        theirs.close()


def test_a_stranger_who_dribbles_is_turned_away(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a byte comes: there is one limit for all that it says."""
    monkeypatch.setattr("bytecheckpoint.distributed.rendezvous._HELLO_S", 0.3)
    with socket.create_connection(("127.0.0.1", listener.address.port)) as stranger, ThreadPoolExecutor(1) as pool:
        nobody = pool.submit(admit, listener, 2.0)
        with pytest.raises(OSError):  # noqa: PT012  # which of them notices is a matter of chance
            for _ in range(27):
                stranger.sendall(b"x")
                time.sleep(0.05)
        with pytest.raises(CheckpointError, match="rank 41 did not connect"):
            nobody.result()


def test_a_large_request_arrives_whole(listener: Listener) -> None:
    request = bytes(range(256)) * 20_000
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(admit, listener)
        theirs = knock(listener.address, request=request)
        connection, found = ours.result()
    assert found == request
    connection.close()
    theirs.close()


def test_connecting_to_one_that_does_not_answer_ends_when_nobody_wants_it(listener: Listener) -> None:
    """As soon as something has failed, or the load is interrupted: the reader here never greets anybody."""
    started = time.monotonic()
    with pytest.raises(PeerLeftError):
        knock(listener.address, 60.0, is_wanted=lambda: time.monotonic() < started + 0.3)
    assert time.monotonic() - started < 5


def test_one_that_is_stuck_or_gone_is_named(listener: Listener) -> None:
    ours, theirs = pair(listener, 0.2)
    with pytest.raises(CheckpointError, match="passed nothing on for 0"):
        theirs.receive(1)
    with pytest.raises(CheckpointError, match="rank 41 took nothing for 0") as raised:
        ours.send(bytes(64 << 20))
    assert raised.value.ranks == (41,)
    ours.interrupt()
    with pytest.raises(CheckpointError, match="is gone") as raised:
        theirs.receive(65 << 20)
    assert raised.value.ranks == (40,)
    ours.close()
    theirs.close()


def test_a_taker_that_is_gone_is_named_at_once(listener: Listener) -> None:
    ours, theirs = pair(listener, 60.0)
    ours.look_after_taker()
    theirs.close()
    with pytest.raises(CheckpointError, match="rank 41 was to take what this one reads, and is gone") as raised:
        ours.send(bytes(64 << 20))
    assert (raised.value.kind, raised.value.ranks) == ("rank_missing", (41,))
    with pytest.raises(CheckpointError, match="is gone"):
        ours.look_after_taker()
    ours.close()


@pytest.mark.parametrize("is_looked_after", [False, True])
def test_a_taker_that_breaks_off_is_not_taken_for_dead(listener: Listener, is_looked_after: bool) -> None:
    """What has failed there it tells the coordinator, and that says more than that it is gone."""
    ours, theirs = pair(listener, 60.0)
    theirs.leave()
    theirs.close()
    with pytest.raises(PeerLeftError):
        ours.look_after_taker() if is_looked_after else ours.send(bytes(64 << 20))
    ours.close()


def outbox_to(connection: Connection, activity: Activity) -> Outbox:
    return Outbox(connection, num_parcels=1, activity=activity, beat_s=0.01)


def test_a_reader_that_gets_on_gives_signs_of_life_and_one_that_does_not_gives_none(listener: Listener) -> None:
    ours, theirs = pair(listener, 1.0)
    activity = Activity()
    outbox = outbox_to(ours, activity)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(outbox.send_all, threading.Event())
        for _ in range(3):
            activity.step()
            assert decode_header(theirs.receive(HEADER_BYTES)) is None
        with activity.waiting():
            for _ in range(3):
                assert decode_header(theirs.receive(HEADER_BYTES)) is None
        with pytest.raises(CheckpointError, match="passed nothing on for 1 s"):  # noqa: PT012  # after the last of them
            while True:
                assert decode_header(theirs.receive(HEADER_BYTES)) is None
        header = Header(1, 2, 5, 0)
        outbox.put(Parcel(header, [memoryview(b"pieces")], num_takers=1, done=lambda: None))
        assert decode_header(theirs.receive(HEADER_BYTES)) == header
        assert theirs.receive(6) == b"pieces"
        assert not sent.done()
        theirs.confirm()
        sent.result(20)
    ours.close()
    theirs.close()


def test_a_taker_that_dies_while_there_is_nothing_to_send_is_named(listener: Listener) -> None:
    ours, theirs = pair(listener, 60.0)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(outbox_to(ours, Activity()).send_all, threading.Event())
        theirs.close()
        with pytest.raises(CheckpointError, match="rank 41 was to take"):
            sent.result(20)
    ours.close()


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_taker_that_goes_with_parcels_on_the_way_is_noticed(listener: Listener, is_dead: bool) -> None:
    ours, theirs = pair(listener, 60.0)
    outbox = outbox_to(ours, Activity())
    outbox.put(Parcel(Header(1, 2, 6, 0), [memoryview(b"pieces")], num_takers=1, done=lambda: None))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(outbox.send_all, threading.Event())
        theirs.receive(HEADER_BYTES)
        theirs.close() if is_dead else theirs.leave()
        with pytest.raises(CheckpointError if is_dead else PeerLeftError):
            sent.result(20)
    theirs.close()
    ours.close()


def test_a_reader_does_not_wait_for_ever_for_one_that_is_stuck_at_the_end(listener: Listener) -> None:
    ours, theirs = pair(listener, 0.4)
    ours.await_receipt()
    theirs.close()
    ours.close()


def test_a_farewell_is_no_header() -> None:
    with pytest.raises(PeerLeftError):
        decode_header(FAREWELL)
    assert decode_header(SIGN_OF_LIFE) is None


def test_a_budget_is_never_exceeded_but_by_one_alone() -> None:
    budget = ByteBudget(10)
    with ThreadPoolExecutor(1) as pool:
        budget.take(25)
        waiting = pool.submit(budget.take, 1)
        assert not waiting.done()
        budget.give(25)
        waiting.result()
        budget.take(9)
        refused = pool.submit(budget.take, 1)
        budget.break_off(PeerLeftError)
        with pytest.raises(PeerLeftError):
            refused.result()


class Sender:
    """A connection from which nothing may be taken."""

    peer = Peer(1, 41)


def test_a_parcel_of_another_length_than_was_asked_for_is_refused_before_it_is_taken() -> None:
    arrivals = Arrivals([], ["w"], scratch_bytes=100, verify=False, changes=StateChanges())
    arrival = Arrival(1, Unit(0, 0, 100), (FlatPart(0, 0, 8, 0),))
    with pytest.raises(CheckpointError, match="rank 41 passed on 9 bytes of w, and 8 were asked for"):
        arrivals.take_in(Sender(), Header(0, 0, 9, 0), arrival)
