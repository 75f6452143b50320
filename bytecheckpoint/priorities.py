"""How background work steps back behind training where both want a core. On Linux each thread has a priority of its
own, with which the threads that it starts begin; elsewhere nothing is done.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICE = 5
"""As nice(2) counts."""

Priority = tuple[int, int]
"""As nice(2) counts, and the scheduling policy."""


def priority() -> Priority:
    """Of this thread; the same for all where threads have none of their own."""
    if sys.platform != "linux":
        return 0, 0
    this = threading.get_native_id()
    return os.getpriority(os.PRIO_PROCESS, this), os.sched_getscheduler(this)


def step_back() -> None:
    """Lets training go first, from here on: this thread gets a smaller share of a core that both want, and takes none
    away from training at the moment at which it is woken, which would make a call wait that only meant to tell it
    something.
    """
    if sys.platform != "linux":
        return
    this = threading.get_native_id()
    with suppress(OSError):  # one that stands further back already may not come forward
        os.setpriority(os.PRIO_PROCESS, this, _NICE)
    with suppress(OSError):
        if os.sched_getscheduler(this) == os.SCHED_OTHER:
            os.sched_setscheduler(this, os.SCHED_BATCH, os.sched_param(0))
