"""A save as its caller sees it, and the progress that the handle and the background share. The queue of saves in flight
is in in_flight.py.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Literal

from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, CheckpointSaveError, with_causes
from bytecheckpoint.info import CheckpointInfo, LocalInfo
from bytecheckpoint.runtime.notebook_html import facts_html
from bytecheckpoint.runtime.progress import Progress, ProgressMeter
from bytecheckpoint.runtime.reentrancy import awaited_threads, is_refusal
from bytecheckpoint.staging.snapshots import Snapshot

HELD_LEVELS = ("process", "host", "storage")


class SaveHandle:
    """A save, finished or under way. Methods may be called from any thread.

    Those that would block raise CheckpointSaveError on a thread that a save waits for, as in a signal handler. In a
    process that was forked while the save was under way, the error of the save is a CheckpointMismatchError (conflict).
    """

    def __init__(self, progress: SaveProgress) -> None:
        self._progress = progress

    def __repr__(self) -> str:
        progress = self._progress
        state = "failed" if progress.error is not None else "done" if self.done() else "under way"
        state = "of the process that this one was forked from" if progress.is_of_parent else state
        return f"<SaveHandle {progress.path}: {state}>"

    def _repr_html_(self) -> str:
        now = self.progress()
        moved = f"{now.bytes_done:,} of {now.bytes_total:,}" if now.bytes_total else ""
        error = self._progress.error
        facts = {"phase": now.phase, "bytes of this rank": moved, "error": error and str(error)}
        return facts_html(repr(self), facts)

    def staged(self) -> None:
        """Blocks until the training state may change again. Raises the error of the save if it has failed by now,
        while staging or later.
        """
        self._progress.wait_until_staged()
        if self._progress.error is not None:
            self.result()

    def progress(self) -> Progress:
        """Returns how far this rank is: the phase, and its bytes done, bytes in all and rate. Does not block."""
        return self._progress.meter.now()

    def local(self, timeout: float | None = None) -> LocalInfo:
        """Blocks until every rank's data is durable in the local stage, so that `bcp.recover` could commit it after a
        crash. If the disk of a rank is full, the data of that rank is durable at the path instead; if rank 0's disk has
        no room for the manifest, blocks until the save is committed. `timeout` is in seconds.

        Raises the error with which the save failed before, TimeoutError if it is not that far, and
        CheckpointMismatchError (conflict) if the save has no local stage.
        """
        local = self._progress.local
        if local is None:
            raise CheckpointMismatchError(
                f"the save to {self._progress.path} has no local stage, so there is nothing to wait for: give it "
                "SaveOptions.local_stage, or wait for result()",
                kind="conflict",
                path=self._progress.path,
            )
        if not local.done():
            awaited_threads().raise_if_awaited()
        error = local.exception(timeout)
        if error is not None:
            self._progress.mark_seen()
            raise error
        return local.result()

    def held(self, level: Literal["process", "host", "storage"], timeout: float | None = None) -> CheckpointInfo:
        """Blocks until the save survives the death of its processes (`process`), of a host (`host`), or is committed
        (`storage`). `process` on any rank means that the save is whole in memory on all hosts. `timeout` is in seconds.

        Raises the error with which the save failed before, or for which it misses this level and goes on to the next;
        TimeoutError if it is not that far, CheckpointMismatchError (conflict) if the save never reaches this level, and
        ValueError for another level.
        """
        if level not in HELD_LEVELS:
            raise ValueError(f"held takes one of {', '.join(map(repr, HELD_LEVELS))}, not {level!r}")
        refusal = self._progress.never_held.get(level)
        if refusal is not None:
            raise CheckpointMismatchError(refusal, kind="conflict", path=self._progress.path)
        future = self._progress.outcome if level == "storage" else self._progress.held[level]
        if not future.done():
            awaited_threads().raise_if_awaited()
        error = future.exception(timeout)
        refusal = self._progress.never_held.get(level)  # which may be known only now
        if refusal is not None:
            raise CheckpointMismatchError(refusal, kind="conflict", path=self._progress.path)
        if error is not None:
            self._progress.mark_error_seen(error)
            raise error
        return future.result()

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Blocks until the checkpoint is durable and committed on every rank; `timeout` is in seconds. With
        `to="memory"`, until memory holds it: as `held("host")`, or as `held("process")` where one host has all copies.

        Raises the error with which the save failed on any rank, or TimeoutError if it is still under way.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._progress.outcome.result()

    def done(self) -> bool:
        """Returns True if the save has ended, with or without an error."""
        return self._progress.outcome.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Blocks like `result`; returns the error of the save, or None. Raises TimeoutError as `result` does."""
        if not self.done():
            awaited_threads().raise_if_awaited()
        error = self._progress.outcome.exception(timeout)
        self._progress.mark_seen()
        return error

    def add_done_callback(self, fn: Callable[[SaveHandle], object]) -> None:
        """Calls `fn(handle)` when the save ends, from the thread that ends it; at once, from the calling thread, if it
        has ended. An Exception of `fn` is logged, not raised.
        """
        self._progress.outcome.add_done_callback(lambda _: fn(self))


def has_failed(handle: SaveHandle) -> bool:
    """Waits for the end of a save, and returns True if it has failed. Unlike the handle's methods, this does not mark
    the error as seen by the caller, so the next save still raises it, and on a thread that the save waits for it hangs.
    """
    return handle._progress.outcome.exception() is not None


class SaveProgress:
    """Progress and outcome of one save, for its handle and for the threads that work on it."""

    def __init__(self, path: str, meter: ProgressMeter, *, has_local_stage: bool, has_memory: bool = False) -> None:
        self.path = path
        self.meter = meter
        self.is_numbered = threading.Event()
        """Set when all ranks know which call this is, so that other calls may begin."""
        self.local: Future[LocalInfo] | None = Future() if has_local_stage else None
        self.held: dict[str, Future[CheckpointInfo]] = {"process": Future(), "host": Future()} if has_memory else {}
        """Outcomes of the levels that memory has."""
        self.never_held: dict[str, str] = {}
        """Levels that the save never reaches, each with the reason."""
        if not has_memory:
            why = f"the save to {path} has no memory tier: give it SaveOptions.memory, or wait for result()"
            self.never_held = {"process": why, "host": why}
        self.outcome: Future[CheckpointInfo] = Future()
        self.error: BaseException | None = None
        self.has_ended = False
        """True once the outcome is there for all that wait. It needs no lock, which a fork may leave held."""
        self.is_of_parent = False
        """True in a forked child, if the save was in flight in its parent then."""
        self._is_staged = threading.Event()
        self._shared: Snapshot | None = None
        """Snapshot that the background stages, and that other threads may help to stage."""
        self.was_seen = False
        """True if the caller has the outcome."""
        self._seen_error: BaseException | None = None
        """Error that the caller has got before the save had ended."""
        self._on_seen: Callable[[], object] = lambda: None

    def when_seen(self, do: Callable[[], object]) -> None:
        """Sets a function to call, perhaps more than once, when the save has ended and any error of it was seen."""
        self._on_seen = do

    def mark_seen(self) -> None:
        """Records that the caller has the outcome, and calls the function of `when_seen`."""
        self.was_seen = True
        self._on_seen()

    def mark_error_seen(self, error: BaseException) -> None:
        """Records that the caller has this error. It may be that of a level which the save has missed: then the outcome
        is seen only if the save ends with the same error.
        """
        self._seen_error = error
        if error is self.error:
            self.mark_seen()

    def take_unseen_error(self) -> BaseException | None:
        """Returns the error of a failed save if the caller does not have it yet, else None, and marks it as seen."""
        error = None if self.was_seen else self.error
        if error is not None:
            self.mark_seen()
        return error

    def reach_local(self, info: LocalInfo) -> None:
        """Ends the wait of `SaveHandle.local`."""
        if self.local is not None:
            self.local.set_result(info)

    def reach(self, level: Literal["process", "host"], info: CheckpointInfo) -> None:
        """Ends the waits for a level of memory."""
        self.held[level].set_result(info)

    def miss(self, level: Literal["host"], error: CheckpointError) -> None:
        """Makes waits for a level of memory raise this error; the save goes on."""
        self.held[level].set_exception(error)

    def never_reach(self, level: Literal["host", "storage"], why: str) -> None:
        """Makes all waits for a level raise CheckpointMismatchError with this reason; for `storage`, those under way
        raise it when the save ends.
        """
        self.never_held[level] = why
        if level == "host" and not self.held[level].done():
            self.held[level].set_exception(CheckpointMismatchError(why, kind="conflict", path=self.path))

    def leave_to_parent(self) -> None:
        """Ends all waits for this save, if it has not ended, in a forked child, which has no thread that could end
        them: the save goes on in the process that began it.
        """
        if self.has_ended:
            return
        error = CheckpointMismatchError(
            f"the save to {self.path} belongs to the process that this one was forked from, and goes on there: a "
            "forked child cannot wait for it, so ask its handle or its manager in that process",
            kind="conflict",
            path=self.path,
        )
        self.is_of_parent = self.was_seen = self.has_ended = True
        self.error, self._shared = error, None
        # New ones: a thread of the parent may have held the locks of the old ones when it forked.
        self.outcome, self.held = Future(), {level: Future() for level in self.held}
        self.is_numbered, self._is_staged = threading.Event(), threading.Event()
        self.is_numbered.set()
        self._is_staged.set()
        for future in (self.outcome, *self.held.values()):
            future.set_exception(error)
        if self.local is not None:
            self.local = Future()
            self.local.set_exception(error)

    def share(self, snapshot: Snapshot) -> None:
        """Lets threads in `wait_until_staged` help: each copies a part of this snapshot."""
        self._shared = snapshot

    def wait_until_staged(self, *, helps: bool = True) -> None:
        """Waits until the training state may change, and does not raise the error of the save. With `helps`, the
        calling thread stages a part, because background threads have a low priority; then this raises
        CheckpointSaveError on a thread that a save waits for. Threads that do not train pass `helps=False`, and only
        wait.
        """
        if self._is_staged.is_set():
            return
        if not helps:
            self._is_staged.wait()
            return
        awaited_threads().raise_if_awaited()
        shared = self._shared
        if shared is not None:
            try:
                with awaited_threads().here():
                    shared.stage()
            except Exception as error:  # the background raises the same, and all ranks with it
                if is_refusal(error):
                    raise
        self._is_staged.wait()

    def stage(self, snapshot: Snapshot) -> bool:
        """Stages the snapshot, ends the waits for that, and returns True. Returns False if staging fails: the writer
        gets the error and raises it on all ranks, and the waits end with the save. Raises an interrupt such as Ctrl-C,
        or the refusal to wait in a signal handler, here as well.
        """
        try:
            snapshot.stage()
        except BaseException as error:
            if isinstance(error, Exception) and not is_refusal(error):
                snapshot.fail(error)
                return False
            self.was_seen = True  # the caller gets it here and now
            message = f"staging was interrupted by {type(error).__name__}; nothing was committed"
            snapshot.fail(CheckpointSaveError(message, kind="rank_failed"))
            raise
        else:
            self._is_staged.set()
            return True
        finally:
            self._shared = None

    def run(self, finish: Callable[[], CheckpointInfo], slot: ExitStack) -> None:
        """Runs `finish`, closes `slot`, and then ends all waits for the save. Raises no error of `finish`, not even an
        interrupt: `SaveHandle.result` does.
        """
        info = None
        try:
            info = finish()
            self.meter.begin("done")
        except BaseException as error:  # noqa: BLE001  a lost error would be a lost checkpoint
            self.error = error
            self.was_seen = self.was_seen or error is self._seen_error
            self.meter.begin("failed")
            _clear_frames(error)
        del finish  # the error keeps this frame, which is running and was not cleared
        # Before the outcome: threads that wait for it, and its callbacks, may save again.
        slot.close()
        self._shared = None
        self.is_numbered.set()
        self._is_staged.set()
        if info is not None:
            self.outcome.set_result(info)
        else:
            if self.local is not None and not self.local.done():
                self.local.set_exception(self.error)
            for future in self.held.values():
                if not future.done():
                    future.set_exception(self.error)
            self.outcome.set_exception(self.error)
        self.has_ended = True
        if info is not None or self.was_seen:
            self._on_seen()


def _clear_frames(error: BaseException) -> None:
    """Frees the state that the frames of a kept error, and of the errors behind it, hold."""
    for each in with_causes(error):
        traceback.clear_frames(each.__traceback__)
