"""StepInfo, the facts of one step that policies decide on. Knows no store and no policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step: a saved one, the one whose save is in flight, or the one at which training is now."""

    step: int
    time: float
    """Seconds since 1970 by the clock of the storage: of the commit; for a save in flight, of the call of `save`; for
    the step at which training is, now. 0.0 for that one while a policy that depends on the step alone is asked. For
    `memory_every` by the clock of rank 0's host, and for a step that memory holds of the call of `save`."""
    metrics: Mapping[str, float]
    """Metrics by name, those that were reported after the save included. NaN is a value."""
    seconds: Mapping[str, float]
    """For a committed step, seconds of its save: `stall`, for which training waited, and `total`, from the call to the
    commit; empty if the save left no record. For the step at which training is: `step`, the longest step so far, and
    `since_start`, since the manager was made. For `memory_every` only `stall` and `since_start`."""
    pinned: bool
    """True if the step is pinned: it is kept until it is unpinned."""
    committed: bool
    """False for the step whose save is in flight and for the one at which training is."""
    stopping: bool = False
    """For the step at which training is: True if all ranks have agreed to stop. A CheckpointManager saves then without
    asking a policy, so that its policies see False."""
    save_id: str = ""
    """Save id of the checkpoint; empty if there is none yet."""
    num_bytes: int = 0
    """Bytes of all its data files."""
    host_time: float = 0.0
    """For the step at which training is: seconds since 1970 by the clock of rank 0's host, by which schedulers say when
    a job ends. 0.0 while a policy that depends on the step alone is asked."""
