"""The end of a job of verl whose last save is in the background: its driver ends the workers when training is over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.verl.steps import TRACKER, tracked_step
from bytecheckpoint.options import SaveOptions

try:
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
except ImportError as error:
    raise missing_framework("verl", "verl >= 0.9") from error

_LOOK_S = 0.1


class WaitForLastSave(CheckpointCallback):
    """The callback that `trainer.checkpoint_callback_class` names. A subclass may set `timeout_s`, and has to call
    `on_save` if it has its own.
    """

    timeout_s = SaveOptions().timeout_s
    """Longest wait for the last save."""

    def on_save(
        self,
        trainer: Any,
        global_step: int,
        checkpoint_dir: str,
        async_save: bool = False,  # noqa: FBT001, FBT002 - verl's signature
        **_: Any,
    ) -> None:
        """Returns, after the save of the last step, when the tracker file names it: all roles are committed.

        Raises CheckpointSaveError (rank_missing) if it does not name it in time.
        """
        if not async_save or global_step < trainer.total_training_steps:
            return
        tracker, began = Path(checkpoint_dir).parent / TRACKER, time.monotonic()
        while tracked_step(tracker) != global_step:
            if time.monotonic() - began > self.timeout_s:
                raise CheckpointSaveError(
                    f"the last save, {checkpoint_dir}, was not committed by all its roles within {self.timeout_s:g} s; "
                    f"a restart goes on from the step that {tracker} names ({tracked_step(tracker)}): look for the "
                    "error in the logs of the workers",
                    kind="rank_missing",
                    path=checkpoint_dir,
                )
            time.sleep(_LOOK_S)
