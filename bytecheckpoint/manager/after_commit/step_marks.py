"""Marks that a running manager puts beside a committed step, on rank 0: metrics that come after the save, a pin and
leases. Wrong values are a CheckpointMismatchError, which all ranks raise as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, SupportsFloat

from bytecheckpoint.errors import CheckpointExistsError, CheckpointMismatchError, StorageError
from bytecheckpoint.manager import step_records
from bytecheckpoint.manager.abandoned_steps import present_abandoned
from bytecheckpoint.manager.after_commit.background import Background
from bytecheckpoint.manager.after_commit.known_steps import StepChange
from bytecheckpoint.manager.agreement.decisions import StorageClock
from bytecheckpoint.storage.layout import has_manifest, step_folder
from bytecheckpoint.storage.store import Store, one_block

logger = logging.getLogger("bytecheckpoint")


def pin_ahead(store: Store, step: int, *, time: float) -> None:
    """Pins the checkpoint that is about to be committed: a process that ends right after the commit loses no pin. A
    note of the pin lets the next manager take it away if the process ends before the commit.
    """
    with suppress(CheckpointExistsError):  # the note of an attempt that failed
        store.write(step_records.note_of_pin(step), one_block(b"\n"), replace=False)
    step_records.write_pin(store, step_folder(step), time=time)


def end_pin_ahead(store: Store, step: int, *, is_committed: bool) -> None:
    """Forgets that a step was pinned ahead, and takes the pin away unless the step is committed."""
    if not is_committed:
        step_records.unpin(store, step_folder(step))
    store.delete(step_records.note_of_pin(step))


def end_pins_ahead(store: Store) -> None:
    """Calls `end_pin_ahead` for all steps that earlier managers had pinned ahead. The checkpoint of an abandoned step
    does not count as committed: the pin was for its replacement. At a StorageError, logs a warning and leaves the
    remaining pins.
    """
    numbers = (name.removesuffix(".json") for name in store.list(step_records.PINS_AHEAD_FOLDER))
    steps = [int(number) for number in numbers if number.isdecimal()]
    try:
        abandoned = present_abandoned(store) if steps else {}
        for step in steps:
            is_committed = step not in abandoned and has_manifest(store.list(step_folder(step)))
            end_pin_ahead(store, step, is_committed=is_committed)
    except StorageError as error:
        logger.warning("pins of steps that were never committed stay in %s: %s", store, error)


class StepMarks(NamedTuple):
    """Writes the marks of steps (metrics, pins, leases), and notes them for the background work.

    All methods but `unpin` raise CheckpointNotFoundError (not_committed) for a step that is not committed.
    """

    store: Store
    background: Background
    clock: StorageClock

    def report(self, step: int, *, metrics: Mapping[str, float]) -> None:
        checked = step_records.report(self.store, step_folder(step), metrics, time=self.clock.now())
        self.background.note(StepChange(step, metrics=checked))

    def pin(self, step: int) -> None:
        step_records.pin(self.store, step_folder(step), time=self.clock.now())
        self.background.note(StepChange(step, pinned=True))

    def unpin(self, step: int) -> None:
        step_records.unpin(self.store, step_folder(step))
        self.background.note(StepChange(step, pinned=False))

    def lease(self, step: int, *, seconds: float) -> None:
        """Leases the step for a number of seconds from now. Of several leases, the longest counts."""
        until = min(self.clock.now() + _checked_seconds(seconds), step_records.MAX_TIME)
        step_records.lease(self.store, step_folder(step), until=until)
        self.background.note(StepChange(step, leased_until=until))


def refuse_read_only(root: str) -> None:
    raise StorageError(
        f"the manager of {root} is read-only; nothing was written: create it without "
        "ManagerOptions(read_only=True); it then takes over the root",
        kind="unsupported",
        path=root,
    )


def _checked_seconds(seconds: object) -> float:
    given = float(seconds) if isinstance(seconds, SupportsFloat) and not isinstance(seconds, bool) else math.nan
    if not (math.isfinite(given) and given > 0):
        raise CheckpointMismatchError(
            f"lease(step, seconds) takes a number of seconds above 0, not {seconds!r:.100}; nothing was changed: to "
            "keep a step for ever, pin it",
            kind="conflict",
        )
    return given
