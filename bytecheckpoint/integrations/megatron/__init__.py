"""`save_checkpoint` and `load_checkpoint` of Megatron-LM's training loop, and `install`, which puts them in the place
of its own. Names, intervals, retention and arguments are Megatron's; model and optimizer are saved in the shards that
they have in memory, without a gather, and load on any number of ranks along any dimension.
"""

from __future__ import annotations

from bytecheckpoint.integrations.megatron.training import install, load_checkpoint, save_checkpoint

__all__ = ["install", "load_checkpoint", "save_checkpoint"]
