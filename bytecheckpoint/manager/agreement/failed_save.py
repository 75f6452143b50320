"""The handle of a save that has failed at once on this rank. Other ranks may have got a handle before they learn of the
failure, and all ranks go on alike.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NoReturn

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.runtime.progress import ProgressMeter
from bytecheckpoint.saving.handle import SaveHandle, SaveProgress
from bytecheckpoint.saving.in_flight import process_state


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
