"""A rank whose process has ended is named at once, whatever the time limit is; one that is stopped or holds the GIL is
waited for. With several "hosts" ranks watch one another through links, as they do across real ones.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from faults.seams import SAVE_PHASES, before, loads_as, state_of

import bytecheckpoint as bcp
from bytecheckpoint.distributed import ranks as ranks_module
from bytecheckpoint.distributed.liveness import host_links, peer_watch
from bytecheckpoint.distributed.liveness.host_links import HostLinks
from bytecheckpoint.distributed.liveness.peer_watch import LocalProcesses, PeerWatch, own_presence
from distributed.played_hosts import on_host
from distributed.workers import WorkerDied, WorkerPool

PATIENT = bcp.SaveOptions(timeout_s=600)
NAMED_S = 60.0
"""Far more than it takes, far less than the limit."""


@contextmanager
def arranged(rank: int, *, block_ranks: int, num_hosts: int) -> Iterator[None]:
    """Blocks of so many ranks, which are on so many hosts."""
    with pytest.MonkeyPatch.context() as patch, on_host(rank % num_hosts) if num_hosts > 1 else nullcontext():
        patch.setattr(ranks_module, "BLOCK_RANKS", block_ranks)
        yield


def die(rank: int, world_size: int, path: str, dying: int, phase: str, block_ranks: int, num_hosts: int) -> Any:
    with arranged(rank, block_ranks=block_ranks, num_hosts=num_hosts):
        bcp.save(path, state_of(rank, 1.0), step=1, options=PATIENT)
        dist.barrier()
        if rank == dying and phase == "before its call":
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            if rank == dying:
                with before(SAVE_PHASES[phase], lambda: os.kill(os.getpid(), signal.SIGKILL)):
                    bcp.save(path, state_of(rank, 2.0), step=2, options=PATIENT)
            bcp.save(path, state_of(rank, 2.0), step=2, options=PATIENT)
        except bcp.CheckpointSaveError as error:
            return error.kind, error.ranks, error.message, time.monotonic() - started
    return None


CASES = [
    (1, "before its call", 64, 1),
    (0, "before its call", 64, 1),
    (2, "writing", 64, 1),
    (0, "writing", 64, 1),
    (3, "writing", 2, 1),
    (2, "before its call", 2, 1),
    (0, "writing", 2, 1),
    (1, "before its call", 64, 4),
    (0, "writing", 64, 4),
    (3, "before its call", 2, 4),
    (2, "writing", 2, 4),
]


@pytest.mark.parametrize(("dying", "phase", "block_ranks", "num_hosts"), CASES)
def test_a_rank_that_dies_is_named_long_before_the_limit(
    workers: WorkerPool, tmp_path: Path, dying: int, phase: str, block_ranks: int, num_hosts: int
) -> None:
    outcomes = workers.run_each(die, str(tmp_path), dying, phase, block_ranks, num_hosts, world_size=4)
    assert isinstance(outcomes.pop(dying).error, WorkerDied)
    for outcome in outcomes:
        assert outcome.error is None
        kind, ranks, message, seconds = outcome.value
        assert (kind, ranks) == ("rank_missing", (dying,))
        assert "has ended" in message
        assert seconds < NAMED_S
    assert bcp.steps(tmp_path) == [1]


def hold_gil(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)  # PyDLL, unlike CDLL, keeps the GIL


def stop(rank: int, world_size: int, path: str, stopped: int, how: str, num_hosts: int) -> bool:
    pids: list[Any] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    with arranged(rank, block_ranks=2, num_hosts=num_hosts):
        bcp.save(path, state_of(rank, 1.0), step=1, options=PATIENT)
        dist.barrier()
        if rank == stopped and how == "holding the GIL":
            hold_gil(3)
        elif rank == stopped:
            waker = f"import time, os; time.sleep(3); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
            with subprocess.Popen([sys.executable, "-c", waker]):
                os.kill(os.getpid(), signal.SIGSTOP)
        bcp.save(path, state_of(rank, 2.0), step=2, options=PATIENT)
        return loads_as(path, rank, 2.0)


@pytest.mark.parametrize("num_hosts", [1, 4])
@pytest.mark.parametrize(("stopped", "how"), [(0, "stopped"), (3, "stopped"), (2, "holding the GIL")])
def test_a_rank_that_is_stopped_or_holds_the_gil_is_waited_for(
    workers: WorkerPool, tmp_path: Path, stopped: int, how: str, num_hosts: int
) -> None:
    assert workers.run(stop, str(tmp_path), stopped, how, num_hosts, world_size=4) == [True] * 4


def wait_until(is_so: Any) -> bool:
    deadline = time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(is_so())


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_process_is_told_from_a_later_one_with_its_id(has_descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open")
    own = own_presence()
    processes = LocalProcesses()
    processes.add(1, own)
    processes.add(2, type(own)(own.kernel, own.host, own.pid, own.started + 1))
    assert processes.ended() == {2}
    processes.close()


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_process_that_was_not_reaped_has_ended(has_descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open")
    own = own_presence()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = peer_watch._start_time(child.pid)
        processes = LocalProcesses()
        processes.add(1, type(own)(own.kernel, own.host, child.pid, started or 0))
        assert processes.ended() == set()
        child.kill()
        assert wait_until(lambda: processes.ended() == {1})
        processes.close()


def test_a_process_whose_name_is_no_text_is_watched_as_any_other() -> None:
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'cut ) \\xe8\\xae', 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert b"\xe8\xae)" in Path(f"/proc/{child.pid}/stat").read_bytes()
        assert peer_watch._start_time(child.pid)
        child.kill()


@pytest.fixture
def links() -> Iterator[tuple[HostLinks, HostLinks]]:
    """Those of a leader, and of rank 3, which has a link to it."""
    leader, other = HostLinks(0, "127.0.0.1"), HostLinks(3, "127.0.0.1")
    other.connect(0, leader.listen())
    assert wait_until(lambda: not leader.ended() and not leader.needs(3) and not other.needs(0))
    yield leader, other
    leader.close()
    other.close()


def test_a_link_tells_an_end_from_a_goodbye(links: tuple[HostLinks, HostLinks]) -> None:
    leader, other = links
    other.close()
    assert wait_until(lambda: leader.needs(3) or leader.ended())
    assert leader.ended() == set()
    again = HostLinks(3, "127.0.0.1")
    assert leader.address is not None
    again.connect(0, leader.address)
    assert wait_until(lambda: not leader.ended() and not leader.needs(3) and not again.needs(0))
    again.forget()  # as a kernel does when a process ends
    assert wait_until(lambda: leader.ended() == {3})


def test_a_host_that_does_not_answer_is_told_and_is_no_end(
    links: tuple[HostLinks, HostLinks],
) -> None:
    leader, _ = links

    class Unanswered:
        """A link on which keepalives have had no answer."""

        def __init__(self, link: socket.socket) -> None:
            self._link = link
            os.set_blocking(link.fileno(), False)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._link, name)

        def recv(self, _: int) -> bytes:
            raise TimeoutError(110, "Connection timed out")

    link = leader._open[3]
    leader._open[3] = Unanswered(link)  # type: ignore[assignment]
    link.shutdown(socket.SHUT_RD)  # makes it readable
    assert wait_until(lambda: leader.ended() == set() and leader.unreachable())
    assert leader.unreachable()[3] >= 10
    assert leader.needs(3)


def test_a_link_sends_keepalives_that_miss_a_host_within_ten_seconds(links: tuple[HostLinks, HostLinks]) -> None:
    for each, rank in zip(links, (3, 0), strict=True):
        link = each._open[rank]
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, probes = (link.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * probes <= 10


def give_up(links: HostLinks, rank: int) -> None:
    """Closes a link as a kernel does whose keepalives had no answer: it answers later packets by a reset."""
    link = links._open.pop(rank)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


@pytest.mark.parametrize("gives_up", ["leader", "other"])
def test_a_rank_that_gave_up_a_link_which_did_not_answer_is_not_taken_for_ended(
    links: tuple[HostLinks, HostLinks], gives_up: str
) -> None:
    leader, other = links
    give_up(*((leader, 3) if gives_up == "leader" else (other, 0)))
    if gives_up == "leader":
        assert wait_until(lambda: not other.ended() and not leader.ended() and 3 in leader._open and 0 in other._open)
    else:
        assert wait_until(lambda: not leader.ended() and leader.needs(3))
        assert leader.unreachable()
    assert (leader.ended(), other.ended()) == (set(), set())


def test_a_rank_whose_link_is_reset_and_that_listens_no_more_has_ended(links: tuple[HostLinks, HostLinks]) -> None:
    leader, other = links
    assert leader._listening is not None
    leader._listening.close()
    give_up(leader, 3)
    assert wait_until(lambda: other.ended() == {0})


def test_calls_that_begin_at_once_open_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    threads = SimpleNamespace(begin=lambda _, run: begun.append(run))
    monkeypatch.setattr(host_links, "shared_threads", lambda: threads)
    leader, other = HostLinks(0, "127.0.0.1"), HostLinks(3, "127.0.0.1")
    address = leader.listen()
    other.connect(0, address)
    assert not other.needs(0)
    other.connect(0, address)
    assert len(begun) == 1  # of two, one end could drop the first and the other the second
    begun[0]()
    assert wait_until(lambda: not leader.ended() and not leader.needs(3))
    assert other.ended() == set()
    other.close()
    leader.close()


def test_a_rank_that_closes_before_it_has_seen_a_link_is_not_taken_for_ended() -> None:
    leader, other = HostLinks(0, "127.0.0.1"), HostLinks(3, "127.0.0.1")
    other.connect(0, leader.listen())
    assert wait_until(lambda: 0 in other._open)
    leader.close()
    assert wait_until(lambda: other.ended() or other.needs(0))
    assert other.ended() == set()
    other.close()


def test_a_stranger_is_no_rank(links: tuple[HostLinks, HostLinks]) -> None:
    leader, _ = links
    assert leader.address is not None
    with socket.create_connection(("127.0.0.1", leader.address.port)) as stranger:
        stranger.sendall(host_links._HELLO.pack(bytes(16), 5))
        assert wait_until(lambda: leader.ended() == set() and not leader._new)
    assert leader.needs(5)
    assert leader.ended() == set()


def test_strangers_that_send_nothing_hold_few_descriptors_and_keep_no_rank_away(
    links: tuple[HostLinks, HostLinks], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, _ = links
    monkeypatch.setattr(host_links, "MAX_SILENT", 4)
    assert leader.address is not None
    silent = [socket.create_connection(("127.0.0.1", leader.address.port)) for _ in range(12)]
    assert wait_until(lambda: leader.ended() == set() and len(leader._new) == 4)
    assert [each.recv(1) for each in silent[:8]] == [host_links._CLOSED] * 8
    late = HostLinks(5, "127.0.0.1")
    late.connect(0, leader.address)
    assert wait_until(lambda: not leader.ended() and not leader.needs(5))
    for each in silent:
        each.close()
    late.close()


def test_a_link_that_was_closed_before_its_hello_arrived_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where many open links at once, or strangers connect and send nothing."""

    def not_yet(*_: object) -> None:
        raise BlockingIOError

    leader, other = HostLinks(0, "127.0.0.1"), HostLinks(3, "127.0.0.1")
    with monkeypatch.context() as patch:
        patch.setattr(host_links, "MAX_SILENT", 0)
        patch.setattr(HostLinks, "_admit", not_yet)
        other.connect(0, leader.listen())
        assert wait_until(lambda: 0 in other._open)
        link = other._open[0]
        leader.ended()
    assert wait_until(lambda: not other.ended() and other._open.get(0, link) is not link)
    assert wait_until(lambda: not leader.ended() and not leader.needs(3))
    leader.close()
    assert wait_until(lambda: not other.ended() and other.needs(0))
    assert other.unreachable() == {}
    other.close()


def test_ranks_on_one_host_open_no_port() -> None:
    store = dist.HashStore()
    watches = [PeerWatch(store, rank, 3, 64) for rank in range(3)]
    threads = {*threading.enumerate()}
    for watch in watches:
        watch.introduce()
    for watch in watches:
        watch.meet()
    assert watches[0].ended([1, 2]) == []
    assert store.num_keys() == 3  # a presence of each, no address
    assert {*threading.enumerate()} <= threads  # one of another test may have ended
    for watch in watches:
        watch.close()


def test_a_watch_that_was_closed_takes_nobody_for_ended() -> None:
    store = dist.HashStore()
    watches = [PeerWatch(store, rank, 3, 64) for rank in range(3)]
    for watch in watches:
        watch.introduce()
    watches[0].meet()
    watches[0].close()  # with the group, while a save in the background waits
    with Path(os.devnull).open() as reuses_a_descriptor:
        assert watches[0].ended([1, 2]) == []
        assert not reuses_a_descriptor.closed


def test_a_process_of_another_host_with_the_same_kernel_id_is_not_looked_for_on_this_one() -> None:
    """Virtual machines that are copies of one have that."""
    store, own = dist.HashStore(), own_presence()
    copy = type(own)(own.kernel, f"not-{own.host}", 1 << 29, own.started)
    store.set("bytecheckpoint/presence/1", msgspec.msgpack.encode(copy))  # type: ignore[arg-type]
    watch = PeerWatch(store, 0, 2, 64)
    watch.introduce()
    watch.meet()
    watch.ended([1])
    time.sleep(2 * peer_watch._LAST_MESSAGES_S)
    assert watch.ended([1]) == []
    watch.close()
