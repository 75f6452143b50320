"""Connections between ranks: who may connect, and what is said when one does not come, is stuck or is gone."""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from queue import SimpleQueue
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.distributed import rendezvous as rendezvous_module
from bytecheckpoint.distributed.connection import Activity, Connection, PeerLeftError
from bytecheckpoint.distributed.liveness.host_links import Address
from bytecheckpoint.distributed.rendezvous import Listener, connect
from bytecheckpoint.distributed.same_host.host_ranks import HostRanks
from bytecheckpoint.distributed.wire import DISCONNECT, HEADER, HEARTBEAT, OutgoingUnit, WireHeader, view_pieces
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.loading.between_ranks.assignment import ReadAssignment
from bytecheckpoint.loading.exchange import _Exchange
from bytecheckpoint.loading.overwrite_state import StateChanges
from bytecheckpoint.loading.receive import Receiver, pieces_of
from bytecheckpoint.manifest.ranges import Fetch, FlatPart
from bytecheckpoint.planner.byte_ranges import ByteRange
from bytecheckpoint.planner.exchange_plan import DividedPlan, ReaderShare
from bytecheckpoint.runtime.buffers import ByteBudget

READER, PEER = 40, 41
"""Global ranks; the peer is rank 1 within the group."""
PATIENT_S = 60.0


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener(towards="127.0.0.1")) as made:
        yield made


def accept(
    listener: Listener, timeout_s: float, peers: Mapping[int, int] = MappingProxyType({1: PEER})
) -> list[tuple[Connection, bytes]]:
    admitted: list[tuple[Connection, bytes]] = []

    def note(connection: Connection, request: bytes) -> Callable[[], None]:
        admitted.append((connection, request))
        return lambda: None

    with ThreadPoolExecutor(300, thread_name_prefix="bcp-exchange") as pool:
        listener.accept(peers, note, pool.submit, timeout_s=timeout_s, is_over=threading.Event())
    return admitted


def admit(listener: Listener, timeout_s: float = PATIENT_S) -> tuple[Connection, bytes]:
    return next(iter(accept(listener, timeout_s)))


def connect_to(
    address: Address,
    timeout_s: float = PATIENT_S,
    request: bytes = b"",
    on_open: Callable[[Connection], object] = lambda _: None,
    is_over: threading.Event | None = None,
) -> Connection:
    is_over = is_over or threading.Event()
    return connect(READER, address, 1, request, timeout_s=timeout_s, on_open=on_open, is_over=is_over)


def receive(connection: Connection, num_bytes: int) -> bytes:
    content = bytearray(num_bytes)
    connection.receive_into(memoryview(content))
    return bytes(content)


def pair(listener: Listener) -> tuple[Connection, Connection]:
    """The reader rank's end and the peer's, both patient."""
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(admit, listener)
        theirs = connect_to(listener.address, request=b"request")
        connection, request = ours.result()
    assert (connection.global_rank, request) == (PEER, b"request")
    return connection, theirs


def limit(connection: Connection, timeout_s: float) -> None:
    """Gives it another limit than that of the rendezvous, which takes its time on a busy machine."""
    connection.timeout_s = timeout_s
    connection._socket.settimeout(timeout_s)


def test_what_is_sent_arrives(listener: Listener) -> None:
    ours, theirs = pair(listener)
    content = bytes(range(256)) * 20_000
    received = bytearray(len(content))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ours.send, content)
        theirs.receive_into(memoryview(received))
        sent.result()
    assert received == content
    for connection in (ours, theirs):
        connection.close()


def test_a_connection_without_the_token_is_closed(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.address.port)) as unknown, ThreadPoolExecutor(1) as pool:
        unknown.sendall(bytes(28))
        ours = pool.submit(admit, listener)
        assert unknown.recv(1) == b""
        theirs = connect_to(listener.address)
        ours.result()[0].close()
        theirs.close()


def test_a_connection_stays_open_after_the_rendezvous(listener: Listener) -> None:
    """The peer is served by the thread that authenticated it, long after the last one has connected."""
    is_served, is_accepted = threading.Event(), threading.Event()

    def send_late(connection: Connection, _request: bytes) -> Callable[[], None]:
        def serve() -> None:
            is_accepted.wait(PATIENT_S)
            connection.send(b"to the peer!")
            connection.close()
            is_served.set()

        return serve

    with ThreadPoolExecutor(300) as pool:
        theirs = pool.submit(connect_to, listener.address)
        listener.accept({1: PEER}, send_late, pool.submit, timeout_s=PATIENT_S, is_over=threading.Event())
        is_accepted.set()
        assert receive(theirs.result(), 12) == b"to the peer!"
        assert is_served.wait(PATIENT_S)
    theirs.result().close()


def test_a_peer_that_connects_twice_is_served_once(listener: Listener) -> None:
    """A peer tries the next address of this host if the answer on the first one is late."""
    with ThreadPoolExecutor(3) as pool:
        accepted = pool.submit(accept, listener, PATIENT_S, {1: PEER, 2: PEER})
        first = connect_to(listener.address, request=b"first")
        second = connect_to(listener.address, request=b"second")
        # Each is authenticated in a thread of its own: on a busy machine the second may come first.
        (closed,), *_ = select.select([first._socket, second._socket], [], [], PATIENT_S)
        assert closed.recv(1) == b""
        kept = b"second" if closed is first._socket else b"first"
        other = connect(
            *(READER, listener.address, 2, b"other"),
            timeout_s=PATIENT_S,
            on_open=lambda _: None,
            is_over=threading.Event(),
        )
        assert [request for _, request in accepted.result()] == [kept, b"other"]
        for connection in (first, second, other, *(each for each, _ in accepted.result())):
            connection.close()


def exchange_with_a_peer() -> _Exchange:
    options = bcp.LoadOptions(timeout_s=PATIENT_S)
    source: Any = SimpleNamespace(options=options, changes=StateChanges(), expect_bytes=lambda _: None)
    match: Any = SimpleNamespace(shards=[], stored_fqns=[])
    ranks: Any = SimpleNamespace(global_ranks=[READER, PEER], rank=0, num_ranks=2, has_failed=lambda: False)
    assigned = ReadAssignment(ReaderShare([], [1], []), {}, 1, 1.0)
    host_ranks = HostRanks(0, memoryview(bytearray(64)))
    targets: Any = []
    return _Exchange(ranks, source, match, host_ranks, targets=targets, read_bytes=32, assigned=assigned, lanes=Any)


def nothing_to_read(**_: Any) -> DividedPlan:
    return DividedPlan([], [], {}, {}, {})


def test_a_damaged_request_ends_the_exchange_and_all_its_threads(listener: Listener) -> None:
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(connect_to, listener.address, request=b"damaged request")
        with pytest.raises(CheckpointError, match="damaged") as raised:
            exchange_with_a_peer().run(listener, nothing_to_read, {})
        theirs.result().close()
    assert raised.value.kind == "checksum"  # and keeps the frames alive that it went through
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bcp-exchange")]


def test_long_requests_of_some_peers_keep_no_other_one_waiting(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_module, "MAX_UNAUTHENTICATED", 1)
    peers, token = dict.fromkeys(range(1, 5), PEER), listener.address.token
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        accepted = pool.submit(accept, listener, PATIENT_S, peers)
        slow = []
        for rank in (2, 3, 4):
            opened = stack.enter_context(socket.create_connection(("127.0.0.1", listener.address.port), PATIENT_S))
            opened.sendall(rendezvous_module._HELLO.pack(token[:16], rank, 4))
            assert opened.recv(16) == token[16:]
            slow.append(opened)
        connect_to(listener.address).close()
        for opened in slow:
            opened.sendall(b"want")
        assert sorted(request for _, request in accepted.result()) == [b"", b"want", b"want", b"want"]
        for connection, _ in accepted.result():
            connection.close()


def test_a_rendezvous_that_can_have_no_more_threads_says_what_to_do(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_most(thread: threading.Thread) -> None:
        if thread.name == "bcp-exchange_0":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_most)
    with (
        socket.create_connection(("127.0.0.1", listener.address.port)),
        pytest.raises(CheckpointError, match=r"no more threads .*exchange=\"off\"") as raised,
    ):
        exchange_with_a_peer().run(listener, nothing_to_read, {})
    assert raised.value.kind == "rank_failed"


def test_a_peer_that_does_not_connect_is_named(listener: Listener) -> None:
    with pytest.raises(CheckpointError, match="rank 41 did not connect") as raised:
        admit(listener, timeout_s=0.2)
    assert (raised.value.kind, raised.value.ranks) == ("rank_missing", (41,))


def test_a_reader_that_cannot_be_reached_is_named(listener: Listener) -> None:
    port = listener.address.port
    listener.close()
    with pytest.raises(CheckpointError, match=r"rank 40 cannot be reached .*exchange=\"off\"") as raised:
        connect_to(Address(["127.0.0.1"], port, bytes(32)), 1.0)
    assert (raised.value.kind, raised.value.ranks) == ("rank_missing", (40,))


def test_an_address_of_a_family_that_this_host_lacks_is_passed_over(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = socket.socket

    def without_ipv6(family: int = -1, *arguments: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6 and "fileno" not in options:  # which `accept` gives
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *arguments, **options)

    address = Address(["::1", "127.0.0.1"], listener.address.port, listener.address.token)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(lambda: admit(listener))
        monkeypatch.setattr(rendezvous_module.socket, "socket", without_ipv6)
        with closing(connect_to(address)), closing(accepted.result()[0]):
            monkeypatch.undo()


def test_a_lack_of_descriptors_here_is_not_blamed_on_the_reader(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_descriptors(*_: Any, **__: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(rendezvous_module.socket, "socket", without_descriptors)
    with pytest.raises(OSError, match="Too many open files") as raised:
        connect_to(listener.address)
    monkeypatch.undo()
    assert not isinstance(raised.value, CheckpointError)


def test_somebody_else_at_the_address_is_not_taken_for_the_reader(listener: Listener) -> None:
    elsewhere = Address(listener.address.hosts, listener.address.port, b"x" * 32)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: accept(listener, 0.5))
        with pytest.raises(CheckpointError, match="rank 40 cannot be reached"):
            connect_to(elsewhere, 5.0)


def test_silent_connections_delay_no_peer(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a listener is known to everybody who looks for open ports."""
    monkeypatch.setattr(rendezvous_module, "_HELLO_S", 10 * PATIENT_S)  # a peer that waits for one comes too late
    with ExitStack() as unknowns:
        silent = [
            unknowns.enter_context(socket.create_connection(("127.0.0.1", listener.address.port))) for _ in range(200)
        ]
        for number, unknown in enumerate(silent[:50]):
            unknown.sendall(bytes(number % 27))
        ours, theirs = pair(listener)
        ours.send(b"to the peer!")
        assert receive(theirs, 12) == b"to the peer!"
        assert silent[0].recv(1) == b""  # those who are not let in are turned away in the end
        ours.close()
        theirs.close()


NUM_BYTES = 3000


def test_a_connection_that_dribbles_its_hello_is_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a byte comes: there is one limit for all that it says. Here it has much to say."""
    monkeypatch.setattr(rendezvous_module, "_HELLO", struct.Struct(f"{rendezvous_module._HELLO.format}{NUM_BYTES}x"))
    monkeypatch.setattr(rendezvous_module, "_HELLO_S", 0.3)
    with socket.create_connection(("127.0.0.1", listener.address.port)) as unknown, ThreadPoolExecutor(1) as pool:
        ours = pool.submit(admit, listener)
        with pytest.raises(OSError):  # noqa: PT012  # which of them notices is a matter of chance
            for _ in range(NUM_BYTES):
                unknown.sendall(b"x")
                time.sleep(0.01)
        monkeypatch.setattr(rendezvous_module, "_HELLO_S", PATIENT_S)
        theirs = connect_to(listener.address)
        ours.result()[0].close()
        theirs.close()


def test_a_large_request_arrives_whole(listener: Listener) -> None:
    request = bytes(range(256)) * 20_000
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(admit, listener)
        theirs = connect_to(listener.address, request=request)
        connection, found = ours.result()
    assert found == request
    connection.close()
    theirs.close()


def test_connecting_to_one_that_does_not_answer_ends_when_it_is_interrupted(listener: Listener) -> None:
    """As soon as something has failed, or the load is interrupted: this reader rank never answers."""
    opened: SimpleQueue[Connection] = SimpleQueue()
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        address = Address(["127.0.0.1"], listener.address.port, listener.address.token)  # no other is tried after it
        connecting = pool.submit(connect_to, address, on_open=opened.put, is_over=is_over)
        first = opened.get(timeout=PATIENT_S)
        while not first._socket.getsockname()[1]:
            time.sleep(0.01)
        is_over.set()
        first.disconnect()
        assert isinstance(connecting.exception(timeout=PATIENT_S / 2), PeerLeftError)
    for connection in (first, *(opened.get() for _ in range(opened.qsize()))):
        connection.close()


def test_one_that_is_stuck_or_gone_is_named(listener: Listener) -> None:
    ours, theirs = pair(listener)
    limit(ours, 0.2)
    limit(theirs, 0.2)
    with pytest.raises(CheckpointError, match="passed nothing on for 0"):
        receive(theirs, 1)
    with pytest.raises(CheckpointError, match="rank 41 took nothing for 0") as raised:
        ours.send(bytes(64 << 20))
    assert raised.value.ranks == (41,)
    ours.interrupt()
    limit(theirs, PATIENT_S)
    with pytest.raises(CheckpointError, match="is gone") as raised:
        receive(theirs, 65 << 20)
    assert raised.value.ranks == (40,)
    ours.close()
    theirs.close()


def test_a_peer_that_is_gone_is_named_at_once(listener: Listener) -> None:
    ours, theirs = pair(listener)
    ours.check_peer()
    theirs.close()
    with pytest.raises(CheckpointError, match="rank 41 was to take what this one reads, and is gone") as raised:
        ours.send(bytes(64 << 20))
    assert (raised.value.kind, raised.value.ranks) == ("rank_missing", (41,))
    with pytest.raises(CheckpointError, match="is gone"):
        ours.check_peer()
    ours.close()


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_peer_that_disconnects_is_not_taken_for_dead(listener: Listener, is_checked: bool) -> None:
    """What has failed there it tells the coordinator, and that says more than that it is gone."""
    ours, theirs = pair(listener)
    theirs.disconnect()
    theirs.close()
    with pytest.raises(PeerLeftError):
        ours.check_peer() if is_checked else ours.send(bytes(64 << 20))
    ours.close()


def unit() -> OutgoingUnit:
    """Six bytes for one peer, behind the header (1, 2, 6)."""
    read = Fetch(1, 2, 6, (), is_direct=False)
    views = view_pieces(memoryview(b"pieces"), 2, [ByteRange(2, (6,), (1,))])
    return OutgoingUnit(read, views, 1, budget=ByteBudget(6), verify=False, done=lambda: None)


def send_unit(connection: Connection, activity: Activity) -> None:
    connection.send_units(1, activity, threading.Event(), heartbeat_s=0.01)


def test_a_reader_rank_sends_heartbeats_while_it_makes_progress(listener: Listener) -> None:
    ours, theirs = pair(listener)
    activity = Activity()
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_unit, ours, activity)
        for _ in range(3):
            activity.step()
            assert receive(theirs, len(HEARTBEAT)) == HEARTBEAT
        with activity.waiting():
            for _ in range(3):
                assert receive(theirs, len(HEARTBEAT)) == HEARTBEAT
        limit(theirs, 1.0)
        with pytest.raises(CheckpointError, match="passed nothing on for 1 s"):  # noqa: PT012  # after the last of them
            while True:
                assert receive(theirs, len(HEARTBEAT)) == HEARTBEAT
        limit(theirs, PATIENT_S)
        header = WireHeader(1, 2, 6)
        ours.units.put(unit())
        assert theirs.receive_header() == header
        assert receive(theirs, 6) == b"pieces"
        assert not sent.done()
        theirs.send_ack()
        sent.result(20)
    ours.close()
    theirs.close()


def test_a_peer_that_dies_while_there_is_nothing_to_send_is_named(listener: Listener) -> None:
    ours, theirs = pair(listener)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_unit, ours, Activity())
        theirs.close()
        with pytest.raises(CheckpointError, match="rank 41 was to take"):
            sent.result(20)
    ours.close()


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_peer_that_goes_with_units_on_the_way_is_noticed(listener: Listener, is_dead: bool) -> None:
    ours, theirs = pair(listener)
    ours.units.put(unit())
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_unit, ours, Activity())
        theirs.receive_header()
        theirs.close() if is_dead else theirs.disconnect()
        with pytest.raises(CheckpointError if is_dead else PeerLeftError):
            sent.result(20)
    theirs.close()
    ours.close()


def test_a_reader_rank_does_not_wait_for_ever_for_the_ack_of_a_stuck_peer(listener: Listener) -> None:
    ours, theirs = pair(listener)
    ours.check_peer(0.1)
    theirs.close()
    ours.close()


def test_heartbeats_are_skipped_and_a_disconnect_is_no_header(listener: Listener) -> None:
    ours, theirs = pair(listener)
    header = WireHeader(1, 2, 6)
    ours.send(HEARTBEAT + HEARTBEAT + HEADER.pack(*header) + HEARTBEAT + DISCONNECT)
    assert theirs.receive_header() == header
    with pytest.raises(PeerLeftError):
        theirs.receive_header()
    ours.close()
    theirs.close()


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
    """A connection from which nothing may be received."""

    global_rank = PEER


def test_a_unit_of_another_length_than_was_asked_for_is_refused_before_it_is_received() -> None:
    match: Any = SimpleNamespace(stored_fqns=["w"])
    receiver = Receiver(Any, match, [], scratch_bytes=100)
    fetch = Fetch(0, 0, 100, (FlatPart(0, 0, 8, 0),), is_direct=False)
    with pytest.raises(CheckpointError, match="rank 41 passed on 9 bytes of w, and 8 were asked for"):
        receiver.receive(
            Sender(), WireHeader(0, 0, 9), fetch, pieces=pieces_of(fetch), content=memoryview(bytearray(100))
        )


@pytest.mark.parametrize(
    "piece",
    [ByteRange(9, (2,), (1,)), ByteRange(15, (6,), (1,)), ByteRange(10, (2, 3), (8, 1)), ByteRange(21, (1,), (1,))],
)
def test_a_piece_outside_of_its_unit_is_refused(piece: ByteRange) -> None:
    inside = [ByteRange(10, (10,), (1,)), ByteRange(10, (2, 3), (7, 1))]
    first, rows = view_pieces(memoryview(bytes(range(10))), 10, inside)
    assert (first.tobytes(), rows.tobytes()) == (bytes(range(10)), bytes([0, 1, 2, 7, 8, 9]))
    with pytest.raises(ValueError):
        view_pieces(memoryview(bytes(10)), 10, [piece])
