"""How background work steps back behind training where both want a core. On Linux each thread has a priority of its
own, with which the threads that it starts begin; elsewhere nothing is done.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICE = 5
"""How much further back than the process, as nice(2) counts."""
_LAST = 19
"""Nobody stands further back."""

Priority = tuple[int, int]
"""As nice(2) counts, and the scheduling policy."""


def priority() -> Priority:
    """Of this thread; the same for all where threads have none of their own."""
    if sys.platform != "linux":
        return 0, 0
    this = threading.get_native_id()
    nice, policy = os.getpriority(os.PRIO_PROCESS, this), os.SCHED_OTHER
    with suppress(OSError):  # where it may not be asked for, nobody has another one
        policy = os.sched_getscheduler(this)
    return nice, policy


def lower_priority() -> None:
    """Lets training go first, from here on: this thread gets a smaller share of a core that both want, and takes none
    away from training at the moment at which it is woken, which would make a call wait that only meant to tell it
    something.
    """
    if sys.platform != "linux":
        return
    this = threading.get_native_id()
    nice = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICE, _LAST)
    with suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, this) < nice:  # who has stepped back before stays there
            os.setpriority(os.PRIO_PROCESS, this, nice)
        if os.sched_getscheduler(this) == os.SCHED_OTHER:
            os.sched_setscheduler(this, os.SCHED_BATCH, os.sched_param(0))
