"""`save_state` and `load_state` for all that an `Accelerator` of Hugging Face holds, in place of its methods.

Modules and optimizers are saved in the shards that they have in memory: each rank writes its own part, and any number
of ranks loads it.
"""

from __future__ import annotations

from bytecheckpoint.integrations.accelerate.states import load_state, save_state

__all__ = ["load_state", "save_state"]
