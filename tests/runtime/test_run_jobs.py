"""Jobs on several threads are all done, or an error says so, also where threads are short; and saves rely on that."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.runtime import threads as threads_module
from bytecheckpoint.runtime.threads import map_looks, run_jobs, shared_threads
from bytecheckpoint.staging.file_image import LiveFile

WAIT_S = 20


@pytest.fixture
def one_more_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """One thread starts; a second one cannot."""
    start = threading.Thread.start
    started: list[str] = []

    def scarce(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    shared_threads.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", scarce)
    return started


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_job_is_done_once(num_threads: int) -> None:
    done: list[int] = []
    run_jobs(done.append, range(100), num_threads=num_threads)
    assert sorted(done) == list(range(100))


def test_nothing_is_at_work_any_more_when_threads_were_short(one_more_thread: list[str]) -> None:
    done: list[int] = []

    def do(number: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        done.append(number)

    run_jobs(do, range(10), num_threads=4)
    assert one_more_thread
    assert sorted(done) == list(range(10))


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_an_error_of_any_thread_is_raised(num_threads: int) -> None:
    def do(number: int) -> None:
        if number == 7:
            raise MemoryError("seven")

    with pytest.raises(MemoryError, match="seven"):
        run_jobs(do, range(50), num_threads=num_threads)


def test_an_error_of_a_thread_is_raised_where_threads_were_short(one_more_thread: list[str]) -> None:
    begun = threading.Event()

    def do(_: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            raise MemoryError("beside")
        assert begun.wait(WAIT_S)

    with pytest.raises(MemoryError, match="beside"):
        run_jobs(do, range(50), num_threads=4)
    assert one_more_thread


def test_compressed_values_are_right_where_threads_are_short(tmp_path: Path, one_more_thread: list[str]) -> None:
    state = {"weights": {f"w{number}": torch.randn(3 << 20).bfloat16() for number in range(6)}}
    bcp.save(tmp_path, state, options=bcp.SaveOptions(codec="zstd", writer_threads=4))
    assert one_more_thread
    found = bcp.open(tmp_path).state_dict("weights.")
    assert all(torch.equal(found[name], tensor) for name, tensor in state["weights"].items())


def test_an_interrupted_staging_is_told_once_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weights": torch.ones(1000)}
    with monkeypatch.context() as patch:
        patch.setattr(LiveFile, "gather", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bcp.save(tmp_path, state, step=1, async_save=True)
    bcp.save(tmp_path, state, step=2, async_save=True).result(20)
    assert bcp.steps(tmp_path) == [2]


def test_quick_looks_stay_on_the_thread_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "_QUICK_LOOK_S", 60.0)
    looked: set[int] = set()
    found = map_looks(lambda number: looked.add(threading.get_ident()) or number, range(100), num_threads=4)
    assert found == list(range(100))
    assert looked == {threading.get_ident()}


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="waits are counted on Linux")
def test_looks_that_wait_only_for_the_processor_stay_on_the_thread_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads_module, "_QUICK_LOOK_S", -1.0)
    looked: set[int] = set()
    map_looks(lambda _: looked.add(threading.get_ident()), range(100), num_threads=4)
    assert looked == {threading.get_ident()}


def test_looks_that_wait_for_the_store_are_made_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "_QUICK_LOOK_S", -1.0)
    meeting = threading.Barrier(4)

    def look(number: int) -> int:
        time.sleep(1e-4)
        if number >= 96:  # the last four wait for one another
            meeting.wait(WAIT_S)
        return number

    assert map_looks(look, iter(range(100)), num_threads=4) == list(range(100))
