"""verl's Megatron engine on the host. Megatron-Bridge, which builds its model, needs a GPU: megatron-core builds a GPT
model in its place. All else is verl's: optimizer, scheduler, checkpoint manager, its calls, and moves to host memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from verl.workers.config.checkpoint import McoreCheckpointConfig
from verl.workers.config.engine import McoreEngineConfig
from verl.workers.config.optimizer import McoreOptimizerConfig
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

from frameworks.real_megatron import VOCABULARY, Layout, build

CONTENTS = ["model", "optimizer", "extra"]
LENGTH = 8


class EngineOnHost(MegatronEngine):
    """The engine with a GPT model of megatron-core, in the groups that are there."""

    def __init__(self, layout: Layout, *, async_save: bool = False, offload: bool = False, **checkpoint: Any) -> None:
        self.layout = layout
        kinds = {"model_type": "language_model", "architectures": ["GPTModel"], "local_path": "", "hf_config": None}
        model = SimpleNamespace(**kinds, mtp=SimpleNamespace(enable=False), get_processor=lambda: None)
        contents = {"save_contents": CONTENTS, "load_contents": CONTENTS, "async_save": async_save, **checkpoint}
        super().__init__(
            model_config=model,
            engine_config=McoreEngineConfig(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                use_dist_checkpointing=True,  # else verl's own manager asks for a bridge
                param_offload=offload,
                optimizer_offload=offload,
            ),
            optimizer_config=McoreOptimizerConfig(
                lr=0.01, total_training_steps=100, use_checkpoint_opt_param_scheduler=True
            ),
            checkpoint_config=McoreCheckpointConfig(**contents),
        )

    def initialize(self) -> None:
        with mock.patch.object(transformer_impl, "log_gpu_memory_usage"):
            super().initialize()

    def _build_tf_config(self) -> None:
        self.bridge = self.provider = self.peft_cls = self.tf_config = None
        self.is_value_model, self.share_embeddings_and_output_weights = False, False
        self.param_dtype = torch.bfloat16

    def _build_megatron_module(self) -> list[Any]:
        chunks = build(self.layout).chunks
        self.tf_config = chunks[0].config
        return chunks

    @property
    def manager(self) -> Any:
        return self.checkpoint_mananager

    def step(self, step: int) -> float:
        """Trains one step on tokens that all ranks have."""
        (chunk,) = self.module
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        places = torch.arange(LENGTH).expand(len(tokens), -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        self.optimizer_zero_grad()
        loss = chunk(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        chunk.finish_grad_sync()
        self.optimizer_step()
        self.lr_scheduler_step()
        return float(loss.detach())
