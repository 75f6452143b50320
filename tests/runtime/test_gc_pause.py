"""The garbage collector is off while anybody asks for that, and no longer; a save asks only while it plans."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from faults.seams import Seam, before, loads_as, state_of

import bytecheckpoint as bcp
from bytecheckpoint.distributed import ranks
from bytecheckpoint.runtime.gc_pause import _Pause, gc_paused
from bytecheckpoint.saving import global_plan


def thread_that_pauses() -> tuple[threading.Thread, threading.Event, threading.Event]:
    """Not begun yet; with what it sets once it has paused, and what it waits for."""
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            entered.set()
            assert leave.wait(20)

    return threading.Thread(target=pause), entered, leave


@contextmanager
def while_a_pause_ends(action: Callable[[], object]) -> Iterator[None]:
    """Pauses, and calls the action once, between the two steps of the pause's end."""
    actions = [action]
    with before(Seam(_Pause, "_end_if_empty"), lambda: actions and actions.pop()()), gc_paused():
        yield


def test_the_collector_goes_on_after_the_last_of_several_threads() -> None:
    other, entered, leave = thread_that_pauses()
    with gc_paused():
        other.start()
        assert entered.wait(20)
    is_enabled_before_the_last = gc.isenabled()
    leave.set()
    other.join()
    assert not is_enabled_before_the_last
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused(), gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_that_it_does_not_have() -> None:
    other, entered, leave = thread_that_pauses()
    other.start()
    assert entered.wait(20)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.isenabled() else 1)
    leave.set()
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_signal_handler_that_pauses_at_the_end_of_a_pause_leaves_the_collector_on() -> None:
    def pause(*_: object) -> None:
        with gc_paused():
            pass

    before_it = signal.signal(signal.SIGUSR1, pause)
    try:
        with while_a_pause_ends(partial(signal.raise_signal, signal.SIGUSR1)):
            pass
        assert gc.isenabled()
    finally:
        signal.signal(signal.SIGUSR1, before_it)
        gc.enable()


def test_training_goes_on_with_the_collector_while_a_lazy_save_waits_for_other_ranks(tmp_path: Path) -> None:
    has_returned = threading.Event()
    seen: dict[str, bool] = {}

    def agreeing() -> None:
        assert has_returned.wait(20)
        seen["waiting"] = gc.isenabled()

    def planning() -> None:
        seen["planning"] = gc.isenabled()

    lazy = bcp.SaveOptions(snapshot="lazy")
    bcp.save(tmp_path / "first", state_of(0, 1.0), async_save=True, options=lazy).result(20)  # its plan is known now
    with ExitStack() as faults:
        faults.enter_context(before(Seam(ranks.SoleRank, "reduce_scatter"), agreeing))
        faults.enter_context(before(Seam(global_plan, "merge_plain"), planning))
        handle = bcp.save(tmp_path / "second", state_of(0, 1.0), async_save=True, options=lazy)
        has_returned.set()
        handle.result(20)
    assert seen == {"waiting": True, "planning": False}
    assert loads_as(tmp_path / "second", 0, 1.0)
