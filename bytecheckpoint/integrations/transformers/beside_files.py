"""What a save of the Trainer adds to its checkpoint beside the state: files of the Trainer, and the position in a
loader that has no length.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

from transformers.trainer_callback import ExportableState


class BesideFiles(NamedTuple):
    """Contents of the files that rank 0 adds to the folder of a checkpoint, and the position for its record."""

    trainer_state: str
    config: str
    """Empty for a model without a configuration."""
    position: tuple[int, int] | None
    """As in TrainerRecord."""


def beside_files(trainer: Any, *, steps_in_pass: int) -> BesideFiles:
    """Returns what a save of the Trainer adds now. Puts the states of its callbacks into its state first.

    `steps_in_pass` is the number of batches that the Trainer takes for one pass over a loader without a length; 0 if
    the loader has one.
    """
    exported: dict[str, list[Any]] = {}
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            exported.setdefault(type(callback).__name__, []).append(callback.state())
    trainer.state.stateful_callbacks = {
        name: states[0] if len(states) == 1 else states for name, states in exported.items()
    }
    text = json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n"
    as_json = getattr(getattr(trainer.model, "config", None), "to_json_string", None)
    passes, part = divmod(trainer.state.epoch or 0.0, 1)
    position = (int(passes), round(part * steps_in_pass)) if steps_in_pass else None
    return BesideFiles(text, as_json() if as_json is not None else "", position)
