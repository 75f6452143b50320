"""A configuration of torchtitan that saves and resumes with bytecheckpoint.

    torchrun --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan_config --config debugmodel

Run it again and it goes on with the newest checkpoint. A SIGTERM saves the step and ends the run. Options may be given
on the command line, such as --checkpoint.keep_latest_k 5.
"""

from __future__ import annotations

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from bytecheckpoint.integrations.torchtitan import BcpCheckpointManager


def debugmodel() -> Trainer.Config:
    """Returns the configuration of the debug model with another checkpoint manager."""
    config = llama3_debugmodel()
    config.checkpoint = BcpCheckpointManager.Config(
        enable=True,
        interval=5,
        keep_latest_k=3,
        last_save_model_only=False,
    )
    return config
