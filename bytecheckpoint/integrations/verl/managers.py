"""The checkpoint manager of verl's FSDP workers, and `install`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.shared.adapter_parts import adapters_of
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.shared.model_weights import save_weights
from bytecheckpoint.integrations.shared.named_parameters import parameters_named
from bytecheckpoint.integrations.verl.role_manager import RoleManager
from bytecheckpoint.integrations.verl.steps import metadata_of
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default

try:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.workers.engine.fsdp import transformer_impl as fsdp_engine
except ImportError as error:
    raise missing_framework("verl", "verl >= 0.8") from error

_LORA_ONLY = "lora_only"


class BcpFSDPCheckpointManager(RoleManager, FSDPCheckpointManager):
    """The checkpoint manager of verl's FSDP workers, FSDP1 or FSDP2, on any number of ranks.

    Saves return when the checkpoint is committed, or, with `checkpoint.async_save`, already when the model may be
    changed and moved. `save_contents`, `load_contents`, `save_lora_only` and `max_ckpt_to_keep` work as in verl's own
    manager.
    """

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Saves what `save_contents` names, with all ranks together.

        Args:
            local_path: The folder of the role, `global_step_100/actor`. With None, nothing is saved.
            hdfs_path: Without effect, as for verl's own manager.
            global_step: The step.
            max_ckpt_to_keep: Number of committed checkpoints of this role to keep; None or 0 for all. The one that the
                tracker file names stays in any case.

        Raises:
            CheckpointMismatchError: `hf_model` with adapters (`conflict`).
            CheckpointError: As `bytecheckpoint.save` raises it, for this save or the one before.
        """
        if local_path is None:
            return
        if self.should_save_hf_model and self._has_lora():
            raise CheckpointMismatchError(
                "save_contents has hf_model, and the model has adapters, which are no weights of their own there; "
                "nothing was saved: leave hf_model out, and merge them after training",
                kind="conflict",
                path=local_path,
            )
        self._saves.settle()
        is_lora_only = bool(self.should_save_lora_only and self._has_lora())
        state = self._state(
            with_model=self.should_save_model,
            with_optimizer=self.should_save_optimizer,
            with_extra=self.should_save_extra,
            is_lora_only=is_lora_only,
        )
        with self._saving_nothing():
            super().save_checkpoint(local_path, hdfs_path, global_step)
        if self.should_save_hf_model:
            weights = self.model.state_dict()
            save_weights(str(Path(local_path, "huggingface")), weights, options=self.bcp_options)
        with self._parameters_named(state):
            self._saves.save(
                local_path,
                state,
                global_step=global_step,
                num_kept=max_ckpt_to_keep,
                async_save=bool(self.checkpoint_config and self.checkpoint_config.get("async_save", False)),
                metadata={_LORA_ONLY: is_lora_only},
            )

    def _load(self, local_path: str) -> None:
        state = self._state(
            with_model=self.should_load_model,
            with_optimizer=self.should_load_optimizer,
            with_extra=self.should_load_extra,
            is_lora_only=bool(metadata_of(local_path).get(_LORA_ONLY, False)),
        )
        with self._parameters_named(state):
            self._saves.load(local_path, state)

    def _state(self, *, with_model: bool, with_optimizer: bool, with_extra: bool, is_lora_only: bool) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if with_model:
            state["model"] = adapters_of(self.model) if is_lora_only else self.model
        if with_optimizer:
            state["optimizer"] = self.optimizer
        if with_extra:
            state["rng"] = RngState(elastic="keep")
            if self.lr_scheduler is not None:
                state["scheduler"] = self.lr_scheduler
        return state

    def _parameters_named(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Returns a context in which the optimizer knows the names of its parameters. Does nothing if the state has the
        whole model, from which a save and a load take the names.
        """
        left_out = {} if state.get("model") is self.model else {"model": self.model}
        return parameters_named(left_out, [self.optimizer] if state.get("optimizer") is not None else [])

    @contextmanager
    def _saving_nothing(self) -> Iterator[None]:
        """Within this context, verl's own `save_checkpoint` writes only the files of tokenizer and configuration."""
        contents, self.checkpoint_save_contents = self.checkpoint_save_contents, []
        try:
            yield
        finally:
            self.checkpoint_save_contents = contents


def install(*, options: SaveOptions | None = None, load_options: LoadOptions | None = None) -> None:
    """Lets the workers of this process use these managers. Call it before they are initialized: from the module that
    `model.external_lib` names.

    Args:
        options: Of all saves: see SaveOptions.
        load_options: Of all loads: see LoadOptions.
    """
    managers: list[Any] = [BcpFSDPCheckpointManager]
    fsdp_engine.FSDPCheckpointManager = BcpFSDPCheckpointManager
    try:
        megatron_engine = import_module("verl.workers.engine.megatron.transformer_impl")
    except ImportError:
        megatron_engine = None  # a job without Megatron
    if megatron_engine is not None:
        managers.append(import_module("bytecheckpoint.integrations.verl.megatron_parts").BcpMegatronCheckpointManager)
        vars(megatron_engine)["MegatronCheckpointManager"] = managers[-1]
    for manager in managers:
        manager.bcp_options = given_or_default(options, SaveOptions)
        manager.bcp_load_options = given_or_default(load_options, LoadOptions, argument="load_options")
