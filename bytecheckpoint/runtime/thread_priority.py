"""Lowers the priority of background threads, for training to come first. On Linux each thread has a priority of its
own, which the threads that it starts inherit; elsewhere nothing is done.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

_NICE = 5
"""Added to the process's niceness."""
_LAST = 19
"""The highest niceness."""

Priority = tuple[int, int]
"""Niceness and scheduling policy."""


def priority() -> Priority:
    """Returns niceness and scheduling policy of this thread; (0, 0) on systems other than Linux."""
    if sys.platform != "linux":
        return 0, 0
    thread_id = threading.get_native_id()
    nice, policy = os.getpriority(os.PRIO_PROCESS, thread_id), os.SCHED_OTHER
    with suppress(OSError):  # if it cannot be read, all threads have the same
        policy = os.sched_getscheduler(thread_id)
    return nice, policy


def lower_priority() -> None:
    """Gives this thread, on Linux and from here on, a smaller share of a core that training also wants. Nor does it
    then preempt training when it is woken: a thread of training that only sends it a message would otherwise wait for
    it.
    """
    if sys.platform != "linux":
        return
    thread_id = threading.get_native_id()
    nice = min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICE, _LAST)
    with suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread_id) < nice:  # it may be lower already
            os.setpriority(os.PRIO_PROCESS, thread_id, nice)
        if os.sched_getscheduler(thread_id) == os.SCHED_OTHER:
            os.sched_setscheduler(thread_id, os.SCHED_BATCH, os.sched_param(0))
