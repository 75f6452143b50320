"""The outcome of a save for what follows it in the background, which is not the caller: an error stays unseen."""

from __future__ import annotations

from bytecheckpoint.saving.handle import SaveHandle


def has_failed(handle: SaveHandle) -> bool:
    """Waits for the end of a save, and returns True if it has failed. The next save still raises an error that nobody
    has seen: the handle's methods would note that the caller has.
    """
    return handle._progress.outcome.exception() is not None
