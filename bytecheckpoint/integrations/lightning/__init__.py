"""Strategies of Lightning's Trainer and of Fabric that save with this library: `Trainer(strategy=BcpDDPStrategy())`.

`ModelCheckpoint`, `ckpt_path=` and `Fabric.save` stay as they are. trainer.py has the strategies of the Trainer,
fabric.py those of Fabric, and the other modules what these share.
"""

from __future__ import annotations

from bytecheckpoint.integrations.shared.missing_framework import missing_framework

try:
    import lightning  # noqa: F401 - only whether it is there
except ImportError as error:
    raise missing_framework("lightning", "lightning>=2.6") from error

from bytecheckpoint.integrations.lightning.fabric import BcpFabricDDPStrategy, BcpFabricFSDPStrategy, BcpFabricMixin
from bytecheckpoint.integrations.lightning.trainer import (
    BcpDDPStrategy,
    BcpFSDPStrategy,
    BcpModelParallelStrategy,
    BcpSingleDeviceStrategy,
    BcpStrategyMixin,
)

__all__ = [
    "BcpDDPStrategy",
    "BcpFSDPStrategy",
    "BcpFabricDDPStrategy",
    "BcpFabricFSDPStrategy",
    "BcpFabricMixin",
    "BcpModelParallelStrategy",
    "BcpSingleDeviceStrategy",
    "BcpStrategyMixin",
]
