"""Seeded faults between saves and loads and their object store. `python tests/faults/object_store_faults.py` runs as
many schedules as one likes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from distributed.workers import WorkerPool
from faults.fault_proxy import FOR_GOOD, Fault, FaultProxy, running_proxy
from faults.fault_schedules import draw_schedule
from faults.moto_bucket import Bucket, running_moto
from faults.object_store_faults import MAY_BE_COMMITTED, NEW, BrokenPromiseError, Lane, Trial
from faults.s3_calls import Place, load_there, save_there

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of client libraries
    pytest.mark.filterwarnings("ignore:.*cannot be cleaned up"),  # a save that finds out, and goes on
]

NUM_QUICK = 10
QUICK = [seed for seed in range(4 * NUM_QUICK) if not draw_schedule(seed).takes_long][:NUM_QUICK]
"""The campaign `object-store` goes through many more."""


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[Bucket, FaultProxy]]:
    with running_moto() as bucket, running_proxy(bucket.port) as proxy:
        yield bucket, proxy


@pytest.mark.parametrize("seed", QUICK)
def test_faults_of_the_network(workers: WorkerPool, proxied: tuple[Bucket, FaultProxy], seed: int) -> None:
    bucket, proxy = proxied
    Trial(draw_schedule(seed), bucket, proxy, workers).run()
    bucket.clear(f"seed{seed}/")


def test_a_look_at_the_commit_that_fails_breaks_the_trial_and_not_the_next(
    workers: WorkerPool, proxied: tuple[Bucket, FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, num_left = Bucket.objects, [1]

    def failing_once(bucket: Bucket, prefix: str) -> dict[str, bytes]:
        if num_left and threading.current_thread() is not threading.main_thread():
            num_left.pop()
            raise ZeroDivisionError("seen from the proxy")
        return objects(bucket, prefix)

    monkeypatch.setattr(Bucket, "objects", failing_once)
    lane = Lane(*proxied, workers)
    schedule = draw_schedule(QUICK[0])
    _, broken = lane.run(schedule._replace(save_faults=(), load_faults=()))
    assert isinstance(broken, BrokenPromiseError)
    assert "seen from the proxy" in str(broken)
    assert not num_left
    _, outcome = lane.run(schedule)
    assert not isinstance(outcome, BrokenPromiseError), outcome


@pytest.mark.parametrize(
    ("attempt", "num_failing"),
    [
        (1, 1),
        pytest.param(1, 2, marks=pytest.mark.long),
        pytest.param(1, 3, marks=pytest.mark.long),
        pytest.param(1, FOR_GOOD, marks=pytest.mark.long),
        pytest.param(2, 1, marks=pytest.mark.long),
        (2, FOR_GOOD),
    ],
)
def test_the_answer_to_the_commit_is_lost_and_then_the_server(
    workers: WorkerPool, proxied: tuple[Bucket, FaultProxy], attempt: int, num_failing: int
) -> None:
    """Who cannot find out whether he has committed removes nothing. The second attempt hears that something stands."""
    bucket, proxy = proxied

    def lose_the_server(line: str) -> None:
        is_commit = line.startswith("PUT") and "/manifest.bcp" in line
        if is_commit and sum(each.startswith(line) for each in proxy.lines) == attempt:
            proxy.before_passing = None
            proxy.begin([Fault("reset", "any", 1, num_failing, 0, is_reset=True)])

    timeout_s = 5 if num_failing == FOR_GOOD else 60  # all of which it waits where nobody ever answers
    place = Place("s3://bucket/lost/run", 1, proxy.url, timeout_s=timeout_s, stalled_s=20, in_parts=False)
    proxy.begin([Fault("cut_answer", "manifest", 1, 1, 0, is_reset=True)])
    proxy.before_passing = lose_the_server
    (saved,) = workers.run(save_there, place, NEW, world_size=1, process_group=False)
    proxy.heal()
    assert proxy.before_passing is None
    direct = place._replace(endpoint=bucket.url, timeout_s=60, stalled_s=20)
    (loaded,) = workers.run(load_there, direct, world_size=1, process_group=False)
    bucket.clear("lost/")
    assert loaded.value == NEW
    assert saved.error is None or (num_failing == FOR_GOOD and MAY_BE_COMMITTED in saved.error.message), saved
