"""The end of a job of verl whose last save is in the background: its driver ends the workers when training is over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.verl.steps import TRACKER, is_whole, tracked_step
from bytecheckpoint.options import SaveOptions

try:
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
except ImportError as error:
    raise missing_framework("verl", "verl >= 0.9") from error

_LOOK_S = 0.1


class WaitForLastSave(CheckpointCallback):
    """The callback to name in `trainer.checkpoint_callback_class`. A subclass may set `timeout_s`; if it overrides
    `__init__` or `on_save`, it has to call the method of this class.
    """

    timeout_s = SaveOptions().timeout_s
    """Longest wait for the last save."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._began = time.time()

    def on_save(
        self,
        trainer: Any,
        global_step: int,
        checkpoint_dir: str,
        async_save: bool = False,  # noqa: FBT001, FBT002 - verl's signature
        **_: Any,
    ) -> None:
        """After the last save of the job, if it is in the background, waits until all roles are committed and the
        tracker file names the step. After any other save, returns at once.

        Raises CheckpointSaveError (rank_missing) if the wait takes longer than `timeout_s`.
        """
        if not async_save or self._is_another_to_come(trainer, global_step):
            return
        step, began = Path(checkpoint_dir), time.monotonic()
        tracker = step.parent / TRACKER
        # An earlier run, whose steps are replaced, may have left a tracker file that names the step already.
        while tracked_step(tracker) != global_step or not is_whole(step, since=self._began):
            if time.monotonic() - began > self.timeout_s:
                raise CheckpointSaveError(
                    f"the last save, {checkpoint_dir}, was not committed by all its roles within {self.timeout_s:g} s; "
                    f"a restart goes on from the step that {tracker} names ({tracked_step(tracker)}): look for the "
                    "error in the logs of the workers",
                    kind="rank_missing",
                    path=checkpoint_dir,
                )
            time.sleep(_LOOK_S)

    def _is_another_to_come(self, trainer: Any, global_step: int) -> bool:
        """Returns True if the driver will save a later step. It saves at multiples of `save_freq`, and at step
        `total_training_steps`, which it does not reach if the epochs have fewer steps.
        """
        of_job, last = self.config.trainer, trainer.total_training_steps
        end = min(last, trainer.steps_per_epoch * of_job.total_epochs)
        if of_job.save_freq <= 0:
            return False
        next_due = (global_step // of_job.save_freq + 1) * of_job.save_freq
        return bool(next_due <= end or global_step < last == end)
