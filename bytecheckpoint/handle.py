"""A save that is under way: its handle, the one background thread that finishes it, and what happens to it when the
interpreter ends. It knows nothing of what a save does.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import thread as _futures_thread  # noqa: F401  registers its exit hook before ours
from contextlib import ExitStack, contextmanager

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.staging_memory import StagingMemory


class SaveHandle:
    """A save, finished or under way. Methods may be called from any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._staged = threading.Event()
        self._future: Future[CheckpointInfo] = Future()
        self._error: BaseException | None = None
        self._was_seen = False

    def __repr__(self) -> str:
        state = "failed" if self._failed() else "done" if self.done() else "under way"
        return f"<SaveHandle {self._path}: {state}>"

    def staged(self) -> None:
        """Blocks until the training state may change again. Raises what the save raised if it failed before."""
        self._staged.wait()
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
        error = self._future.exception(timeout)
        self._was_seen = True
        return error

    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Calls `fn(handle)` once the save has ended, at once if it has; from the thread that ends it."""
        self._future.add_done_callback(lambda _: fn(self))

    def _failed(self) -> bool:
        return self._error is not None

    def _unseen_error(self) -> BaseException | None:
        """The error of a failed save that nobody has asked for; asking here counts."""
        error = None if self._was_seen else self._error
        self._was_seen = self._was_seen or error is not None
        return error

    def mark_staged(self) -> None:
        """The training state may change from here on."""
        self._staged.set()

    def finish(self, finish: Callable[[], CheckpointInfo], turn: ExitStack) -> None:
        """Runs the rest of the save, ends its turn and keeps its outcome. Whatever it raises is for `result`."""
        info = None
        try:
            info = finish()
        except BaseException as error:  # noqa: BLE001  a lost error would be a lost checkpoint
            self._error = error
        # The turn ends first: what waits for the outcome, callbacks too, may well save again.
        turn.close()
        self._staged.set()
        if info is not None:
            self._future.set_result(info)
        else:
            self._future.set_exception(self._error)


class InFlight:
    """The asynchronous save that this process has under way: at most one."""

    def __init__(self) -> None:
        self.memory = StagingMemory()
        """What the save whose turn it is stages into."""
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._handle: SaveHandle | None = None
        self._has_hooks = False

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the save that is under way, then holds back others. Raises its error if nobody has seen it."""
        turn = self._turn
        turn.acquire()
        try:
            self._raise_unseen()
            yield
        finally:
            turn.release()

    def _raise_unseen(self) -> None:
        handle, self._handle = self._handle, None
        error = handle._unseen_error() if handle is not None else None
        if handle is not None and isinstance(error, CheckpointError):
            message = f"the asynchronous save to {handle._path} failed, and this one was not begun: {error.message}"
            raise type(error)(message, kind=error.kind, path=error.path, step=error.step, ranks=error.ranks) from error
        if error is not None:
            raise error

    def start(self, handle: SaveHandle, finish: Callable[[], CheckpointInfo], turn: ExitStack) -> None:
        """Finishes a save, and its turn, on a thread of its own."""
        self._add_hooks()
        self._handle = handle
        # No daemon: the interpreter waits for it, and so does `_wait` earlier, while executors still take work.
        thread = threading.Thread(target=handle.finish, args=(finish, turn), name="bcp-save")
        try:
            thread.start()
        except RuntimeError:  # there are too many threads, or the interpreter is exiting
            handle.finish(finish, turn)

    def _add_hooks(self) -> None:
        with self._lock:
            if self._has_hooks:
                return
            self._has_hooks = True
        # atexit comes too late: by then concurrent.futures refuses work, which the save needs to finish.
        threading._register_atexit(self._wait)  # type: ignore[attr-defined]
        atexit.register(self._report)
        os.register_at_fork(after_in_child=self._forget)

    def _wait(self) -> None:
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
        self._handle = None
        self._turn = threading.Lock()


IN_FLIGHT = InFlight()
"""One a process, because a process has one exit code, and staging memory for one save."""
