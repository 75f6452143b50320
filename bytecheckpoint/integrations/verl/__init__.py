"""Checkpoint managers for the FSDP and Megatron workers of verl, in the place of its own.

Modules and optimizers are saved in the shards that they have in memory: each rank writes its own part, and any number
of ranks loads it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytecheckpoint.integrations.verl.managers import BcpFSDPCheckpointManager, install

if TYPE_CHECKING:
    from bytecheckpoint.integrations.verl.last_save import WaitForLastSave
    from bytecheckpoint.integrations.verl.megatron_parts import BcpMegatronCheckpointManager

__all__ = ["BcpFSDPCheckpointManager", "BcpMegatronCheckpointManager", "WaitForLastSave", "install"]

_WHERE_NEEDED = {"BcpMegatronCheckpointManager": "megatron_parts", "WaitForLastSave": "last_save"}
"""Modules by the names in them that are imported on first use only: jobs with FSDP alone have no Megatron."""


def __getattr__(name: str) -> Any:
    if name in _WHERE_NEEDED:
        return getattr(import_module(f"{__name__}.{_WHERE_NEEDED[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
