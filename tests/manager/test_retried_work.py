"""Background work that is awaited."""

from __future__ import annotations

import threading
import time

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
