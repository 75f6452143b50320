"""Saves in flight and all else that a process keeps between saves: the queue of saves, the background threads that
finish them, exit hooks, staging memory and cached plans. It does not know what a save does.
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
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.runtime.reentrancy import awaited_threads
from bytecheckpoint.runtime.thread_priority import lower_priority
from bytecheckpoint.runtime.threads import background_threads
from bytecheckpoint.saving.handle import SaveProgress
from bytecheckpoint.saving.plans.rank_plan import PlanCache
from bytecheckpoint.saving.prepare import KeptBetweenSaves, PreparedSave
from bytecheckpoint.saving.slow_phases import PhaseHistory
from bytecheckpoint.saving.target import SaveTarget
from bytecheckpoint.staging.host_buffers import HostBuffers
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.staging.reuse import ReuseHistory
from bytecheckpoint.staging.snapshots import ProposedState, StagedState
from bytecheckpoint.storage.store import RemoteStore, Store, full_location

logger = logging.getLogger("bytecheckpoint")

_ALL_OR_NOTHING = "it is committed whole or not at all (see `bcp ls`), and what was committed before still loads"


class StagingSlot:
    """The right of one save to stage: no other save may stage until `end`, which may be called again."""

    def __init__(self, lock: threading.Lock) -> None:
        """`lock` is held already, and released by `end`."""
        self._lock = lock
        self.has_ended = False
        self.upload = ExitStack()  # closed when the save is over

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._lock.release()


class SavesInFlight:
    """The asynchronous saves of this process: at most one that stages and writes, and one that only uploads from its
    local stage, which needs nothing of the process' state any more.
    """

    def __init__(self) -> None:
        self.is_exiting = False
        self._step_hook: RemovableHandle | None = None
        """Torch's handle of the hook that holds optimizer steps until staging has ended."""
        self.reset()

    def reset(self) -> None:
        """Forgets all saves, as a forked child must."""
        self._staging = threading.Lock()
        self._upload = threading.Lock()
        """Held for an upload, and taken while `_staging` is held: so uploads come in the order of saves."""
        self._lock = threading.Lock()  # guards `_step_hook`
        self._watched: dict[int, SaveProgress] = {}
        """Saves by id, in their order, that are under way or have failed with an error that the caller has not seen.
        No others: a kept error that was raised holds the caller's frames, and the state in them. Each is added and
        removed in one step, because signal handlers and background threads change this too."""

    @contextmanager
    def slot(self, *, awaits_upload: bool) -> Iterator[StagingSlot]:
        """Waits for the save that is staging or writing, and with `awaits_upload` for one that uploads; other saves
        wait until the slot has ended. Raises the error of an earlier save if the caller has not seen it.
        """
        awaited_threads().raise_if_awaited()
        while True:
            if awaits_upload:  # without the slot, because a signal handler may save meanwhile
                with self._upload:
                    pass
            self._staging.acquire()
            if not (awaits_upload and self._upload.locked()):  # an upload begins in the slot only
                break
            self._staging.release()
        slot = StagingSlot(self._staging)
        try:
            with awaited_threads().here():
                self._raise_unseen()
                yield slot
        finally:
            slot.end()
            slot.upload.close()

    def begin_upload(self, slot: StagingSlot) -> None:
        """Waits for the upload of an earlier save, then ends the slot: the next save may begin, while this one counts
        as uploading until it is over. Does nothing if the slot has ended, as in a synchronous save.
        """
        # A synchronous save has ended its slot long ago, and blocks its caller: no other save comes in between.
        if not slot.has_ended:
            # Until the save is over: a save that waits for the upload raises its error.
            slot.upload.enter_context(self._upload)
            slot.end()

    def _watch(self, progress: SaveProgress) -> None:
        watched, number = self._watched, id(progress)
        watched[number] = progress
        progress.when_seen(lambda: watched.pop(number, None))

    @property
    def _all(self) -> tuple[SaveProgress, ...]:
        return tuple(self._watched.values())

    def _raise_unseen(self) -> None:
        for progress in self._all:
            error = progress.take_unseen_error()
            if isinstance(error, CheckpointError):
                text = f"the asynchronous save to {progress.path} failed, and this one was not begun: {error.message}"
                raise type(error)(text, kind=error.kind, path=error.path, step=error.step, ranks=error.ranks) from error
            if error is not None:
                raise error

    def _start(
        self,
        progress: SaveProgress,
        finish: Callable[[], CheckpointInfo],
        slot: ExitStack,
        *,
        give_up: Callable[[], object],
    ) -> bool:
        """Begins a thread that finishes a save and takes over the slot. Returns False if there can be no thread: then
        the caller finishes the save itself. In that case, and if the caller is interrupted before the thread has begun,
        calls `give_up`, which drops the snapshot that was made for the thread; the slot stays with the caller.
        """
        self._watch(progress)
        claim = threading.Lock()
        """Taken by the thread when it begins, or by the caller if it is interrupted before that."""
        own_slot = ExitStack()

        def run() -> None:
            if claim.acquire(blocking=False):
                progress.run(finish, own_slot)

        try:
            own_slot.push(slot.pop_all())
            if self.begin_thread("bcp-save", run):
                return True
        except BaseException:
            if claim.acquire(blocking=False):
                self._watched.pop(id(progress), None)
                slot.push(own_slot)
                give_up()
            raise
        self._watched.pop(id(progress), None)  # an interrupt may come before `run_now`
        slot.push(own_slot)
        give_up()
        return False

    def run_in_background(self, prepared: PreparedSave, finish: Callable[[], CheckpointInfo], slot: ExitStack) -> bool:
        """Stages a save, and begins a thread that finishes it and takes over the slot. Returns True when the state may
        change; for a lazy snapshot at once, because steps of optimizers wait for it.

        Returns False if there can be no more threads: then the caller must run `finish`; see `prepare_without_thread`.
        """
        snapshot = prepared.snapshot
        if prepared.is_lazy:
            shared = snapshot.proposed if isinstance(snapshot, ProposedState) else snapshot
            if isinstance(shared, StagedState):  # waves come one after the other: no thread can help with them
                prepared.progress.share(shared)
            self.hold_steps()
            finish = partial(self._stage_and_finish, prepared, finish)
        try:
            if self._start(prepared.progress, finish, slot, give_up=snapshot.close):
                if not prepared.is_lazy:
                    prepared.stage()
                prepared.call.timer.end_stall()
                return True
        except BaseException as error:
            prepared.interrupt(error)  # the writer may be under way
            raise
        prepared.prepare_without_thread()
        return False

    def _stage_and_finish(self, prepared: PreparedSave, finish: Callable[[], CheckpointInfo]) -> CheckpointInfo:
        """Begins a thread that stages, here because beginning it may block, or stages on this one if there can be no
        other; meanwhile or afterwards finishes the save on this thread.
        """
        try:
            if not self.begin_thread("bcp-stage", prepared.stage):
                prepared.agree()
                prepared.stage()
        except MemoryError as error:
            prepared.interrupt(error)
        return finish()

    def run_now(
        self, progress: SaveProgress, finish: Callable[[], CheckpointInfo], slot: ExitStack, *, raises: bool
    ) -> None:
        """Finishes a save on this thread. Its error goes to the handle; with `raises` this raises it as well.

        Always raises an interrupt such as Ctrl-C; while the interpreter exits, any error, as no later call may ask.
        """
        if not raises:
            self._watch(progress)
        progress.run(finish, slot)
        error = progress.error
        if error is not None and (raises or self.is_exiting or not isinstance(error, Exception)):
            progress.mark_seen()
            raise error

    def begin_thread(self, name: str, do: Callable[[], None]) -> bool:
        """Begins a thread of low priority that runs `do`, and for which the interpreter waits at its exit. Returns
        False, with nothing done, if the process can have no more threads or the interpreter is exiting.
        """

        def run() -> None:
            lower_priority()
            do()

        try:
            background_threads().begin(name, run)
        except CheckpointError:  # raised by a signal handler
            raise
        except RuntimeError:
            return False
        return True

    def hold_steps(self) -> None:
        """From now on, each step of every torch optimizer of this process, wrapped or not, in the state or not, waits
        while a save in flight is staging.
        """
        with self._lock:
            hooks = self._step_hook.hooks_dict_ref() if self._step_hook is not None else None
            if self._step_hook is None or self._step_hook.id not in (hooks or ()):  # others may have removed it
                self._step_hook = register_optimizer_step_pre_hook(self._wait_before_step)

    def wait_until_numbered(self) -> None:
        """Waits until all ranks have numbered the saves in flight: then the next call has the same number on all ranks.
        Raises CheckpointSaveError if one of them waits for this thread, but no error of a save.
        """
        for progress in self._all:
            if not progress.is_numbered.is_set():
                awaited_threads().raise_if_awaited()
                progress.is_numbered.wait()

    def wait_until_staged(self) -> None:
        """Waits until no save in flight needs the state; stages and raises like `SaveProgress.wait_until_staged`."""
        for progress in self._all:
            progress.wait_until_staged()

    def wait_until_ended(self) -> None:
        """Waits for the end of the saves in flight. Raises CheckpointSaveError if one of them waits for this thread,
        but no error of a save.
        """
        for progress in self._all:
            if not progress.outcome.done():
                awaited_threads().raise_if_awaited()
                progress.outcome.exception()

    def _wait_before_step(self, *_: Any) -> None:
        self.wait_until_staged()

    def add_exit_hooks(self) -> None:
        """Makes the interpreter wait for saves, and report those that failed unseen."""
        try:
            # atexit comes too late: by then concurrent.futures refuses work, which the save needs to finish.
            threading._register_atexit(self._wait_at_exit)  # type: ignore[attr-defined]
        except RuntimeError:  # it is as late as that, and no thread can begin any more
            self.is_exiting = True
        atexit.register(self._report_at_exit)

    def _wait_at_exit(self) -> None:
        self.is_exiting = True
        for progress in self._all:
            progress.outcome.exception()

    def _report_at_exit(self) -> None:
        """Prints saves cut short and unseen errors; if there are any, runs other exit hooks, then exits with code 1."""
        # The interpreter waits for saves, unless Ctrl-C or an exception of a signal handler cuts that short.
        under_way = [progress.path for progress in self._all if not progress.outcome.done()]
        errors = [(each.path, error) for each in self._all if (error := each.take_unseen_error()) is not None]
        if not (under_way or errors):
            return
        for path in under_way:
            _print(f"the program ends while the save to {path} is under way: {_ALL_OR_NOTHING}")
        for path, error in errors:
            # The message of one of this library's errors says all that a user can do about it.
            text = error.message if isinstance(error, CheckpointError) else "".join(traceback.format_exception(error))
            _print(f"the save to {path} failed and was not committed: {text}")
            logger.debug("the save to %s failed", path, exc_info=error)
        atexit.unregister(self._report_at_exit)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # None or closed, as that of a daemon may be
                stream.flush()
        os._exit(1)  # an exit function cannot change the exit code in any other way


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # a full disk, or a closed stream
        print(f"bytecheckpoint: {text}", file=sys.stderr)  # noqa: T201


class ProcessState:
    """Everything that a process keeps between saves. A process has one of these, and stages one save at a time."""

    def __init__(self) -> None:
        self.saves = SavesInFlight()
        self.buffers = HostBuffers()
        self.plans = PlanCache()
        self.history = PhaseHistory()
        self.reuse = ReuseHistory()
        self._writable: set[str] = set()
        """Stores that were found to be writable."""
        self.memories: dict[str, JobMemory] = {}
        self.loaded_generation = 0
        """Highest generation of the checkpoints that this process has loaded."""
        self._memory_of_parent: list[object] = []

    def kept(self, target: SaveTarget) -> KeptBetweenSaves:
        """Returns the objects that a save takes over from earlier saves."""
        reuse = self.reuse.of_root(full_location(target.store, "")) if target.reuse else None
        return KeptBetweenSaves(self.buffers, self.history, reuse)

    def check_writable(self, store: Store, ranks: Ranks) -> None:
        """Raises the error that a write to the store would raise, so that a save fails before anything is staged.

        Only the coordinator checks, only a store that is no local folder, and each until it was found writable once.
        """
        place = full_location(store, "")
        if ranks.rank == COORDINATOR and isinstance(store, RemoteStore) and place not in self._writable:
            store.check_writable()
            self._writable.add(place)

    def reset_in_child(self) -> None:
        """Forgets, in a forked child, all that the parent kept. To wait there for a save of the parent is an error."""
        for progress in self.saves._all:
            progress.leave_to_parent()
        self.saves.reset()
        # The memory is not the child's, but freeing it here could free what has come to lie in the same place.
        self._memory_of_parent.append((self.buffers, self.memories))
        self.buffers, self.memories, self.plans, self._writable = HostBuffers(), {}, PlanCache(), set()
        self.history, self.reuse = PhaseHistory(), ReuseHistory()


_STATE: dict[str, ProcessState] = {}
"""Empty until the first call of `process_state`. A dict, because `setdefault` is one step for all threads."""


def process_state() -> ProcessState:
    """Returns the state of this process. The first call makes it, and adds its exit and fork hooks."""
    if not _STATE:
        state = ProcessState()
        if _STATE.setdefault("state", state) is state:
            state.saves.add_exit_hooks()
            os.register_at_fork(after_in_child=state.reset_in_child)
    return _STATE["state"]


def wait_until_numbered() -> None:
    """Waits until all ranks have numbered the saves in flight. Raises like the method of SavesInFlight."""
    for state in _STATE.values():
        state.saves.wait_until_numbered()


def wait_until_staged() -> None:
    """Waits until no save in flight needs the state. Stages and raises like the method of SavesInFlight."""
    for state in _STATE.values():
        state.saves.wait_until_staged()


def note_load(generation: int) -> None:
    """Notes a load of a checkpoint of this generation, 0 if it has none: the next memory save begins a higher one."""
    for state in [process_state()] if generation else _STATE.values():
        state.loaded_generation = max(state.loaded_generation, generation)
        for memory in state.memories.values():
            memory.note_load(generation)


@contextmanager
def reentry_refused() -> Iterator[None]:
    """Surrounds a call that may begin a save. Afterwards the thread no longer counts as one that a save waits for.

    Raises CheckpointSaveError on a thread that a save waits for: in a signal handler, or in a method of the state.
    """
    awaited_threads().raise_if_awaited()
    try:
        yield
    finally:
        awaited_threads().leave()
