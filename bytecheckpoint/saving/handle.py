"""A save as its caller sees it: how far it is, what came of it, and that a failure is not lost. Which saves there are,
and which thread finishes them, is in in_flight.py.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointSaveError
from bytecheckpoint.info import CheckpointInfo, LocalInfo
from bytecheckpoint.runtime.reentrancy import AWAITED, is_refusal
from bytecheckpoint.staging.snapshots import Snapshot


class SaveHandle:
    """A save, finished or under way. Methods may be called from any thread."""

    def __init__(self, path: str, *, is_staged: bool) -> None:
        self._path = path
        self._entered = threading.Event()
        self._staged = threading.Event()
        self._shared: Snapshot | None = None
        """What is being staged in the background, if it is."""
        self._local: Future[LocalInfo] | None = Future() if is_staged else None
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

    def local(self, timeout: float | None = None) -> LocalInfo:
        """Blocks until every rank's data is durable in the local stage, so that `bcp.recover` could commit it after a
        crash. Of a disk without room, the data is at the path then. `timeout` is in seconds.

        Raises the error with which the save failed before, TimeoutError when it is not that far, and
        CheckpointMismatchError (conflict) where the save has no local stage.
        """
        if self._local is None:
            raise CheckpointMismatchError(
                f"the save to {self._path} has no local stage, so there is nothing to wait for: give it "
                "SaveOptions.local_stage, or wait for result()",
                kind="conflict",
                path=self._path,
            )
        if not self._local.done():
            AWAITED.refuse()
        error = self._local.exception(timeout)
        if error is not None:
            self._was_seen = True
            self._let_go()
            raise error
        return self._local.result()

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
            AWAITED.refuse()
        error = self._future.exception(timeout)
        self._was_seen = True
        self._let_go()
        return error

    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Calls `fn(handle)` once the save has ended, at once if it has; from the thread that ends it."""
        self._future.add_done_callback(lambda _: fn(self))

    def _failed(self) -> bool:
        return self._error is not None

    def _was_interrupted(self) -> bool:
        """Whether it ended with something that is no failure of its own."""
        return self._error is not None and not isinstance(self._error, Exception)

    def _unseen_error(self) -> BaseException | None:
        """The error of a failed save that nobody has asked for; asking here counts."""
        error = None if self._was_seen else self._error
        if error is not None:
            self._was_seen = True
            self._let_go()
        return error

    def _await_staging(self) -> None:
        """Who waits takes part: the background stages with few threads, which step back behind training."""
        if self._staged.is_set():
            return
        AWAITED.refuse()
        shared = self._shared
        if shared is not None:
            try:
                with AWAITED.here():
                    shared.stage()
            except Exception as error:  # the background meets the same, and tells all ranks
                if is_refusal(error):
                    raise
        self._staged.wait()

    def _when_told(self, let_go: Callable[[], object]) -> None:
        """Calls this, perhaps more than once, when the save has ended and nobody need be told of it any more."""
        self._let_go = let_go

    def _enter(self, ranks: Ranks) -> None:
        """From now on other calls may begin: it is certain which one this save is to all ranks."""
        ranks.enter()
        self._entered.set()

    def _reach_local(self, info: LocalInfo) -> None:
        """Every rank's data is durable in the local stage."""
        if self._local is not None:
            self._local.set_result(info)

    def _share(self, snapshot: Snapshot) -> None:
        """The snapshot will be staged in the background: from now on, who waits for that takes part."""
        self._shared = snapshot

    def _stage(self, snapshot: Snapshot) -> None:
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

    def _finish(self, finish: Callable[[], CheckpointInfo], turn: ExitStack) -> None:
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
            if self._local is not None and not self._local.done():
                self._local.set_exception(self._error)
            self._future.set_exception(self._error)
        if info is not None or self._was_seen:
            self._let_go()


def _clear_frames(error: BaseException | None) -> None:
    """An error that a handle keeps must not keep the state, which the functions that it came through knew."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)
        _clear_frames(error.__cause__)
        _clear_frames(error.__context__ if error.__context__ is not error.__cause__ else None)
