"""The state kept as it was by a forked child, which sees the memory of the call for as long as it lives: the kernel
copies a page only when training changes it. Linux, host tensors.

The child does nothing but copy bytes into memory that it shares with this process, on request. It takes no lock, starts
no thread, calls no torch, opens no file: what other threads held at the fork cannot stop it. Everything that can fail
slowly, storage above all, stays in this process.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import select
import signal
import struct
import sys
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.memory_maps import memory_areas
from bytecheckpoint.priorities import step_back
from bytecheckpoint.staging import LiveFile
from bytecheckpoint.storage.scratch import Scratch

_REQUEST = struct.Struct("<qqqQ")
"""Number of the file, byte offset, byte length, address to copy it to."""
_DONE = b"+"
_LOOK_MS = 500
"""How often either side makes sure that the other still lives."""
_RELEASE_BYTES = 1 << 16
"""Less memory than this at one place is not worth a system call to give back."""
_MADV_DONTNEED = 4
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
"""What the child still dies of, but for SIGKILL. The rest is for training: schedulers signal whole process groups, and
a program that takes SIGTERM to end in good order needs its save more than ever. The child ends when its parent does.
"""
_FIRST_OWN_DESCRIPTOR = 3
"""After standard input, output and error."""
_SPARE_DESCRIPTORS = 64
"""How many other threads may open between a look at the open ones and the fork."""

_Madvise = Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int]


def can_fork() -> bool:
    """Whether this platform has what a forked snapshot needs."""
    return sys.platform == "linux"


class ForkedState:
    """The state as it was when this was made."""

    def __init__(self, files: Sequence[LiveFile], shared: Scratch) -> None:
        """`shared` is scratch memory that is the same in forked children."""
        private = _PrivateMemory()
        for file in files:
            file.copy_apart(private.holds)
        shared.allocate()
        self._shared = shared
        self._child = _Child(files)

    def stage(self) -> None:
        """The fork was the staging."""

    def fail(self, error: BaseException) -> None:
        """Nothing can fail after the fork."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    @contextmanager
    def content(self, file: int, byte_offset: int, byte_length: int) -> Iterator[memoryview]:
        with self._shared.lend() as block:
            address = ctypes.addressof(ctypes.c_char.from_buffer(block))
            self._child.gather(file, byte_offset, byte_length, address)
            yield block[:byte_length]

    def close(self) -> None:
        self._child.end()


class _PrivateMemory:
    """The address ranges of this process of which a forked child gets a copy: not those that it would share."""

    def __init__(self) -> None:
        bounds = [(area.start, area.end) for area in memory_areas() if area.is_private]
        self._starts = [start for start, _ in bounds]
        self._ends = [end for _, end in bounds]

    def holds(self, address: int, num_bytes: int) -> bool:
        end = address + num_bytes
        while address < end:
            index = bisect_right(self._starts, address) - 1
            if index < 0 or self._ends[index] <= address:
                return False
            address = self._ends[index]
        return True


class _Child:
    """The process that holds the copy, and the pipes to and from it."""

    def __init__(self, files: Sequence[LiveFile]) -> None:
        self._lock = threading.Lock()
        last_descriptor = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + _SPARE_DESCRIPTORS
        requests, self._requests, self._answers, answers = _two_pipes()
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        parent, madvise = os.getpid(), ctypes.CDLL(None).madvise
        # A handler of the training's must not run in the child, so no signal arrives before it has taken its own.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._pid = _fork()
            if self._pid == 0:
                _serve(requests, answers, files, parent=parent, madvise=madvise, last_descriptor=last_descriptor)
        except OSError as error:
            os.close(self._requests)
            os.close(self._answers)
            raise _no_fork(error) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(requests)
            os.close(answers)

    def gather(self, file: int, byte_offset: int, byte_length: int, address: int) -> None:
        with self._lock:
            try:
                os.write(self._requests, _REQUEST.pack(file, byte_offset, byte_length, address))
                answer = self._read_answer()
            except BrokenPipeError:
                answer = b""
            if answer != _DONE:
                raise self._died()

    def _read_answer(self) -> bytes:
        while not self._poll.poll(_LOOK_MS):
            if not self._is_alive():
                return b""
        return os.read(self._answers, 1)

    def _is_alive(self) -> bool:
        try:
            return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def _died(self) -> CheckpointSaveError:
        reason = "of an unknown cause: something else in this process has waited for it"
        with suppress(ChildProcessError):
            result = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
            if result is not None and result.si_code == os.CLD_EXITED:
                reason = f"with exit code {result.si_status}"
            elif result is not None:
                reason = f"of signal {result.si_status} ({signal.Signals(result.si_status).name})"
        return CheckpointSaveError(
            f"the forked process (pid {self._pid}) that held the state as it was at the call died {reason}. The save "
            "was given up and nothing was committed; training and the next save are not affected. Look at the kernel's "
            "log for an out-of-memory kill, or use snapshot='copy'",
            kind="writer_died",
        )

    def end(self) -> None:
        with self._lock:
            os.close(self._requests)
            os.close(self._answers)
            if self._is_alive():  # else something may have waited for it, and its number be another process's by now
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def _no_fork(error: OSError) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"the process could not be forked for snapshot='fork': {error}; nothing was written, and training is not "
        "affected: raise the limit of processes or of committed memory, or use 'copy' or 'lazy'",
        kind="rank_failed",
    )


def _two_pipes() -> tuple[int, int, int, int]:
    """Both ends of two pipes, or none of them."""
    try:
        first = os.pipe()
        try:
            return *first, *os.pipe()
        except OSError:
            for descriptor in first:
                os.close(descriptor)
            raise
    except OSError as error:
        raise _no_fork(error) from error


def _fork() -> int:
    is_warned_of = sys.version_info >= (3, 12)
    if not is_warned_of:
        return os.fork()
    with warnings.catch_warnings():
        # It warns of forking beside threads, whose locks a child may need. This one needs none.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(
    requests: int, answers: int, files: Sequence[LiveFile], *, parent: int, madvise: _Madvise, last_descriptor: int
) -> NoReturn:
    """The whole life of the child. It never returns, and runs no exit function of the training's."""
    exit_code = 1
    try:
        gc.disable()  # finalizers of the training's objects are not for the child
        for number in signal.valid_signals():
            with suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL if number in _FAULTS else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        _close_all_but({requests, answers}, last_descriptor)
        step_back()
        owners = _SoleOwners(files)
        poll = select.poll()
        poll.register(requests, select.POLLIN)
        while os.getppid() == parent:
            request = os.read(requests, _REQUEST.size) if poll.poll(_LOOK_MS) else None
            if request == b"":
                break
            if request:
                number, byte_offset, byte_length, address = _REQUEST.unpack(request)
                _copy(files[number], byte_offset, byte_length, address)
                os.write(answers, _DONE)
                owners.give_back(files[number].memory_of(byte_offset, byte_length), madvise)
        exit_code = 0
    finally:
        os._exit(exit_code)


def _close_all_but(kept: set[int], last_descriptor: int) -> None:
    """Lets go of what the training has open: who waits for the end of a pipe or a connection must not wait for us."""
    bounds = [_FIRST_OWN_DESCRIPTOR - 1, *sorted(kept), last_descriptor + 1]
    for before, after in pairwise(bounds):
        os.closerange(before + 1, after)


def _copy(file: LiveFile, byte_offset: int, byte_length: int, address: int) -> None:
    into = (ctypes.c_char * byte_length).from_address(address)
    file.gather(byte_offset, memoryview(into).cast("B"))


class _SoleOwners:
    """The memory that exactly one place in one file is gathered from, which can be given back after that."""

    def __init__(self, files: Sequence[LiveFile]) -> None:
        pieces = sorted(piece for file in files for piece in file.memory_of(0, file.planned.byte_length))
        self._shared: set[tuple[int, int]] = set()
        reach, last = 0, (0, 0)
        for piece in pieces:
            if piece[0] < reach:
                self._shared |= {piece, last}
            if piece[1] > reach:
                reach, last = piece[1], piece
        self._pieces = pieces

    def give_back(self, memory: Iterable[tuple[int, int]], madvise: _Madvise) -> None:
        """Lets go of the pages that lie wholly in this memory: training can then change them without a copy."""
        for start, end in memory:
            index = bisect_right(self._pieces, (start, sys.maxsize)) - 1
            first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            num_bytes = end // mmap.PAGESIZE * mmap.PAGESIZE - first
            if num_bytes >= _RELEASE_BYTES and self._pieces[index] not in self._shared:
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), _MADV_DONTNEED)
