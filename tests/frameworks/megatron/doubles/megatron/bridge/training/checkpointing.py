"""What Megatron-Bridge's own manager would do, noted instead."""

from __future__ import annotations

from typing import Any

CALLED: list[str] = []


class DefaultCheckpointManager:
    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config

    def load(self, ctx: Any) -> tuple[int, float]:
        CALLED.append(f"load {type(ctx).__name__}")
        return 0, 0
