"""Not one forked snapshot hangs or is wrong under busy threads and collectives. `python tests/faults/fork_stress.py`
forks as often as one likes.
"""

from __future__ import annotations

import sys

import pytest

from distributed.workers import Outcome, WorkerHung, WorkerPool
from faults.fork_stress import Load, Stress, Stressed, fork_under_load, what_is_wrong

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked snapshots are for Linux")

LIMIT_S = 90
RESTLESS = 4


@pytest.mark.parametrize(("world_size", "num_forks"), [(1, 40), (2, 20)])
def test_forks_under_load_never_hang_and_are_never_wrong(workers: WorkerPool, world_size: int, num_forks: int) -> None:
    results = workers.run(
        fork_under_load, Stress(num_forks, restless=RESTLESS), world_size=world_size, timeout_s=LIMIT_S
    )
    for stressed in results:
        assert stressed.num_wrong == 0
        assert stressed.num_restless == num_forks // RESTLESS
        assert all(stressed.rounds.values()), stressed.rounds
        assert what_is_wrong(Outcome(stressed)) is None


def test_the_campaign_sees_a_hang_a_wrong_snapshot_and_threads_that_did_nothing() -> None:
    fine = Stressed(4, 1, 1, 0.1, 1.0, {"loop": 9}, {"loop": 4}, 0)
    assert what_is_wrong(Outcome(fine)) is None
    assert "2 of 4 snapshots were not as at the fork" in (what_is_wrong(Outcome(fine._replace(num_wrong=2))) or "")
    assert "nothing was done: ['loop']" in (what_is_wrong(Outcome(fine._replace(met={"loop": 1}))) or "")
    assert "nothing was done: ['loop']" in (what_is_wrong(Outcome(fine._replace(rounds={"loop": 1}))) or "")
    assert "a fork took 31.0 s, and 30 s is the most" in (what_is_wrong(Outcome(fine._replace(longest_s=31.0))) or "")
    assert "read back under load" in (what_is_wrong(Outcome(fine._replace(num_restless=0))) or "")
    hung = WorkerHung(1, 120.0, "stacks of its threads")
    assert "rank 1 was not done after 120.0 s; it was here:\nstacks" in (what_is_wrong(Outcome(error=hung)) or "")


def test_a_thread_that_fails_is_named_and_counts_as_one_that_is_not_at_work() -> None:
    load = Load(["fails"])
    with pytest.raises(ZeroDivisionError):
        load.round("fails", lambda: 1 // 0)
    load.count_met()
    assert load.met == {"fails": 0}
    with pytest.raises(RuntimeError, match="the thread of fails has ended"):
        load.go_on_all()
