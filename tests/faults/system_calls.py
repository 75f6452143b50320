"""A child process that dies before one of its system calls, whichever thread makes it: ptrace from the process that has
forked it, which costs a hundredth of what a tracer of its own costs. Linux only.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

_TRACEME, _CONT_TO_CALL, _SET_OPTIONS, _GET_CALL = 0, 24, 0x4200, 0x420E
_SYSGOOD, _CLONE, _EXITKILL = 1, 8, 0x100000
_OPTIONS = _SYSGOOD | _CLONE | _EXITKILL
_AT_CALL = signal.SIGTRAP | 0x80
_ENTRY = 1
_WALL = 0x40000000
NEVER = sys.maxsize


@functools.cache
def _ptrace() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.restype, call.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return call


def be_traced(lane: int = 0) -> None:
    """Hands this process to its parent, which goes on with `follow`. Both stay on one core: a stop costs a tenth so.
    Lanes that run side by side have different cores, as far as there are any.
    """
    os.sched_setaffinity(0, {_core(lane)})
    if _ptrace()(_TRACEME, 0, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
    os.kill(os.getpid(), signal.SIGSTOP)


class Followed(NamedTuple):
    """The end of a child that was traced."""

    exit_code: int
    num_calls: int
    """Begun by then."""
    others: dict[int, int]
    """Exit codes of other children that ended meanwhile."""


def follow(pid: int, kill_before: int, lane: int = 0) -> Followed:
    """Lets a child that has called `be_traced` run, and kills it before the system call with this number; counts from 0
    over all its threads.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {_core(lane)})
    try:
        return _follow(pid, kill_before)
    finally:
        os.sched_setaffinity(0, before)


def _core(lane: int) -> int:
    """Returns a core of those that this process may use; the same for processes of one group."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[(os.getpgrp() + lane) % len(cores)]


def _follow(pid: int, kill_before: int) -> Followed:
    ptrace, seen = _ptrace(), (ctypes.c_ubyte * 88)()
    num_calls, threads = 0, set[int]()
    others: dict[int, int] = {}
    while True:
        tid, status = os.waitpid(-1, _WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if tid == pid:
                return Followed(os.waitstatus_to_exitcode(status), num_calls, others)
            if tid not in threads:
                others[tid] = os.waitstatus_to_exitcode(status)
            continue
        stopped_by, passed_on = os.WSTOPSIG(status), 0
        if tid not in threads:
            if tid == pid:
                ptrace(_SET_OPTIONS, pid, None, _OPTIONS)
            threads.add(tid)
        elif stopped_by == _AT_CALL:
            ptrace(_GET_CALL, tid, len(seen), ctypes.addressof(seen))
            if seen[0] == _ENTRY:
                if num_calls == kill_before:
                    os.kill(pid, signal.SIGKILL)
                num_calls += 1
        elif stopped_by != signal.SIGTRAP:
            passed_on = stopped_by
        ptrace(_CONT_TO_CALL, tid, None, passed_on)


@functools.cache
def missing_for_calls() -> str | None:
    """Returns what this machine lacks."""
    if platform.system() != "Linux":
        return "Linux"
    pid = os.fork()
    if pid == 0:
        try:
            be_traced()
        finally:
            os._exit(0)
    followed = follow(pid, 0)
    return None if followed.exit_code == -signal.SIGKILL else "the right to trace processes"
