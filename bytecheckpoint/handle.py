"""A save that is under way: its handle, the one background thread that finishes it, and what happens to it when the
interpreter ends. It knows nothing of what a save does.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import thread as _futures_thread  # noqa: F401  registers its exit hook before ours
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from bytecheckpoint.awaited_threads import AwaitedThreads, is_refusal
from bytecheckpoint.errors import CheckpointError, CheckpointSaveError
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.kept import Kept
from bytecheckpoint.ranks import Ranks
from bytecheckpoint.snapshot import Snapshot
from bytecheckpoint.spare_threads import SpareThreads

_NICE = 5
"""How far background threads step back behind training, as nice(2) counts."""


class SaveHandle:
    """A save, finished or under way. Methods may be called from any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._entered = threading.Event()
        self._staged = threading.Event()
        self._shared: Snapshot | None = None
        """What is being staged in the background, if it is."""
        self._future: Future[CheckpointInfo] = Future()
        self._error: BaseException | None = None
        self._was_seen = False
        self._let_go: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        state = "failed" if self._failed() else "done" if self.done() else "under way"
        return f"<SaveHandle {self._path}: {state}>"

    def staged(self) -> None:
        """Blocks until the training state may change again. Raises what the save raised if it failed before."""
        self._await_staging()
        if self._failed():
            self.result()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Blocks until the checkpoint is durable and committed on every rank; `timeout` is in seconds.

        Raises the error with which the save failed on any rank, or TimeoutError when it is still under way.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._future.result()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Blocks like `result`, and returns the error, or None for a checkpoint that is committed."""
        if not self.done():
            _AWAITED.refuse()
        error = self._future.exception(timeout)
        self._was_seen = True
        self._let_go()
        return error

    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Calls `fn(handle)` once the save has ended, at once if it has; from the thread that ends it."""
        self._future.add_done_callback(lambda _: fn(self))

    def _failed(self) -> bool:
        return self._error is not None

    def was_interrupted(self) -> bool:
        """Whether it ended with something that is no failure of its own."""
        return self._error is not None and not isinstance(self._error, Exception)

    def _unseen_error(self) -> BaseException | None:
        """The error of a failed save that nobody has asked for; asking here counts."""
        error = None if self._was_seen else self._error
        self._was_seen = self._was_seen or error is not None
        return error

    def _await_staging(self) -> None:
        """Who waits takes part: the background stages with few threads, which step back behind training."""
        if self._staged.is_set():
            return
        _AWAITED.refuse()
        shared = self._shared
        if shared is not None:
            try:
                with _AWAITED.here():
                    shared.stage()
            except Exception as error:  # the background meets the same, and tells all ranks
                if is_refusal(error):
                    raise
        self._staged.wait()

    def when_told(self, let_go: Callable[[], object]) -> None:
        """Calls this, perhaps more than once, when the save has ended and nobody need be told of it any more."""
        self._let_go = let_go

    def enter(self, ranks: Ranks) -> None:
        """From now on other calls may begin: it is certain which one this save is to all ranks."""
        ranks.enter()
        self._entered.set()

    def share(self, snapshot: Snapshot) -> None:
        """The snapshot will be staged in the background: from now on, who waits for that takes part."""
        self._shared = snapshot

    def stage(self, snapshot: Snapshot) -> None:
        """Stages, and lets the training state change. A failure is for the writer to meet, who tells all ranks."""
        try:
            snapshot.stage()
        except BaseException as error:
            if isinstance(error, Exception) and not is_refusal(error):
                snapshot.fail(error)
                return
            self._was_seen = True  # the caller gets it here and now
            message = f"staging was interrupted by {type(error).__name__}; nothing was committed"
            snapshot.fail(CheckpointSaveError(message, kind="rank_failed"))
            raise
        else:
            self._staged.set()
        finally:
            self._shared = None

    def finish(self, finish: Callable[[], CheckpointInfo], turn: ExitStack) -> None:
        """Runs the rest of the save, ends its turn and keeps its outcome. Whatever it raises is for `result`."""
        info = None
        try:
            info = finish()
        except BaseException as error:  # noqa: BLE001  a lost error would be a lost checkpoint
            self._error = error
            _clear_frames(error)
        del finish  # this frame, which is at work, is one of those that the error keeps
        # The turn ends first: what waits for the outcome, callbacks too, may well save again.
        turn.close()
        self._shared = None
        self._entered.set()
        self._staged.set()
        if info is not None:
            self._future.set_result(info)
        else:
            self._future.set_exception(self._error)
        if info is not None or self._was_seen:
            self._let_go()


class InFlight:
    """The asynchronous save that this process has under way: at most one."""

    def __init__(self) -> None:
        self.kept = Kept()
        """What saves leave for those that follow."""
        self._of_parents: list[Kept] = []
        self._held_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._watched: list[SaveHandle] = []
        """The save that is under way, or has failed and nobody knows; no other: an error that a handle keeps and has
        raised knows the caller's frames, and the state in them. Each save has a list of its own, emptied in one step.
        """
        self._has_hooks = False
        self._is_exiting = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that may begin a save: when it is over, its thread is awaited no longer.

        Raises CheckpointSaveError on a thread that a save waits for: in a signal handler, or what the state calls.
        """
        _AWAITED.refuse()
        try:
            yield
        finally:
            _AWAITED.leave()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the save that is under way, then holds back others. Raises its error if nobody has seen it."""
        _AWAITED.refuse()
        self._add_hooks()
        turn = self._turn
        turn.acquire()
        try:
            with _AWAITED.here():
                self._raise_unseen()
                yield
        finally:
            turn.release()

    @property
    def _handle(self) -> SaveHandle | None:
        return next(iter(self._watched), None)

    def _watch(self, handle: SaveHandle) -> None:
        self._watched = watched = [handle]
        handle.when_told(watched.clear)

    def _raise_unseen(self) -> None:
        handle = self._handle
        self._watched = []
        error = handle._unseen_error() if handle is not None else None
        if handle is not None and isinstance(error, CheckpointError):
            message = f"the asynchronous save to {handle._path} failed, and this one was not begun: {error.message}"
            raise type(error)(message, kind=error.kind, path=error.path, step=error.step, ranks=error.ranks) from error
        if error is not None:
            raise error

    def start(
        self,
        handle: SaveHandle,
        finish: Callable[[], CheckpointInfo],
        turn: ExitStack,
        *,
        give_up: Callable[[], object],
    ) -> bool:
        """Finishes a save, and the turn that it takes over, on a thread of its own. False where there can be none.

        There, and where the caller is interrupted before there is such a thread, `give_up` is called and the turn
        stays with the caller.
        """
        self._watch(handle)
        claim = threading.Lock()
        """On the turn: of the thread that begins, or of the caller that is interrupted before it has."""
        own_turn = ExitStack()

        def run() -> None:
            if claim.acquire(blocking=False):
                handle.finish(finish, own_turn)

        try:
            own_turn.push(turn.pop_all())
            if in_background("bcp-save", run):
                return True
        except BaseException:
            if claim.acquire(blocking=False):
                self._watched = []
                turn.push(own_turn)
                give_up()
            raise
        turn.push(own_turn)
        give_up()
        return False

    def is_told_at_once(self, handle: SaveHandle) -> bool:
        """Whether a save that was written in the call raises there what its handle would raise: what interrupted it, as
        Ctrl-C does, is meant for the caller, and when the interpreter is exiting, nobody may come to ask.
        """
        return self._is_exiting or handle.was_interrupted()

    def hold(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """From now on, a step of these optimizers waits while the save in flight is staging."""
        for optimizer in optimizers:
            if optimizer not in self._held_optimizers:
                self._held_optimizers.add(optimizer)
                optimizer.register_step_pre_hook(self._wait_for_staging)

    def wait_until_entered(self) -> None:
        """Returns when another call may begin: ranks count their calls, and must count them in the same order."""
        handle = self._handle
        if handle is not None and not handle._entered.is_set():
            _AWAITED.refuse()
            handle._entered.wait()

    def wait_until_staged(self) -> None:
        """Returns when no save in flight needs the training state any more, well or not."""
        handle = self._handle
        if handle is not None:
            handle._await_staging()

    def _wait_for_staging(self, *_: Any) -> None:
        self.wait_until_staged()

    def _add_hooks(self) -> None:
        with self._lock:
            if self._has_hooks:
                return
            self._has_hooks = True
        try:
            # atexit comes too late: by then concurrent.futures refuses work, which the save needs to finish.
            threading._register_atexit(self._wait)  # type: ignore[attr-defined]
        except RuntimeError:  # it is as late as that, and no thread begins any more that would have to be awaited
            self._is_exiting = True
        atexit.register(self._report)
        os.register_at_fork(after_in_child=self._forget)

    def _wait(self) -> None:
        self._is_exiting = True
        handle = self._handle
        if handle is not None:
            handle._future.exception()

    def _report(self) -> None:
        """The last word about a failed save whose error nobody has seen: printed, and an exit code of 1."""
        handle = self._handle
        error = handle._unseen_error() if handle is not None else None
        if handle is None or error is None:
            return
        print(f"bytecheckpoint: the save to {handle._path} failed and was not committed:", file=sys.stderr)  # noqa: T201
        traceback.print_exception(error, file=sys.stderr)
        atexit.unregister(self._report)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exit function cannot change the exit code in any other way

    def _forget(self) -> None:
        """A forked child has a copy of the handle, but not the thread that would finish it."""
        self._watched = []
        self._turn = threading.Lock()
        # Its memory is not the child's, but freeing it here could free what has come to lie in the same place.
        self._of_parents.append(self.kept)
        self.kept = Kept()


def _clear_frames(error: BaseException | None) -> None:
    """An error that a handle keeps must not keep the state, which the functions that it came through knew."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _step_back() -> None:
    """Lets training go first, from here on, where this thread and those that it starts compete with it."""
    with suppress(OSError, AttributeError):  # on Linux a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def in_background(name: str, do: Callable[[], None]) -> bool:
    """Does it on a thread of its own, which the interpreter waits for, one that steps back. False, with nothing done,
    where the process can have no more threads or the interpreter is exiting.
    """

    def run() -> None:
        _step_back()
        do()

    try:
        _THREADS.begin(name, run)
    except CheckpointError:  # a signal handler's
        raise
    except RuntimeError:
        return False
    return True


_THREADS = SpareThreads(is_awaited=True)
_AWAITED = AwaitedThreads()


IN_FLIGHT = InFlight()
"""One a process, because a process has one exit code, and staging memory for one save."""
