"""The saves that are under way: whose turn it is, the background threads that finish them, and what happens to them
when the interpreter ends. What a caller sees of one is in handle.py; nothing here knows what a save does.

The rest of a save beside training: who stages, who writes, and when the call may return.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import thread as _futures_thread  # noqa: F401  registers its exit hook before ours
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bytecheckpoint.distributed.ranks import COORDINATOR
from bytecheckpoint.errors import CheckpointError, CheckpointSaveError
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.runtime.reentrancy import AWAITED
from bytecheckpoint.runtime.thread_priority import lower_priority
from bytecheckpoint.runtime.threads import background_threads
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.saving.kept import Kept
from bytecheckpoint.saving.prepare import Draft
from bytecheckpoint.saving.write import Saving
from bytecheckpoint.staging.snapshots import ProposedState, StagedState

_ALL_OR_NOTHING = "it is committed whole or not at all, which `bcp ls` tells, and what was committed before still loads"


class Turn:
    """Of a save: from when it stages until the next one may. To be ended once, or more often."""

    def __init__(self, lock: threading.Lock) -> None:
        """`lock` is held by now."""
        self._lock = lock
        self.is_over = False
        self.uploads = ExitStack()
        """Closed when the save is over."""

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._lock.release()


class InFlight:
    """The asynchronous saves that this process has under way: at most one, and one more that only uploads what is in
    its local stage, which needs nothing of the process' state any more.
    """

    def __init__(self) -> None:
        self.kept = Kept()
        """What saves leave for those that follow."""
        self._of_parents: list[Kept] = []
        self._step_hook: RemovableHandle | None = None
        """Torch's handle of the hook in which steps wait."""
        self._turn = threading.Lock()
        self._upload = threading.Lock()
        """Held for an upload, and taken while the turn is held: so uploads come in the order of saves."""
        self._lock = threading.Lock()
        self._watched: dict[int, SaveHandle] = {}
        """By id, in their order: saves that are under way, or have failed with an error that nobody has seen; no
        others, because an error that a handle keeps and has raised knows the caller's frames, and the state in them.
        Each comes and goes in one step, because signal handlers and background threads change this too.
        """
        self._has_hooks = False
        self._is_exiting = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that may begin a save: when it is over, its thread is awaited no longer.

        Raises CheckpointSaveError on a thread that a save waits for: in a signal handler, or what the state calls.
        """
        AWAITED.refuse()
        try:
            yield
        finally:
            AWAITED.leave()

    @contextmanager
    def turn(self, *, awaits_upload: bool) -> Iterator[Turn]:
        """Waits for the save that is under way, then holds back others. Raises the error of an earlier one if nobody
        has seen it. One that is uploading is waited for only where asked.
        """
        AWAITED.refuse()
        self._add_hooks()
        self._acquire_turn(awaits_upload=awaits_upload)
        turn = Turn(self._turn)
        try:
            with AWAITED.here():
                self._raise_unseen()
                yield turn
        finally:
            turn.end()
            turn.uploads.close()

    def _acquire_turn(self, *, awaits_upload: bool) -> None:
        """Waits for an upload without the turn, because a signal handler may want to save meanwhile."""
        while True:
            if awaits_upload:
                with self._upload:
                    pass
            self._turn.acquire()
            if not (awaits_upload and self._upload.locked()):  # who begins one holds the turn
                return
            self._turn.release()

    @contextmanager
    def uploading(self, turn: Turn, let_go: Callable[[], None]) -> Iterator[None]:
        """Waits for the upload of an earlier save. From then on the next save may begin. `let_go` is called when the
        state is needed no longer, before anything is waited for.
        """
        let_go()
        # A synchronous save has ended its turn long ago, and holds up its caller: nothing comes in between.
        if not turn.is_over:
            # Until all is over: who waits for the upload is to find its error.
            turn.uploads.enter_context(self._upload)
            turn.end()
        yield

    @property
    def _handles(self) -> tuple[SaveHandle, ...]:
        return tuple(self._watched.values())

    def _watch(self, handle: SaveHandle) -> None:
        watched, number = self._watched, id(handle)
        watched[number] = handle
        handle._when_told(lambda: watched.pop(number, None))

    def _raise_unseen(self) -> None:
        for handle in self._handles:
            error = handle._unseen_error()
            if isinstance(error, CheckpointError):
                message = f"the asynchronous save to {handle._path} failed, and this one was not begun: {error.message}"
                raise type(error)(
                    message, kind=error.kind, path=error.path, step=error.step, ranks=error.ranks
                ) from error
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
                handle._finish(finish, own_turn)

        try:
            own_turn.push(turn.pop_all())
            if in_background("bcp-save", run):
                return True
        except BaseException:
            if claim.acquire(blocking=False):
                self._watched.pop(id(handle), None)
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
        return self._is_exiting or handle._was_interrupted()

    def hold_steps(self) -> None:
        """From now on, each step of a torch optimizer of this process waits while the save in flight is staging: also
        of one that is wrapped, or not in the state.
        """
        with self._lock:
            hooks = self._step_hook.hooks_dict_ref() if self._step_hook is not None else None
            if self._step_hook is None or self._step_hook.id not in (hooks or ()):  # others may have removed it
                self._step_hook = register_optimizer_step_pre_hook(self._wait_for_staging)

    def wait_until_entered(self) -> None:
        """Returns when another call may begin: ranks count their calls, and must count them in the same order."""
        for handle in self._handles:
            if not handle._entered.is_set():
                AWAITED.refuse()
                handle._entered.wait()

    def wait_until_staged(self) -> None:
        """Returns when no save in flight needs the training state any more, well or not."""
        for handle in self._handles:
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
        for handle in self._handles:
            handle._future.exception()

    def _report(self) -> None:
        """The last word about saves that nobody has heard the outcome of: printed, and an exit code that tells."""
        # The interpreter waits for saves, unless Ctrl-C, or what a signal handler raises, cuts that short.
        under_way = [handle._path for handle in self._handles if not handle.done()]
        errors = [(handle._path, handle._unseen_error()) for handle in self._handles]
        errors = [(path, error) for path, error in errors if error is not None]
        if not (under_way or errors):
            return
        for path in under_way:
            _print(f"the program ends while the save to {path} is under way: {_ALL_OR_NOTHING}")
        for path, error in errors:
            _print(f"the save to {path} failed and was not committed:")
            traceback.print_exception(error, file=sys.stderr)
        atexit.unregister(self._report)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exit function cannot change the exit code in any other way

    def _forget(self) -> None:
        """A forked child has copies of the handles, but not the threads that would finish them."""
        self._watched = {}
        self._turn = threading.Lock()
        self._upload = threading.Lock()
        # Its memory is not the child's, but freeing it here could free what has come to lie in the same place.
        self._of_parents.append(self.kept)
        self.kept = Kept()


def _print(text: str) -> None:
    print(f"bytecheckpoint: {text}", file=sys.stderr)  # noqa: T201


def in_background(name: str, do: Callable[[], None]) -> bool:
    """Does it on a thread of its own, which the interpreter waits for, one that steps back. False, with nothing done,
    where the process can have no more threads or the interpreter is exiting.
    """

    def run() -> None:
        lower_priority()
        do()

    try:
        background_threads().begin(name, run)
    except CheckpointError:  # a signal handler's
        raise
    except RuntimeError:
        return False
    return True


IN_FLIGHT = InFlight()
"""One a process, because a process has one exit code, and staging memory for one save."""


logger = logging.getLogger("bytecheckpoint")


def write_in_background(
    handle: SaveHandle,
    draft: Draft,
    turn: ExitStack,
    *,
    settle: Callable[[], Saving],
    finish: Callable[[Saving], CheckpointInfo],
) -> bool:
    """Settles the save with the other ranks, stages it, and finishes it on a thread that takes over the turn.

    Returns when the state may change; for a lazy snapshot at once, because steps of optimizers wait for it. False, with
    nothing done, where there can be no more threads: the interpreter may be exiting.
    """
    snapshot, (ranks, path, _, clock) = draft.snapshot, draft.phases

    def stage() -> None:
        with clock.phase("stage"):
            handle._stage(snapshot)
        if ranks.rank == COORDINATOR:
            logger.info("staged %s in %.2f s", path, clock.total)

    def interrupted(error: BaseException) -> None:
        # The writer must not wait for what nobody is going to stage.
        message = f"the save was interrupted by {type(error).__name__}; nothing was committed"
        snapshot.fail(CheckpointSaveError(message, kind="rank_failed"))

    def stage_beside() -> None:
        """In the background and begun there, because each thread that the caller wakes may hold it up."""
        try:
            is_begun = in_background("bcp-stage", stage)
        except MemoryError as error:
            interrupted(error)
            return
        if not is_begun:
            settle()
            stage()

    def write() -> CheckpointInfo:
        if draft.is_lazy:
            stage_beside()
        saving = settle()
        snapshot.wait()
        return finish(saving)

    if draft.is_lazy:
        shared = snapshot.proposed if isinstance(snapshot, ProposedState) else snapshot
        if isinstance(shared, StagedState):  # waves follow one another: nobody can help with them
            handle._share(shared)
        IN_FLIGHT.hold_steps()
    try:
        if not IN_FLIGHT.start(handle, write, turn, give_up=snapshot.close):
            return False
        if not draft.is_lazy:
            stage()
        clock.end_stall()
    except BaseException as error:
        interrupted(error)  # the writer may be under way
        raise
    return True
