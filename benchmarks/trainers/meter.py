"""Times the saves of a training loop that somebody else runs: the calls, the steps beside them, the files."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shared.memory import PeakMemory, own_memory

TAIL_STEPS = 2
"""Steps after a checkpoint is durable that still count: memory is freed then."""
MEMORY_PERIOD_S = 0.004
FIRST_STEPS = 2
"""Steps after which all that training takes has been allocated once."""


class SaveTiming(NamedTuple):
    """Seconds of one save on one rank."""

    stall: float
    """Seconds until the call returned."""
    durable: float
    """Seconds from the call until the last file was there."""
    lost: float
    """Stall, and what the steps until durable took longer than as many undisturbed ones."""


class Meter:
    """Counts the steps of an optimizer and the calls of a save."""

    def __init__(self, *, samples_memory: bool = False, notes_state: bool = False) -> None:
        """`samples_memory`: no process of this rank has saved before, so the memory of the first save shows."""
        self.notes_state = notes_state
        self._steps: list[float] = []
        self._calls: list[tuple[float, float]] = []
        self._samples_memory = samples_memory
        self._sampled: PeakMemory | None = None
        """Running."""
        self._most_trained, self._memory = 0, 0
        self._state: Callable[[], dict[str, str]] | None = None
        self.digests: dict[str, str] = {}
        """Of the state that the newest call saved, if `notes_state` asks for them."""

    def holds(self, state: Callable[[], dict[str, str]]) -> None:
        """Takes the function that gives the digests of what is saved."""
        self._state = state

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts each step of this optimizer."""
        optimizer.register_step_post_hook(lambda *_: self.step())

    def step(self) -> None:
        """Counts a step, for frameworks whose optimizer has no hooks."""
        self._steps.append(time.time())
        if self._samples_memory and len(self._steps) == FIRST_STEPS and not self._calls:
            self._sample()

    def timed(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `save` with its calls timed."""

        @wraps(save)
        def call(*arguments: Any, **named: Any) -> Any:
            if self.notes_state and self._state is not None:
                self.digests = self._state()
            with self._memory_of_call():
                started = time.time()  # not perf_counter: it is compared with times of files
                try:
                    return save(*arguments, **named)
                finally:
                    self._calls.append((started, time.time()))

        return call

    def finish(self) -> None:
        """Ends the sampling of memory: no save is under way. Called again, it does nothing."""
        if self._sampled is not None:
            self._memory = max(self._memory, self._end_sample().most - self._most_trained)

    @property
    def memory(self) -> int:
        """Bytes that the first save took at its peak, 0 if nobody asked: during its call beyond what the process had
        before, and after it, until the next one, beyond the most that undisturbed steps take.
        """
        self.finish()
        return self._memory

    def record(self) -> str:
        """Returns what was counted, for `take` in another process."""
        return json.dumps({"steps": self._steps, "calls": self._calls, "memory": self.memory, "digests": self.digests})

    def take(self, record: str, *, skipped: int) -> None:
        """Counts what another process has recorded, but for its first saves."""
        taken = json.loads(record)
        self._steps += taken["steps"]
        self._calls += map(tuple, taken["calls"][skipped:])
        self._memory, self.digests = taken["memory"], taken["digests"]

    @contextmanager
    def _memory_of_call(self) -> Iterator[None]:
        if not self._samples_memory or self._calls:
            self.finish()
            yield
            return
        if self._sampled is not None:
            self._most_trained = self._end_sample().most
        with PeakMemory(own_memory, period_s=MEMORY_PERIOD_S) as peak:
            yield
        self._memory = peak.bytes
        if self._most_trained:  # a save in the background goes on
            self._sample()

    def _sample(self) -> None:
        self._sampled = PeakMemory(own_memory, period_s=MEMORY_PERIOD_S)
        self._sampled.__enter__()

    def _end_sample(self) -> PeakMemory:
        sampled, self._sampled = self._sampled, None
        if sampled is None:
            raise ValueError("no memory is sampled")
        sampled.__exit__(None, None, None)
        return sampled

    def timings(self, checkpoints: Sequence[Path]) -> list[SaveTiming]:
        """Returns one for each call; `checkpoints` are the files or folders that they wrote, in order."""
        if len(checkpoints) != len(self._calls):
            raise ValueError(f"{len(self._calls)} saves wrote {[path.name for path in checkpoints]}")
        whole = list(zip(self._calls, map(newest_file, checkpoints), strict=True))
        step = statistics.median(self._undisturbed([(start, max(end, last)) for (start, end), last in whole]))
        return [self._timing(start, end, max(end, last), step) for (start, end), last in whole]

    def _undisturbed(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        steps = zip(self._steps, self._steps[1:], strict=False)
        return [after - before for before, after in steps if all(after < start or before > end for start, end in spans)]

    def _timing(self, start: float, end: float, durable: float, step: float) -> SaveTiming:
        begun = max((at for at in self._steps if at <= start), default=start)
        later = [at for at in self._steps if at > start]
        counted = sum(at <= durable for at in later) + TAIL_STEPS
        window = later[: min(counted, len(later))]
        lost = window[-1] - begun - len(window) * step if window else end - start
        return SaveTiming(end - start, durable - start, lost)


def newest_file(path: Path) -> float:
    """Returns when the last file below `path` was written."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return max(file.stat().st_mtime for file in files)


def num_bytes(path: Path) -> int:
    """Returns bytes of all files at or below `path`."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def by_age(folder: Path) -> list[Path]:
    """Returns what lies in `folder`, the oldest first, without links and hidden files."""
    found = [path for path in folder.iterdir() if not path.is_symlink() and not path.name.startswith(".")]
    return sorted(found, key=newest_file)
