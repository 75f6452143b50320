"""Hugging Face's Trainer with checkpoints of this library: put the mixin before the Trainer.

    from bytecheckpoint.integrations.transformers import BcpTrainerMixin

    class MyTrainer(BcpTrainerMixin, Trainer): ...

The Trainer keeps its names, its intervals and its arguments; live modules and optimizers are saved, by all ranks.
"""

from __future__ import annotations

from bytecheckpoint.integrations.transformers.mixin import BcpTrainerMixin, last_checkpoint

__all__ = ["BcpTrainerMixin", "last_checkpoint"]
