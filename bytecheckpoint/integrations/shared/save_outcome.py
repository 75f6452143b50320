"""Reads the outcome of a save for background work that follows it, and leaves its error to the caller of the save."""

from __future__ import annotations

from bytecheckpoint.saving.handle import SaveHandle


def has_failed(handle: SaveHandle) -> bool:
    """Waits for the end of a save, and returns True if it has failed. Unlike the handle's methods, this does not mark
    the error as seen by the caller, so the next save still raises it.
    """
    return handle._progress.outcome.exception() is not None
