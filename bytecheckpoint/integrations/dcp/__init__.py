"""torch.distributed.checkpoint's `save`, `async_save` and `load`, with this library behind them: change the import.

    from bytecheckpoint.integrations import dcp    # was: import torch.distributed.checkpoint as dcp

Modules and optimizers are saved from live memory; the state_dict() of every other Stateful value is called, as DCP
does, and saved under the same names.
"""

from __future__ import annotations

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as DefaultSavePlanner

from bytecheckpoint.integrations.dcp.calls import async_save, load, save
from bytecheckpoint.integrations.dcp.storage import BcpStorageReader, BcpStorageWriter
from bytecheckpoint.integrations.shared.agreed_stop import AgreedStop

FileSystemReader, FileSystemWriter = BcpStorageReader, BcpStorageWriter
"""The names of torch, for programs in which only the import was changed."""

__all__ = ["AgreedStop", "BcpStorageReader", "BcpStorageWriter", "async_save", "load", "save"]
