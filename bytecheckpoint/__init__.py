"""Checkpoints of distributed training that any layout can load.

    import bytecheckpoint as bcp

    bcp.save("ckpt", {"model": model, "optimizer": optimizer}, step=1000)     # on every rank, in any layout
    bcp.load("ckpt", {"model": model, "optimizer": optimizer})                # the newest, in any other layout
    bcp.open("ckpt")["model.embed.weight"][:10]                               # a few rows, without a model

`api.py` tells the story of a save and of a load, top to bottom; docs/architecture.md says where everything else is.
"""

from bytecheckpoint.adapters.stateful import RankLocal
from bytecheckpoint.api import latest, load, open, save, steps  # noqa: A004  bcp.open, as in gzip.open
from bytecheckpoint.checkpoint import Checkpoint
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    StorageError,
    UnsafeCheckpointError,
)
from bytecheckpoint.handle import SaveHandle
from bytecheckpoint.info import CheckpointInfo, LoadReport
from bytecheckpoint.options import LoadOptions, SaveOptions

__all__ = [
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "LoadOptions",
    "LoadReport",
    "RankLocal",
    "SaveHandle",
    "SaveOptions",
    "StorageError",
    "UnsafeCheckpointError",
    "latest",
    "load",
    "open",
    "save",
    "steps",
]
