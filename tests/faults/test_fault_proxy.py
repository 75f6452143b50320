"""The proxy does to requests what it says, and the look at what came of it sees what is wrong."""

from __future__ import annotations

import http.client
import io
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from storage.s3_server import S3Server, running_s3

import bytecheckpoint as bcp
from faults.fault_proxy import FOR_GOOD, KINDS, REQUESTS, Fault, FaultProxy, Pace, running_proxy
from faults.fault_schedules import draw_schedule
from faults.moto_bucket import Bucket, what_is_partial
from faults.seams import files_under, state_of

DATA = bytes(range(256)) * 1000
PATH = "/bucket/run/data/x"
KEY = PATH[1:]
LONG_S = 60.0
BROKEN = (ConnectionError, http.client.HTTPException)


@pytest.fixture
def server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with running_proxy(server.server_port) as proxy:
        yield proxy


def ask(
    proxy: FaultProxy,
    method: str,
    body: bytes | None = None,
    *,
    path: str = PATH,
    gives_up: Callable[[], bool] | None = None,
) -> tuple[int, bytes]:
    """Status and body of the answer. Waits for it for very long, or briefly from when `gives_up` returns True."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=LONG_S)
    try:
        connection.request(method, path, body)
        if gives_up is not None:
            wait_until(gives_up)
            connection.sock.settimeout(0.3)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def fault(kind: str, where: str = "any", *, first: int = 1, count: int = 1, num_bytes: int = 0) -> Fault:
    return Fault(kind, where, first, count, num_bytes, is_reset=True)


def test_what_meets_no_fault_passes(proxy: FaultProxy) -> None:
    proxy.begin([], Pace(latency_s=0.001, bytes_per_s=1e8))
    assert ask(proxy, "PUT", DATA)[0] == 200
    assert ask(proxy, "GET") == (200, DATA)
    assert ask(proxy, "HEAD") == (200, b"")
    proxy.heal()
    assert [line.split()[0] for line in proxy.lines] == ["PUT", "GET", "HEAD"]


def test_a_refused_request_does_not_reach_the_server(server: S3Server, proxy: FaultProxy) -> None:
    proxy.begin([fault("refuse")])
    status, body = ask(proxy, "PUT", DATA)
    assert (status, b"SlowDown" in body) == (503, True)
    assert server.requests == []
    assert ask(proxy, "PUT", DATA)[0] == 200


def has_come_so_far(server: S3Server, proxy: FaultProxy, is_done: bool) -> bool:
    """Whether a request has met its fault, and the server has what it is to have of it."""
    return bool(proxy.met) and (KEY in server.objects or not is_done)


@pytest.mark.parametrize(
    ("kind", "is_done"),
    [("reset", False), ("cut_request", False), ("cut_answer", True), ("stall_request", False), ("stall_answer", True)],
)
@pytest.mark.parametrize("num_bytes", [0, 10])
def test_a_request_that_fails(server: S3Server, proxy: FaultProxy, kind: str, is_done: bool, num_bytes: int) -> None:
    proxy.begin([fault(kind, num_bytes=num_bytes)])
    stalls = kind.startswith("stall")
    with pytest.raises(TimeoutError if stalls else BROKEN):
        ask(proxy, "PUT", DATA, gives_up=partial(has_come_so_far, server, proxy, is_done) if stalls else None)
    proxy.heal()
    assert (KEY in server.objects) == is_done
    assert len(proxy.met) == 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_an_answer_is_cut_within_its_body(server: S3Server, proxy: FaultProxy, is_reset: bool) -> None:
    server.objects[KEY] = DATA
    proxy.begin([fault("cut_answer", "get", num_bytes=5000)._replace(is_reset=is_reset)])
    with pytest.raises(BROKEN):
        ask(proxy, "GET")
    assert ask(proxy, "GET") == (200, DATA)


def test_a_late_request_is_carried_out_when_nobody_waits_any_more(server: S3Server, proxy: FaultProxy) -> None:
    proxy.begin([fault("late", "data")])
    with pytest.raises(TimeoutError):
        ask(proxy, "PUT", DATA, gives_up=lambda: bool(proxy.met))
    proxy.heal()
    assert server.objects == {KEY: DATA}


def test_faults_are_for_the_requests_that_they_name(server: S3Server, proxy: FaultProxy) -> None:
    proxy.begin([fault("refuse", "data", first=2, count=2), fault("refuse", "manifest", count=FOR_GOOD)])
    statuses = [ask(proxy, "PUT", b"x")[0] for _ in range(4)]
    assert statuses == [200, 503, 503, 200]
    assert {ask(proxy, "PUT", b"x", path="/bucket/run/manifest.bcp")[0] for _ in range(5)} == {503}
    assert ask(proxy, "GET")[0] == 200


def test_what_looks_at_a_request_and_fails_does_not_vanish(server: S3Server, proxy: FaultProxy) -> None:
    proxy.before_passing = lambda _: 1 // 0
    with pytest.raises(BROKEN):
        ask(proxy, "PUT", DATA)
    assert server.requests == []
    with pytest.raises(ZeroDivisionError):
        proxy.heal()
    proxy.before_passing = None
    assert ask(proxy, "PUT", DATA)[0] == 200
    proxy.heal()


def test_a_server_that_is_gone_is_a_connection_that_ends() -> None:
    with running_proxy(9) as proxy, pytest.raises(BROKEN):
        ask(proxy, "GET")


def test_schedules_are_the_same_for_the_same_seed_and_have_everything_in_them() -> None:
    schedules = [draw_schedule(seed) for seed in range(500)]
    assert schedules == [draw_schedule(seed) for seed in range(500)]
    faults = [fault for schedule in schedules for fault in (*schedule.save_faults, *schedule.load_faults)]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.where for fault in faults} == set(REQUESTS)


def test_parts_of_objects_are_seen(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(0, 1.0))
    objects = {f"run/{name}": (tmp_path / name).read_bytes() for name in files_under(tmp_path)}
    assert len(objects) == 3
    assert what_is_partial(objects) == []
    for key, content in objects.items():
        for num_bytes in (0, 7, len(content) // 2, len(content) - 1):
            assert what_is_partial({key: content[:num_bytes]}) == [key]


class Held:
    """An object as moto holds it."""

    def __init__(self, *, is_disposed: bool) -> None:
        self._buffer = io.BytesIO(DATA)
        if is_disposed:
            self._buffer.close()

    @property
    def value(self) -> bytes:
        return self._buffer.getvalue()


def test_an_object_that_is_replaced_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{KEY: Held(is_disposed=True)}, {KEY: Held(is_disposed=False)}])
    monkeypatch.setattr(Bucket, "_stored", lambda *_: next(looks))
    assert Bucket(9, "bucket").objects("run/") == {KEY: DATA}
    monkeypatch.setattr(Bucket, "_stored", lambda *_: {KEY: Held(is_disposed=True)})
    with pytest.raises(ValueError, match="closed"):
        Bucket(9, "bucket").objects("run/")
