"""The rest of a save beside training: who stages, who writes, and when the call may return."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from bytecheckpoint.draft import Draft
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.handle import IN_FLIGHT, in_background
from bytecheckpoint.info import CheckpointInfo
from bytecheckpoint.ranks import COORDINATOR
from bytecheckpoint.save_handle import SaveHandle
from bytecheckpoint.snapshot import ProposedState, StagedState
from bytecheckpoint.writing import Saving

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
