"""Saves that fail: which errors end training, and the handle of a save that has failed at once on this rank. Other
ranks may have got a handle before they learn of the failure, and all ranks go on alike.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import NoReturn

from bytecheckpoint.errors import CheckpointError, CheckpointExistsError, CheckpointMismatchError
from bytecheckpoint.manager.options import ManagerOptions
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.progress import ProgressMeter
from bytecheckpoint.saving.handle import SaveHandle, SaveProgress
from bytecheckpoint.saving.in_flight import process_state

logger = logging.getLogger("bytecheckpoint")


class FailuresInARow:
    """The failed saves since one succeeded. Their errors are raised or logged, by `on_failed_save`."""

    def __init__(self, options: ManagerOptions) -> None:
        self._options = options
        self.number = 0
        self._logged: CheckpointError | None = None

    def add(self, error: CheckpointError) -> None:
        """Counts a failed save, and raises its error, or logs it if that was not done before. Wrong arguments, a
        checkpoint that exists, a lost root, and the last of `max_failed_saves` failures in a row are always raised.
        """
        self.log_unless_raised(error)
        self.number += 1
        was_logged, self._logged = self._logged is error, None  # its frames hold the state of a synchronous save
        if not was_logged:
            raise error

    def log_unless_raised(self, error: BaseException | None) -> None:
        """Logs the error of a save that fails, once, before it is counted, unless `add` will raise it. May be called
        from any thread.
        """
        if not isinstance(error, CheckpointError) or error is self._logged or self.is_raised(error):
            return
        if self.number + 1 < self._options.max_failed_saves:
            logger.warning("a save failed, %d in a row, and training goes on: %s", self.number + 1, error)
            self._logged = error

    def is_raised(self, error: CheckpointError) -> bool:
        """Returns True if the error is raised however few saves have failed in a row."""
        is_final = isinstance(error, CheckpointMismatchError | CheckpointExistsError) or error.kind == "superseded"
        return is_final or self._options.on_failed_save == "raise"


def failed_save(error: CheckpointError, options: SaveOptions) -> SaveHandle:
    """Returns the handle of a save with these options that has failed with this error. If nobody asks the handle, the
    error is raised by the next save, or at the end of the program, as for any save.
    """

    def fail() -> NoReturn:
        raise error

    path, has_stage, has_memory = error.path or "", options.local_stage is not None, options.memory is not None
    meter = ProgressMeter(path, 0, "save", None)
    progress = SaveProgress(path, meter, has_local_stage=has_stage, has_memory=has_memory)
    process_state().saves.run_now(progress, fail, ExitStack(), raises=False)
    return SaveHandle(progress)
