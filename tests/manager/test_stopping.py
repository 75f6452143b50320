"""A request to stop, of any rank and at any moment, becomes a stop at the same boundary on all ranks."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from bytecheckpoint.distributed.ranks import group_store
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manager.agreement import stopping
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.manager.agreement.stopping import GroupStop, SoleStop, StopRequests, join_stop
from distributed.workers import WorkerDied, WorkerPool


def requests_of(*signals: str, deadlines: tuple[float, ...] = (), needed_s: float = 0.0) -> StopRequests:
    return StopRequests(signals, deadlines=deadlines, needed_s=lambda: needed_s)


def open_stop(rank: int, world_size: int, requests: StopRequests, timeout_s: float = 30) -> GroupStop:
    store = group_store(dist.group.WORLD)
    return GroupStop(
        requests, store, token="test", rank=rank, global_ranks=range(10, 10 + world_size), timeout_s=timeout_s
    )


def test_a_signal_sets_a_flag_and_the_old_handler_comes_back() -> None:
    old = signal.getsignal(signal.SIGUSR2)
    requests = requests_of("SIGUSR2")
    stop = SoleStop(requests)
    assert not stop.pass_boundary()
    os.kill(os.getpid(), signal.SIGUSR2)
    assert stop.pass_boundary()
    assert stop.reason == "SIGUSR2"
    requests.close()
    assert signal.getsignal(signal.SIGUSR2) == old


def test_a_signal_that_is_named_twice_is_handled_once() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGIO, lambda number, _: seen.append(number))
    try:
        requests = requests_of("SIGIO", "SIGPOLL", "SIGIO")  # two names of one signal
        assert requests._handle not in requests._old_handlers.values()  # it would call itself without end
        os.kill(os.getpid(), signal.SIGIO)
        assert (requests.reason, seen) == ("SIGIO", [])
        requests.close()
        os.kill(os.getpid(), signal.SIGIO)
        assert seen == [signal.SIGIO]
    finally:
        signal.signal(signal.SIGIO, before)


def test_a_handler_that_came_later_is_left_in_its_place() -> None:
    old = signal.getsignal(signal.SIGUSR2)
    requests = requests_of("SIGUSR2")
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    requests.close()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    signal.signal(signal.SIGUSR2, old)


def test_a_signal_to_a_forked_child_does_what_it_did_before_and_does_not_stop_the_parent() -> None:
    requests = requests_of("SIGUSR2")
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2
    assert not requests.reason
    requests.close()


def test_a_signal_stops_all_managers_of_a_process_and_none_after_they_are_closed_in_any_order() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    try:
        first, second = requests_of("SIGUSR2"), requests_of("SIGUSR2")
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (first.reason, second.reason, seen) == ("SIGUSR2", "SIGUSR2", [])
        first.close()
        second.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert seen == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_signal_stops_the_manager_that_is_open_also_if_an_earlier_one_was_closed() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    try:
        first, second = requests_of("SIGUSR2"), requests_of("SIGUSR2")
        first.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (first.reason, second.reason, seen) == ("", "SIGUSR2", [])
        second.close()
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_old_handler_comes_back_in_whatever_order_managers_close() -> None:
    old = signal.getsignal(signal.SIGTERM)
    first, second = requests_of("SIGTERM"), requests_of("SIGTERM")
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGTERM) == old


def test_outside_of_the_main_thread_there_is_a_warning_and_no_handler(caplog: pytest.LogCaptureFixture) -> None:
    old = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=requests_of, args=("SIGUSR2",))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) == old
    assert "stops cannot be requested by SIGUSR2" in caplog.text


def test_a_deadline_begins_the_stop_when_one_more_step_and_its_save_just_fit() -> None:
    assert not requests_of(deadlines=(time.time() + 100,), needed_s=50).reason
    assert requests_of(deadlines=(time.time() + 100,), needed_s=101).reason == "deadline"


@pytest.mark.parametrize("set_by_s", [-3600, 3600])
def test_a_clock_that_is_set_moves_no_deadline_that_is_counted_from_now(
    monkeypatch: pytest.MonkeyPatch, set_by_s: int
) -> None:
    near, far, real = requests_of(needed_s=50), requests_of(needed_s=50), time.time
    near.request("near", deadline_s=49)
    far.request("far", deadline_s=1000)
    monkeypatch.setattr(stopping.time, "time", lambda: real() + set_by_s)
    assert (near.reason, far.reason) == ("near", "")


def test_a_requested_stop_keeps_its_first_reason() -> None:
    requests = requests_of()
    requests.request("first", deadline_s=None)
    requests.request("second", deadline_s=None)
    assert requests.reason == "first"


def test_a_stop_that_is_requested_without_a_reason_is_a_stop() -> None:
    requests = requests_of()
    requests.request("", deadline_s=None)
    assert requests.reason == "requested"


def test_a_stop_that_was_requested_with_a_deadline_keeps_the_reason_of_that_request() -> None:
    requests = requests_of(deadlines=(time.time() + 100,), needed_s=50)
    requests.request("late", deadline_s=80)
    assert not requests.reason
    requests.request("spot", deadline_s=40)
    assert requests.reason == "spot"


def stop_of_one(rank: int, world_size: int, stopping_rank: int) -> tuple[int, str]:
    """Ranks pass boundaries at speeds of their own until they are to stop."""
    requests = requests_of("SIGTERM")
    stop = open_stop(rank, world_size, requests)
    try:
        for boundary in range(1, 20_000):
            if rank == stopping_rank and boundary == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.pass_boundary():
                return boundary, stop.reason
            time.sleep(0.002 * (rank + 1))
        return 0, ""
    finally:
        dist.barrier()
        stop.close()
        requests.close()


@pytest.mark.parametrize(("world_size", "stopping_rank"), [(2, 0), (4, 3)])
def test_a_signal_to_one_rank_stops_all_at_the_same_boundary(
    workers: WorkerPool, world_size: int, stopping_rank: int
) -> None:
    found = workers.run(stop_of_one, stopping_rank, world_size=world_size)
    assert len(set(found)) == 1
    assert found[0][0] >= 5  # the watcher may see the request before its boundary was passed
    assert found[0][1] == "SIGTERM"


def close_beside_a_request(rank: int, world_size: int) -> bool:
    """Rank 0 has closed when another rank gets a request, which passes its last boundaries all the same."""
    requests = requests_of()
    stop = open_stop(rank, world_size, requests)
    if rank == 0:
        stop.pass_boundary()
        stop.close()
    dist.barrier()
    requests.request("late", deadline_s=None)
    time.sleep(0.6)
    is_stopped = stop.pass_boundary() if rank != 0 else False
    stop.close()
    return is_stopped


def test_a_rank_that_has_closed_is_not_waited_for(workers: WorkerPool) -> None:
    assert workers.run(close_beside_a_request, world_size=2) == [False, False]


def test_a_watcher_goes_on_when_the_store_answers_again_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    look, failures = GroupStop._advance, [RuntimeError("connection reset")] * 2

    def look_in_vain(stop: GroupStop) -> bool:
        if failures:
            raise failures.pop()
        return look(stop)

    monkeypatch.setattr(GroupStop, "_advance", look_in_vain)
    monkeypatch.setattr(stopping, "_POLL_S", 0.01)
    requests = requests_of()
    requests.request("now", deadline_s=None)
    stop = GroupStop(requests, dist.HashStore(), token="test", rank=0, global_ranks=[0], timeout_s=30)
    stop._watcher.join()
    assert (stop.pass_boundary(), stop.reason) == (True, "now")
    stop.close()
    assert caplog.text.count("does not answer (connection reset)") == 1
    assert "answers again" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_after_its_report_is_missed_only_if_it_has_to_give_the_verdict(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(stopping, "_POLL_S", 0.01)
    requests, store, ended = requests_of(), dist.HashStore(), 1 - rank
    requests.request("now", deadline_s=None)
    dist.PrefixStore("bytecheckpoint/stop/test", store).set(f"passed/{ended}", "0")
    stop = GroupStop(
        requests, store, token="test", rank=rank, global_ranks=[10, 11], timeout_s=30, find_ended=lambda: [ended]
    )
    stop._watcher.join()
    if rank == 0:
        assert stop.pass_boundary()
    else:
        with pytest.raises(CheckpointError, match="rank 10 did not report at which step it is: its process has ended"):
            stop.pass_boundary()
    stop.close()


def test_a_report_that_the_store_lost_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_POLL_S", 0.01)
    requests = requests_of()
    stop = GroupStop(requests, dist.HashStore(), token="test", rank=0, global_ranks=[0], timeout_s=30)
    store, lost = stop._store, []

    class LosesTheFirst:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            if not lost:
                lost.append(key)
                raise RuntimeError("connection reset")
            store.set(key, value)

    stop._store = LosesTheFirst()  # type: ignore[assignment]
    requests.request("now", deadline_s=None)
    stop._watcher.join()
    assert lost == ["passed/0"]
    assert stop.pass_boundary()
    stop.close()


def pass_boundaries(stop: GroupStop, *, at_most_s: float) -> None:
    end = time.monotonic() + at_most_s
    while time.monotonic() < end:
        assert not stop.pass_boundary()
        time.sleep(0.002)


def lose_a_rank(rank: int, world_size: int) -> tuple[str, tuple[int, ...]] | None:
    """Rank 1 has no watcher, as if its process were stopped."""
    if rank == 1:
        dist.barrier()
        return None
    requests = requests_of()
    stop = open_stop(rank, world_size, requests, timeout_s=0.5)
    requests.request("now", deadline_s=None)
    with pytest.raises(CheckpointError) as raised:  # once the watcher has seen the request
        pass_boundaries(stop, at_most_s=30)
    dist.barrier()
    stop.close()
    return raised.value.kind, raised.value.ranks


def test_a_rank_that_does_not_report_is_named_and_not_waited_for_without_end(workers: WorkerPool) -> None:
    assert workers.run(lose_a_rank, world_size=2)[0] == ("rank_missing", (11,))


def stop_beside_a_rank_that_dies(rank: int, world_size: int, dying: int) -> tuple[str, str, tuple[int, ...]]:
    Decisions(None, "run", timeout_s=30).do("meeting", lambda: None)
    requests = requests_of()
    stop = join_stop(requests, None, token="dies", timeout_s=600)
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    requests.request("now", deadline_s=None)
    with pytest.raises(CheckpointError) as raised:
        pass_boundaries(stop, at_most_s=30)
    stop.close()
    return raised.value.kind, raised.value.message, raised.value.ranks


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_whose_process_has_ended_is_named_at_once_when_a_stop_is_requested(
    workers: WorkerPool, dying: int
) -> None:
    """The others waited for its report until the time limit, which preemption does not leave them."""
    outcomes = workers.run_each(stop_beside_a_rank_that_dies, dying, world_size=3)
    assert isinstance(outcomes.pop(dying).error, WorkerDied)
    for outcome in outcomes:
        kind, message, ranks = outcome.value
        assert (kind, ranks) == ("rank_missing", (dying,))
        assert "its process has ended" in message
