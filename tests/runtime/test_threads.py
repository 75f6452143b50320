"""Threads that are kept for the next job."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from queue import SimpleQueue

import pytest

from bytecheckpoint.runtime.thread_priority import lower_priority
from bytecheckpoint.runtime.threads import ThreadPool

WAIT_S = 20


def thread_of_a_job(threads: ThreadPool) -> tuple[threading.Thread, str]:
    """The thread that did it, and what it was called meanwhile."""
    done = threading.Event()
    seen: list[tuple[threading.Thread, str]] = []

    def do() -> None:
        seen.append((threading.current_thread(), threading.current_thread().name))
        done.set()

    threads.begin("at work", do)
    assert done.wait(WAIT_S)
    while seen[0][0].name == "at work":  # it is not spare again before
        time.sleep(0.001)
    return seen[0]


def test_the_next_job_is_done_by_the_same_thread() -> None:
    threads = ThreadPool(is_awaited=False)
    first, name = thread_of_a_job(threads)
    second, _ = thread_of_a_job(threads)
    assert first is second
    assert name == "at work"
    assert first.name != name


def test_jobs_at_the_same_time_have_a_thread_each() -> None:
    threads = ThreadPool(is_awaited=False)
    meeting = threading.Barrier(4)
    for _ in range(3):
        threads.begin("meet", lambda: meeting.wait(WAIT_S))
    meeting.wait(WAIT_S)


def test_a_job_that_raises_leaves_its_thread_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: SimpleQueue[BaseException | None] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda about: raised.put(about.exc_value))
    threads = ThreadPool(is_awaited=False)
    threads.begin("fail", lambda: 1 // 0)
    assert isinstance(raised.get(timeout=WAIT_S), ZeroDivisionError)
    thread_of_a_job(threads)


def test_a_thread_that_cannot_start_is_an_error_and_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = ThreadPool(is_awaited=False)
    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError):
            threads.begin("fail", lambda: done.append(1))
    thread_of_a_job(threads)
    assert done == []


def test_the_error_of_a_future_is_freed_with_it_without_a_collection() -> None:
    class JobError(Exception): ...

    def fail() -> None:
        raise JobError

    threads = ThreadPool(is_awaited=False)
    gc.collect()
    gc.disable()
    try:
        future = threads.submit("at work", fail)
        error = weakref.ref(future.exception(WAIT_S))  # type: ignore[type-var]
        del future
        deadline = time.monotonic() + WAIT_S
        while error() is not None and time.monotonic() < deadline:  # until the thread has left the job
            time.sleep(0.001)
        assert error() is None
    finally:
        gc.enable()


def test_a_forked_child_has_threads_of_its_own() -> None:
    threads = ThreadPool(is_awaited=False)
    thread_of_a_job(threads)
    child = os.fork()
    if child == 0:
        done = threading.Event()
        threads.begin("child", done.set)
        os._exit(0 if done.wait(WAIT_S) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_thread_has_the_priority_of_who_asks_for_it() -> None:
    """One that a background thread started stands back behind training, and must not be lent to the training thread."""
    threads = ThreadPool(is_awaited=False)
    done = threading.Event()

    def step_back_and_begin() -> None:
        lower_priority()
        threads.begin("background", done.set)

    background = threading.Thread(target=step_back_and_begin)
    background.start()
    background.join()
    assert done.wait(WAIT_S)
    thread, _ = thread_of_a_job(threads)
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == os.getpriority(os.PRIO_PROCESS, 0)
    assert os.sched_getscheduler(thread.native_id) == os.sched_getscheduler(0)


def test_a_thread_that_steps_back_interrupts_nobody_when_it_is_woken() -> None:
    """A training thread that tells the background something would otherwise lose its core to it at once."""
    seen: list[tuple[int, int]] = []

    def look() -> None:
        lower_priority()
        this = threading.get_native_id()
        seen.append((os.getpriority(os.PRIO_PROCESS, this), os.sched_getscheduler(this)))

    background = threading.Thread(target=look)
    background.start()
    background.join()
    ((nice, policy),) = seen
    assert nice > os.getpriority(os.PRIO_PROCESS, 0)
    assert policy == os.SCHED_BATCH != os.sched_getscheduler(0)


ON_A_THREAD = """
import os, threading
from bytecheckpoint.runtime.thread_priority import lower_priority

os.nice(max(10 - os.nice(0), 0))

def work():
    for _ in range(2):  # a thread that is kept for the next job does so again
        lower_priority()
    print(os.getpriority(os.PRIO_PROCESS, os.getpid()), os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_background_work_steps_back_behind_training_that_stands_back_itself() -> None:
    done = subprocess.run([sys.executable, "-c", ON_A_THREAD], capture_output=True, text=True, check=True)
    training = max(os.getpriority(os.PRIO_PROCESS, 0), 10)
    assert done.stdout.split() == [str(training), str(min(training + 5, 19))]


AT_EXIT = """
import atexit, threading, time
from bytecheckpoint.runtime.threads import ThreadPool

threads = ThreadPool(is_awaited=True)

def too_late():
    try:
        threads.begin("late", print)
    except RuntimeError as error:
        print(error)

atexit.register(too_late)
done = threading.Event()
threads.begin("quick", done.set)
done.wait()
threads.begin("slow", lambda: (time.sleep(0.3), print("done")))
"""


JOINS_ALL = """
import threading
from bytecheckpoint.runtime.threads import ThreadPool

threads = ThreadPool(is_awaited=True)
done = threading.Event()
threads.begin("quick", done.set)
done.wait()
for thread in threading.enumerate():
    if thread is not threading.current_thread() and not thread.daemon:
        thread.join()
print("joined")
"""


def test_a_program_may_join_all_its_threads() -> None:
    ended = subprocess.run([sys.executable, "-c", JOINS_ALL], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "joined\n"


def test_the_interpreter_ends_after_the_jobs_and_begins_no_more() -> None:
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split("\n") == ["done", "the interpreter is exiting", ""]
    assert ended.stderr == ""
