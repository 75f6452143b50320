"""What is told to a monitor of hangs."""

from __future__ import annotations

TOLD: list[str] = []


def on_checkpointing_start() -> None:
    TOLD.append("start")


def on_checkpointing_end(is_async_finalization: bool) -> None:
    TOLD.append(f"end {is_async_finalization}")


def on_checkpoint_loaded(is_local_chkpt: bool) -> None:
    TOLD.append(f"loaded {is_local_chkpt}")
