"""Background work that is awaited."""

from __future__ import annotations

import threading
import time

import pytest

from bytecheckpoint.manager.after_commit.retried_work import RetriedWork


def test_waiting_for_work_that_may_not_fail_takes_no_processor() -> None:
    released = threading.Event()
    work = RetriedWork("test", lambda: released.wait(0.5), what="the work")
    work.ask()
    began = time.thread_time()
    assert work.wait(began=time.monotonic(), failing_s=0.0, hanging_s=30.0) is None
    assert time.thread_time() - began < 0.1
    work.close()


def test_a_failure_ends_the_wait_at_once() -> None:
    def fail() -> None:
        raise ValueError("refused")

    work = RetriedWork("test", fail, what="the work")
    work.ask()
    began = time.monotonic()
    assert isinstance(work.wait(began=began, failing_s=0.0, hanging_s=30.0), ValueError)
    assert time.monotonic() - began < 10
    work.close()


def test_work_that_failed_before_it_was_closed_is_not_awaited() -> None:
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("refused")

    work = RetriedWork("test", fail, what="the work")
    work.ask()
    assert failed.wait(30)
    work.close()
    began = time.monotonic()
    assert isinstance(work.wait(began=began, failing_s=30.0, hanging_s=30.0), ValueError)
    assert time.monotonic() - began < 10


def test_work_whose_thread_could_not_start_is_done_when_it_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done = threading.Event()
    work = RetriedWork("test", done.set, what="the work")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            work.ask()
    assert work.wait(began=time.monotonic(), failing_s=0.0, hanging_s=30.0) is None
    work.ask()
    assert work.wait(began=time.monotonic(), failing_s=0.0, hanging_s=10.0) is None
    assert done.is_set()
    work.close()
