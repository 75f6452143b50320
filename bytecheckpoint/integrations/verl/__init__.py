"""Checkpoint managers for the FSDP and Megatron workers of verl, in the place of its own.

Modules and optimizers are saved as they live: each rank writes its own part, and any number of ranks loads it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bytecheckpoint.integrations.verl.managers import BcpFSDPCheckpointManager, install

if TYPE_CHECKING:
    from bytecheckpoint.integrations.verl.megatron_parts import BcpMegatronCheckpointManager

__all__ = ["BcpFSDPCheckpointManager", "BcpMegatronCheckpointManager", "install"]


def __getattr__(name: str) -> Any:
    # Megatron is imported only where its manager is asked for: jobs with FSDP alone do not have it.
    if name == "BcpMegatronCheckpointManager":
        return import_module("bytecheckpoint.integrations.verl.megatron_parts").BcpMegatronCheckpointManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
