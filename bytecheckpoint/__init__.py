"""Checkpoints of distributed training that any layout can load.

    import bytecheckpoint as bcp

    bcp.save("ckpt", {"model": model, "optimizer": optimizer}, step=1000)     # on every rank, in any layout
    bcp.load("ckpt", {"model": model, "optimizer": optimizer})                # the newest, in any other layout
    bcp.open("ckpt")["model.embed.weight"][:10]                               # a few rows, without a model

`phases.py` has the phases of a save and of a load, top to bottom; docs/architecture.md says where everything else is.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

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

if sys.byteorder != "little":
    raise ImportError(
        "bytecheckpoint does not run on big-endian processors: checkpoints hold tensors as they lie in memory, in "
        f"little-endian order, and this processor is {sys.byteorder}-endian"
    )

if TYPE_CHECKING:
    from bytecheckpoint import data
    from bytecheckpoint.adapters.data.loader_state import DataLoaderState
    from bytecheckpoint.adapters.rank_values.rank_local import RankLocal
    from bytecheckpoint.adapters.rank_values.rng_state import RngState
    from bytecheckpoint.api import (
        delete,
        latest,
        load,
        open,  # noqa: A004  bcp.open, as in gzip.open
        resume,
        save,
        steps,
        warm_up,
    )
    from bytecheckpoint.checkpoint import Checkpoint
    from bytecheckpoint.diagnostics.progress_bar import progress_bar
    from bytecheckpoint.info import CheckpointInfo, DataReport, LoadReport, LocalInfo, LoggedData, RecoveredSave
    from bytecheckpoint.manager import keep_policies, save_policies
    from bytecheckpoint.manager.checkpoint_manager import CheckpointManager
    from bytecheckpoint.manager.options import ManagerOptions
    from bytecheckpoint.manager.save_policies import every
    from bytecheckpoint.manager.stats import ManagerStats
    from bytecheckpoint.options import LoadOptions, Memory, NameMap, SaveOptions
    from bytecheckpoint.runtime.progress import Progress
    from bytecheckpoint.saving.handle import SaveHandle
    from bytecheckpoint.saving.recover import recover
    from bytecheckpoint.state_tree import load_tree

__version__ = "0.2.0"

__all__ = [
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "DataLoaderState",
    "DataReport",
    "LoadOptions",
    "LoadReport",
    "LocalInfo",
    "LoggedData",
    "ManagerOptions",
    "ManagerStats",
    "Memory",
    "NameMap",
    "Progress",
    "RankLocal",
    "RecoveredSave",
    "RngState",
    "SaveHandle",
    "SaveOptions",
    "StorageError",
    "UnsafeCheckpointError",
    "__version__",
    "data",
    "delete",
    "every",
    "keep_policies",
    "latest",
    "load",
    "load_tree",
    "open",
    "progress_bar",
    "recover",
    "resume",
    "save",
    "save_policies",
    "steps",
    "warm_up",
]

# Most of these need torch, which takes seconds to import, or numpy; the command line looks into checkpoints without
# the first and prints its help without both.
_LAZY = {
    "Checkpoint": "bytecheckpoint.checkpoint",
    "CheckpointManager": "bytecheckpoint.manager.checkpoint_manager",
    "DataLoaderState": "bytecheckpoint.adapters.data.loader_state",
    "ManagerOptions": "bytecheckpoint.manager.options",
    "ManagerStats": "bytecheckpoint.manager.stats",
    "every": "bytecheckpoint.manager.save_policies",
    "Progress": "bytecheckpoint.runtime.progress",
    "RankLocal": "bytecheckpoint.adapters.rank_values.rank_local",
    "RngState": "bytecheckpoint.adapters.rank_values.rng_state",
    "SaveHandle": "bytecheckpoint.saving.handle",
    "recover": "bytecheckpoint.saving.recover",
    "load_tree": "bytecheckpoint.state_tree",
    "progress_bar": "bytecheckpoint.diagnostics.progress_bar",
    **dict.fromkeys(
        ("CheckpointInfo", "DataReport", "LoadReport", "LocalInfo", "LoggedData", "RecoveredSave"),
        "bytecheckpoint.info",
    ),
    **dict.fromkeys(("LoadOptions", "Memory", "NameMap", "SaveOptions"), "bytecheckpoint.options"),
    **dict.fromkeys(("delete", "latest", "load", "open", "resume", "save", "steps", "warm_up"), "bytecheckpoint.api"),
}
_LAZY_MODULES = {
    "data": "bytecheckpoint.data",
    "keep_policies": "bytecheckpoint.manager.keep_policies",
    "save_policies": "bytecheckpoint.manager.save_policies",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_MODULES and name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bytecheckpoint.runtime.gc_pause import gc_paused  # noqa: PLC0415 - not needed before the first name is

    # What an import makes, stays: a collection would walk all of torch, a tenth of a second, and free nothing.
    with gc_paused():
        if name in _LAZY_MODULES:
            return import_module(_LAZY_MODULES[name])
        return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
