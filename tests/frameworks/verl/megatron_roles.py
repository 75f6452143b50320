"""Saves and loads models of megatron-core by the manager of verl's Megatron workers, on the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from frameworks.real_megatron import Built, Layout, build, differences, fill, on_host

CONTENTS = ["model", "optimizer", "extra"]


def manager_of(built: Built, *, async_save: bool = False, **arguments: Any) -> Any:
    """A manager with the arguments that verl's engine gives it."""
    from verl.workers.config.checkpoint import McoreCheckpointConfig

    from bytecheckpoint.integrations.verl import BcpMegatronCheckpointManager

    given = {
        "config": SimpleNamespace(model=SimpleNamespace(path="")),
        "checkpoint_config": McoreCheckpointConfig(
            save_contents=CONTENTS, load_contents=CONTENTS, async_save=async_save
        ),
        "model_config": None,
        "transformer_config": built.chunks[0].config,
        "role": "actor",
        "model": torch.nn.ModuleList(built.chunks),
        "arch": "GPTModel",
        "hf_config": None,
        "param_dtype": torch.bfloat16,
        "share_embeddings_and_output_weights": False,
        "processing_class": None,
        "optimizer": built.optimizer,
        "optimizer_scheduler": None,
        "use_distributed_optimizer": True,
        "use_dist_checkpointing": True,
        **arguments,
    }
    return BcpMegatronCheckpointManager(**given)


def save(rank: int, world_size: int, layout: Layout, root: str) -> None:
    with on_host(layout):
        built = build(layout)
        fill(built)
        manager = manager_of(built)
        for step in (1, 2, 3):
            manager.save_checkpoint(f"{root}/global_step_{step}/actor", None, step, max_ckpt_to_keep=2)
        manager.wait()


def load(rank: int, world_size: int, layout: Layout, root: str) -> list[str]:
    """The names of tensors that are not as they were saved."""
    with on_host(layout):
        built = build(layout)
        fill(built, "other.")
        manager_of(built).load_checkpoint(f"{root}/global_step_3/actor")
        return differences(built)


class Bridge:
    """Notes what it is asked for: Megatron-Bridge needs a GPU."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def save_weights(self, _: Any, weights_path: str) -> None:
        self.called.append(f"saves {weights_path}")

    def load_weights(self, _: Any, weights_path: str) -> None:
        self.called.append(f"loads {weights_path}")


def load_by_bridge(rank: int, world_size: int, root: str, contents: list[str]) -> tuple[list[str], list[str]]:
    """What the bridge was asked for, and the names of tensors that are not as they were saved."""
    from verl.workers.config.checkpoint import McoreCheckpointConfig

    config = McoreCheckpointConfig(save_contents=["hf_model", "optimizer"], load_contents=contents)
    bridge, hf_config = Bridge(), SimpleNamespace(save_pretrained=lambda _: None)
    others = {"checkpoint_config": config, "bridge": bridge, "hf_config": hf_config}
    with on_host(Layout()):
        built = build(Layout())
        fill(built)
        manager_of(built, **others).save_checkpoint(f"{root}/global_step_1/actor", None, 1)
        fill(built, "other.")
        manager_of(built, **others).load_checkpoint(f"{root}/global_step_1/actor")
        return bridge.called, differences(built)


def refuse_megatron_fsdp(rank: int, world_size: int) -> str:
    with on_host(Layout()):
        built = build(Layout())
        try:
            manager_of(built, use_megatron_fsdp=True)
        except ValueError as error:
            return str(error)
    return ""


def names_in(root: str) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir())
