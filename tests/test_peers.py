"""Connections between ranks: who may connect, and what is said when one does not come, is stuck or is gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.parcels import FAREWELL, Budget, decode_header
from bytecheckpoint.peers import Address, Connection, Listener, Peer, PeerLeftError, connect

READER, TAKER = Peer(0, 40), Peer(1, 41)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener(towards="127.0.0.1")) as made:
        yield made


def admit(listener: Listener, timeout_s: float = 10.0) -> tuple[Connection, bytes]:
    found = [item for item in listener.accept([TAKER], timeout_s) if item[0] is not None]
    assert found[0][0] is not None
    return found[0]


def pair(listener: Listener, timeout_s: float) -> tuple[Connection, Connection]:
    """The reader's end and the taker's."""
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(admit, listener)
        theirs = connect(READER, listener.address, TAKER.rank, b"request", timeout_s)
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
        theirs = connect(READER, listener.address, TAKER.rank, b"", 10.0)
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
        connect(READER, Address(["127.0.0.1"], port, bytes(32)), TAKER.rank, b"", 1.0)
    assert (raised.value.kind, raised.value.ranks) == ("rank_missing", (40,))


def test_somebody_else_at_the_address_is_not_taken_for_the_reader(listener: Listener) -> None:
    elsewhere = Address(listener.address.hosts, listener.address.port, b"x" * 32)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: list(listener.accept([TAKER], 0.5)))
        with pytest.raises(CheckpointError, match="rank 40 cannot be reached"):
            connect(READER, elsewhere, TAKER.rank, b"", 5.0)


def test_one_that_is_stuck_or_gone_is_named(listener: Listener) -> None:
    ours, theirs = pair(listener, 0.2)
    with pytest.raises(CheckpointError, match="passed nothing on for 0"):
        theirs.receive(1)
    ours.interrupt()
    with pytest.raises(CheckpointError, match="is gone") as raised:
        theirs.receive(1)
    assert raised.value.ranks == (40,)
    with pytest.raises(PeerLeftError):
        ours.send(bytes(1 << 20))
    ours.close()
    theirs.close()


def test_a_farewell_is_no_header() -> None:
    with pytest.raises(PeerLeftError):
        decode_header(FAREWELL)


def test_a_budget_is_never_exceeded_but_by_one_alone() -> None:
    budget = Budget(10)
    with ThreadPoolExecutor(1) as pool:
        budget.take(25)
        waiting = pool.submit(budget.take, 1)
        assert not waiting.done()
        budget.give(25)
        waiting.result()
        budget.take(9)
        refused = pool.submit(budget.take, 1)
        budget.break_off()
        with pytest.raises(PeerLeftError):
            refused.result()
