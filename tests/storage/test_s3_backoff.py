from __future__ import annotations

import threading

import pytest

from bytecheckpoint.storage.backends import s3_requests
from bytecheckpoint.storage.backends.s3_requests import ServiceBackoff


class Clock:
    """A monotonic clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Stop(threading.Event):
    """Records the lengths of waits, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return False


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(s3_requests, "time", clock)
    monkeypatch.setattr(s3_requests.random, "uniform", lambda low, _high: low)
    return clock


def held_s(backoff: ServiceBackoff) -> float:
    stop = Stop()
    backoff.hold(stop, at_most_s=1000)
    return sum(stop.waits)


def test_requests_are_not_held_before_a_slow_down(clock):
    assert held_s(ServiceBackoff()) == 0


def test_a_slow_down_holds_the_requests_of_its_store_and_no_other(clock):
    backoff, other = ServiceBackoff(), ServiceBackoff()
    backoff.slow_down()
    assert held_s(backoff) == 0.5
    assert held_s(other) == 0
    clock.now += 0.5
    assert held_s(backoff) == 0


def test_pauses_double_up_to_a_limit_and_are_forgotten(clock):
    backoff, pauses = ServiceBackoff(), []
    for _ in range(4):
        backoff.slow_down()
        pauses.append(held_s(backoff))
        clock.now += pauses[-1]
    assert pauses == [0.5, 1, 2, 2]
    clock.now += 61
    backoff.slow_down()
    assert held_s(backoff) == 0.5


def test_no_request_is_held_longer_than_it_may_take(clock):
    backoff, stop = ServiceBackoff(), Stop()
    backoff.slow_down()
    backoff.hold(stop, at_most_s=0.2)
    backoff.hold(stop, at_most_s=-1.0)
    assert stop.waits == [0.2, 0.0]


def test_slow_downs_of_requests_under_way_count_once(clock):
    backoff = ServiceBackoff()
    for _ in range(5):
        backoff.slow_down()
    assert held_s(backoff) == 0.5
