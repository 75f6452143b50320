from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import uuid

import pytest

from bytecheckpoint.storage.backends import s3_throttle
from bytecheckpoint.storage.backends.s3_throttle import Brake


class Clock:
    """A monotonic clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Stop(threading.Event):
    """Notes how long it is waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return False


@pytest.fixture
def clock(monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr(s3_throttle, "time", clock)
    monkeypatch.setattr(s3_throttle.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(s3_throttle.random, "uniform", lambda low, _high: low)
    return clock


def held_s(brake: Brake) -> float:
    stop = Stop()
    brake.hold(stop, at_most_s=1000)
    return sum(stop.waits)


def test_nobody_waits_before_a_complaint_and_no_file_is_made(clock, tmp_path):
    assert held_s(Brake("s")) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_complaint_holds_every_brake_of_the_service_and_no_other(clock):
    first, second, other = Brake("s"), Brake("s"), Brake("t")
    assert held_s(second) == 0
    first.slow_down()
    assert held_s(first) == held_s(second) == 0.5
    assert held_s(other) == 0
    clock.now += 0.5
    assert held_s(second) == 0


def test_pauses_double_up_to_a_limit_and_are_forgotten(clock):
    first, second = Brake("s"), Brake("s")
    pauses = []
    for brake in (first, second) * 4:
        brake.slow_down()
        pauses.append(held_s(second))
        clock.now += pauses[-1]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 20, 20]
    clock.now += 61
    first.slow_down()
    assert held_s(second) == 0.5


def test_nobody_waits_longer_than_the_request_may_take(clock):
    brake, stop = Brake("s"), Stop()
    brake.slow_down()
    brake.hold(stop, at_most_s=0.2)
    brake.hold(stop, at_most_s=-1.0)
    assert stop.waits == [0.2, 0.0]


def test_complaints_about_requests_that_were_under_way_count_once(clock):
    brake = Brake("s")
    for _ in range(5):
        brake.slow_down()
    assert held_s(brake) == 0.5


def test_a_file_from_before_the_host_started_or_with_nonsense_holds_nobody(clock, tmp_path):
    brake = Brake("s")
    brake.slow_down()
    (path,) = tmp_path.iterdir()
    for content in (s3_throttle._STATE.pack(1e9, 20.0), b"\xff" * 16, b"short"):
        path.write_bytes(content)
        assert held_s(Brake("s")) == 0


def test_where_no_file_can_be_made_a_process_still_holds_itself(clock, monkeypatch):
    monkeypatch.setattr(s3_throttle.tempfile, "gettempdir", lambda: "/nowhere/at/all")
    brake = Brake("s")
    brake.slow_down()
    assert held_s(brake) == 0.5


def test_a_link_that_somebody_put_there_is_not_followed(clock, tmp_path):
    brake = Brake("s")
    target = tmp_path / "precious"
    target.write_bytes(b"do not touch")
    os.symlink(target, brake._path)
    brake.slow_down()
    assert target.read_bytes() == b"do not touch"
    assert held_s(brake) == 0.5


@pytest.mark.parametrize("make", [os.link, lambda _target, path: os.mkfifo(path)], ids=["hard link", "pipe"])
def test_what_is_more_than_a_file_of_its_own_is_not_taken(clock, tmp_path, make):
    brake = Brake("s")
    target = tmp_path / "precious"
    target.write_bytes(b"do not touch, all of it")
    make(target, brake._path)
    brake.slow_down()
    assert target.read_bytes() == b"do not touch, all of it"
    assert held_s(brake) == 0.5


def test_a_temporary_folder_without_space_costs_no_more_than_the_sharing(clock, monkeypatch):
    """A file with a hole in it would be had, and the first store into it would be the end of the process."""

    def write(_fd, _content, _offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(s3_throttle.os, "pwrite", write)
    brake = Brake("s")
    brake.slow_down()
    assert held_s(brake) == 0.5
    assert os.path.getsize(brake._path) == 0


def test_a_file_that_came_from_a_full_folder_is_not_stored_into(clock, monkeypatch):
    monkeypatch.setattr(s3_throttle.os, "pwrite", lambda _fd, _content, _offset: 5)
    brake = Brake("s")
    brake.slow_down()
    assert held_s(brake) == 0.5


def test_who_finds_no_file_does_not_undo_what_another_thread_slows_down(clock, monkeypatch):
    monkeypatch.setattr(s3_throttle.tempfile, "gettempdir", lambda: "/nowhere/at/all")
    brake = Brake("s")
    slowing = threading.Thread(target=brake.slow_down)

    def find_none(_path, flags):
        if not flags:
            slowing.start()
            slowing.join(timeout=0.2)  # it ends only where it need not wait for who looks

    with monkeypatch.context() as patch:
        patch.setattr(s3_throttle, "_shared_memory", find_none)
        held_s(brake)
        slowing.join()
    assert held_s(brake) == 0.5


def test_a_complaint_holds_other_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(s3_throttle.tempfile, "gettempdir", lambda: str(tmp_path))
    name = uuid.uuid4().hex
    code = f"from bytecheckpoint.storage.backends.s3_throttle import Brake; Brake({name!r}).slow_down()"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    brake = Brake(name)
    brake.hold(Stop(), at_most_s=1000)
    assert brake._memory is not None
    _, pause_s = s3_throttle._STATE.unpack_from(brake._memory)
    assert pause_s == 0.5
