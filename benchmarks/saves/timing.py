"""Times one save on one rank, with training beside it where the save is asynchronous."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from saves.training import Job

UNDISTURBED_STEPS = 8
"""Number of steps timed before the save and again after it, because the machine's speed drifts."""
TAIL_STEPS = 2
"""Steps after the checkpoint is durable that still count: memory is freed and processes end then."""


class Pending(NamedTuple):
    """An asynchronous save whose call has returned."""

    wait: Callable[[], object]
    """Blocks until the checkpoint is durable; raises if it failed."""
    staged: Callable[[], object] = lambda: None
    """Blocks until the state may change."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one save on one rank."""

    stall: float
    """Seconds until the call returned."""
    durable: float
    """Seconds from the call until the checkpoint was durable."""
    lost: float
    """Training time lost: the stall, and what the steps until durable took longer than as many undisturbed ones."""
    staged: float = 0.0
    """Seconds that the first change of the state after the call had to wait. Part of `lost`, not of `stall`."""
    steps: int = 0
    """Number of training steps that ran beside the save."""
    step: float = 0.0
    """Seconds of an undisturbed step, the median."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the phases that the candidate itself reports."""


Save = Callable[[Path, Job], "Pending | dict[str, float] | None"]
"""Begins a save and returns it as Pending; or makes one and returns its phases or None; a limit returns its best
`durable`."""


def time_limit(save: Save, folder: Path, job: Job) -> Timing:
    job.held.barrier()
    best = save(folder, job)
    if not isinstance(best, dict):
        raise TypeError("a limit returns its seconds")
    return Timing(best["durable"], best["durable"], best["durable"])


def time_sync(save: Save, folder: Path, job: Job) -> Timing:
    job.held.barrier()
    started = time.perf_counter()
    phases = save(folder, job)
    seconds = time.perf_counter() - started
    return Timing(seconds, seconds, seconds, phases=phases if isinstance(phases, dict) else {})


def time_async(save: Save, folder: Path, job: Job) -> Timing:
    undisturbed = [_step_seconds(job) for _ in range(UNDISTURBED_STEPS)]
    job.held.barrier()
    started = time.perf_counter()
    pending = save(folder, job)
    stall = time.perf_counter() - started
    if not isinstance(pending, Pending):
        raise TypeError("an asynchronous save returns a Pending")
    watch = Watch(pending.wait)
    staged, steps = _train_beside(pending, watch, job)
    trained = time.perf_counter() - started - stall
    phases, ended = watch.outcome()
    step = statistics.median([*undisturbed, *(_step_seconds(job) for _ in range(UNDISTURBED_STEPS))])
    return Timing(
        stall=stall,
        durable=ended - started,
        lost=stall + trained - steps * step,
        staged=staged,
        steps=steps,
        step=step,
        phases=phases,
    )


def _step_seconds(job: Job) -> float:
    started = time.perf_counter()
    job.compute(is_done=True)
    job.update()
    return time.perf_counter() - started


def _train_beside(pending: Pending, watch: Watch, job: Job) -> tuple[float, int]:
    """Trains until the checkpoint is durable on all ranks; returns the first update's wait, and the steps."""
    staged, steps, left = 0.0, 0, TAIL_STEPS
    while left:
        all_done = job.compute(is_done=watch.is_done())
        if steps == 0:
            before = time.perf_counter()
            pending.staged()
            staged = time.perf_counter() - before
        job.update()
        steps += 1
        left -= all_done
    return staged, steps


class Watch:
    """Waits for a save on a thread of its own, so that its end is seen when it comes and not a step later."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait
        self._ended = 0.0
        self._result: object = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._wait()
        except BaseException as error:  # noqa: BLE001  raised again by outcome()
            self._error = error
        self._ended = time.perf_counter()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self) -> tuple[dict[str, float], float]:
        """Returns the phases that the candidate reports, and the time at which the save ended."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return (self._result if isinstance(self._result, dict) else {}), self._ended
