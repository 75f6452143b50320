"""A checkpoint manager for torchtitan, selected by configuration alone.

    config.checkpoint = BcpCheckpointManager.Config(enable=True, interval=500)

Modules and optimizers are saved in the shards that they have in memory: each rank writes its own part, and any number
of ranks loads it.
"""

from __future__ import annotations

from bytecheckpoint.integrations.torchtitan.manager import BcpCheckpointManager

__all__ = ["BcpCheckpointManager"]
