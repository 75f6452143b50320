"""The checkpoint manager for the Megatron workers of verl. managers.py has that of the FSDP workers, and `install`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.verl.role_manager import RoleManager

try:
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
    from verl.utils.megatron_utils import get_hf_model_checkpoint_path
except ImportError as error:
    raise missing_framework("verl.megatron_parts", "verl >= 0.8' 'megatron-core") from error


class BcpMegatronCheckpointManager(RoleManager, MegatronCheckpointManager):
    """The checkpoint manager of verl's Megatron workers, for any number of ranks along any dimension.

    The distributed optimizer is saved in its shards: nothing is gathered on a data-parallel rank. With the optimizer,
    the weights are always saved and loaded too; a model with adapters is saved whole. verl's bridge writes `hf_model`,
    and reads it if neither `model` nor `optimizer` is to be loaded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_megatron_fsdp:
            raise CheckpointMismatchError(
                "Megatron-FSDP's optimizer is not supported; nothing was done: set use_megatron_fsdp=False, or use "
                "verl's MegatronCheckpointManager",
                kind="conflict",
            )

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Saves what `save_contents` names, as BcpFSDPCheckpointManager does, except that `local_path` must not be None
        and that `hf_model` is also written for a model with adapters.
        """
        del hdfs_path  # for copies, which are not made here
        self._saves.settle()
        self.previous_global_step = global_step
        Path(local_path).mkdir(parents=True, exist_ok=True)
        if "hf_model" in self.checkpoint_save_contents:
            self._save_hf_config_and_tokenizer(local_path)
            self._save_model_as_hf_via_bridge(get_hf_model_checkpoint_path(local_path))
        if self.should_save_extra:
            self._save_transformer_config(local_path)
        state = self._state(
            with_model=self.should_save_model,
            with_optimizer=self.should_save_optimizer,
            with_extra=self.should_save_extra,
            has_scheduler=self.should_save_optimizer,
        )
        self._saves.save(
            local_path,
            state,
            global_step=global_step,
            num_kept=max_ckpt_to_keep,
            async_save=bool(self.checkpoint_config.async_save),
            metadata={},
        )

    def _load(self, local_path: str) -> None:
        if "hf_model" in self.checkpoint_load_contents and not (self.should_load_model or self.should_load_optimizer):
            self._load_model_as_hf_via_bridge(get_hf_model_checkpoint_path(local_path))
        state = self._state(
            with_model=self.should_load_model,
            with_optimizer=self.should_load_optimizer,
            with_extra=self.should_load_extra,
            has_scheduler=self.should_load_optimizer and self.use_checkpoint_opt_param_scheduler,
        )
        self._saves.load(local_path, state)

    def _state(
        self, *, with_model: bool, with_optimizer: bool, with_extra: bool, has_scheduler: bool
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if with_model or with_optimizer:  # the optimizer holds the master weights of the model
            state["model"] = list(self.model)
        if with_optimizer:
            state["optimizer"] = self.optimizer
        if has_scheduler and self.lr_scheduler is not None:
            state["scheduler"] = self.lr_scheduler
        if with_extra:
            state["rng"] = RngState(elastic="keep")
        return state
