"""What Megatron-Bridge gives to its checkpoint manager: configuration, the state of training, the context of a call."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class TrainState:
    """Bridge's, as far as it is met."""

    step: int = 0
    consumed_train_samples: int = 0
    floating_point_operations_so_far: float = 0.0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        for name, value in state_dict.items():
            setattr(self, name, value.item())


def config_of(folder: str, **others: Any) -> SimpleNamespace:
    named = dict.fromkeys(("pretrained_checkpoint", "non_persistent_ckpt_type", "non_persistent_global_ckpt_dir"))
    flags = dict.fromkeys(("save_optim", "save_rng", "load_optim", "load_rng", "async_save"), True)
    more = {"save": folder, "load": folder, "ckpt_step": None, "most_recent_k": 2, "finetune": False}
    return SimpleNamespace(**(named | flags | more | others))


def context_of(built: Any, scheduler: Any, train_state: TrainState, **others: Any) -> SimpleNamespace:
    state = SimpleNamespace(
        train_state=train_state, cfg=SimpleNamespace(rng=SimpleNamespace(data_parallel_random_init=False))
    )
    given = {"strict": True, "non_persistent_ckpt": False, "num_floating_point_operations_so_far": 5.0}
    parts = {"model": built.chunks, "optimizer": built.optimizer, "opt_param_scheduler": scheduler}
    return SimpleNamespace(state=state, **(given | parts | others))
