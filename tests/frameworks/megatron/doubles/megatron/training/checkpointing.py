"""What a checkpoint of Megatron-LM's own would do, noted instead."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.training.global_vars import get_args

CALLED: list[str] = []
VERSIONS: list[float] = []
LOADED: list[int] = []


def save_checkpoint(*arguments: Any, **named: Any) -> None:
    CALLED.append("save_checkpoint")


def load_checkpoint(*arguments: Any, **named: Any) -> tuple[int, float]:
    CALLED.append(f"load_checkpoint {sorted(named)}")
    return 77, 7.0


def set_checkpoint_version(value: float) -> None:
    VERSIONS.append(value)


def set_loaded_iteration(value: int) -> None:
    LOADED.append(value)


def check_checkpoint_args(checkpoint_args: Namespace) -> None:
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        assert getattr(checkpoint_args, name) == getattr(get_args(), name), name


def maybe_save_dataloader_state(train_iterator: Any, iteration: int, dataloader_save_path: str | None) -> None:
    if train_iterator is not None and dataloader_save_path:
        train_iterator.iterable.save_state()
