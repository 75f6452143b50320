"""The checkpoint manager that Megatron-Bridge takes by name, as `CheckpointConfig.custom_manager_class`. Folders, names
and the choice of a checkpoint are those of Megatron-LM, whose fields the configuration has under the same names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed as dist

from bytecheckpoint import api
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.megatron.folder import (
    METADATA,
    RELEASE,
    TRACKER,
    VERSION,
    FoundIteration,
    check_has_positions,
    find,
    name_of,
    non_persistent_root,
    numbered_folders,
)
from bytecheckpoint.integrations.shared.agreed_folders import record_together
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.shared.numbered_folders import NumberedFolder, NumberedFolders
from bytecheckpoint.integrations.shared.tracked_folder import TrackedFolder
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.saving.in_flight import process_state

try:
    from megatron.bridge.training.checkpointing import DefaultCheckpointManager
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    from bytecheckpoint.integrations.megatron.training import has_parameters, optimizer_state, random_numbers
except ImportError as error:
    raise missing_framework("megatron_bridge", "megatron-bridge") from error

__all__ = ["BcpBridgeManager"]


class BcpBridgeManager:
    """Saves and loads the training of Megatron-Bridge. Its constructor takes the CheckpointConfig, as Bridge calls it.

    A subclass may set `bcp_options` and `bcp_storage_options`.
    """

    bcp_options = SaveOptions()
    bcp_storage_options: dict[str, Any] | None = None

    def __init__(self, checkpoint_config: Any) -> None:
        self.config = checkpoint_config
        self._folders: dict[str, NumberedFolders] = {}

    def save(self, ctx: Any, callback_manager: Any | None = None) -> None:
        """Saves at `iter_<step>`, with all ranks together; in the background if the configuration has `async_save`.

        Once this checkpoint is committed, rank 0 deletes older ones in the background. Of persistent ones it keeps the
        newest `most_recent_k` (all if None or not above 0), of non-persistent ones the newest. Those of later steps
        stay. `callback_manager` has no effect. Raises CheckpointMismatchError (conflict) for a non-persistent
        checkpoint whose type is not `global`, and the errors of `bytecheckpoint.save`.
        """
        del callback_manager
        config, train_state = self.config, ctx.state.train_state
        if ctx.non_persistent_ckpt and config.non_persistent_ckpt_type != "global":
            raise CheckpointMismatchError(
                f"non_persistent_ckpt_type={config.non_persistent_ckpt_type!r} is not supported; nothing was saved: "
                "use bcp_options = SaveOptions(local_stage=...)",
                kind="conflict",
            )
        folder = self._folder(non_persistent_root(config, config.save) if ctx.non_persistent_ckpt else config.save)
        state: dict[str, Any] = {"model": ctx.model}
        state |= optimizer_state(ctx.optimizer, ctx.opt_param_scheduler) if config.save_optim else {}
        state |= {"rng": _random_numbers(ctx)} if config.save_rng else {}
        described = {
            "iteration": train_state.step,
            "num_floating_point_operations_so_far": ctx.num_floating_point_operations_so_far,
            "checkpoint_version": VERSION,
            "args": {name: value.item() for name, value in train_state.state_dict().items()},
        }
        num_kept = 1 if ctx.non_persistent_ckpt else config.most_recent_k
        is_limited = num_kept is not None and num_kept > 0
        folders = self._numbered(folder) if is_limited and dist.get_rank() == 0 else None
        if is_limited:
            record_together(folder.decisions, folders, train_state.step)
        handle = folder.save(
            name_of(train_state.step),
            state,
            tracked_as=str(train_state.step),
            async_save=config.async_save,
            metadata=marked("megatron_bridge", {METADATA: described}),
            options=self.bcp_options,
            on_tracked=None,
        )
        if folders is not None:
            step = train_state.step
            folders.retire_after(handle, step, lambda: _before(folders, step, num_kept))

    def load(self, ctx: Any) -> tuple[int, float]:
        """Fills model, optimizer, scheduler and the state of training. Returns the step, 0 for a new run from loaded
        weights, and the number of floating-point operations so far.

        Megatron-Bridge's own manager is called for a checkpoint that it has saved, and if there is none at all. A
        checkpoint of `bytecheckpoint.integrations.megatron` is loaded too. Raises the errors of `bytecheckpoint.load`.
        """
        config, train_state = self.config, ctx.state.train_state
        folder = self._folder("")
        found = folder.decide_together(lambda: find(config, config.load, folder), FoundIteration)
        if found.is_of_megatron or not found.path:
            step, num_operations = DefaultCheckpointManager(config).load(ctx)
            return step, num_operations
        reached = _reached(found, train_state.state_dict())
        is_resumed = not (config.finetune or found.is_pretrained)
        is_trained = ctx.optimizer is not None or ctx.opt_param_scheduler is not None
        if is_resumed and is_trained and found.name != RELEASE:
            check_has_positions(found, "set finetune=True to do so")
        with_optimizer = is_resumed and config.load_optim
        state: dict[str, Any] = {"model": ctx.model}
        state |= optimizer_state(ctx.optimizer, ctx.opt_param_scheduler) if with_optimizer else {}
        state |= {"rng": _random_numbers(ctx)} if is_resumed and config.load_rng and found.has_rng else {}
        # Weights that an optimizer was saved with are in fp32, and a model alone may have them in another precision.
        api.load(
            found.path,
            state,
            strict=ctx.strict,
            cast=not with_optimizer,
            storage_options=self.bcp_storage_options,
            options=LoadOptions(timeout_s=self.bcp_options.timeout_s),
        )
        if not with_optimizer and has_parameters(ctx.optimizer):
            ctx.optimizer.reload_model_params()
        train_state.load_state_dict(reached)
        if is_resumed:
            update_num_microbatches(consumed_samples=train_state.consumed_train_samples, verbose=True)
        else:
            train_state.step = 0
        return train_state.step, train_state.floating_point_operations_so_far

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:  # noqa: FBT001, FBT002 - Bridge's signature
        """Waits for saves in the background if `blocking` or `terminate`, and for deletions too if `terminate`; else
        does nothing. Does not raise the error of a save: the next save does, or else it is printed when the process
        ends, with exit code 1.
        """
        del state
        if blocking or terminate:
            process_state().saves.wait_until_ended()
        for folders in self._folders.values() if terminate else ():
            folders.wait(self.bcp_options.timeout_s)

    def _numbered(self, folder: TrackedFolder) -> NumberedFolders:
        """Returns the object that manages the checkpoints of a folder, made by the first call for it. Must be called
        on rank 0 alone.
        """
        if folder.root not in self._folders:
            self._folders[folder.root] = numbered_folders(folder)
        return self._folders[folder.root]

    def _folder(self, root: str) -> TrackedFolder:
        return TrackedFolder(os.fspath(root), TRACKER, self.bcp_storage_options, self.bcp_options.timeout_s)


def _random_numbers(ctx: Any) -> RngState:
    return random_numbers(by_data_rank=ctx.state.cfg.rng.data_parallel_random_init)


def _reached(found: FoundIteration, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the state of training with the values of the checkpoint; what the checkpoint lacks is as in `state`."""
    counts = {"step": found.iteration, "floating_point_operations_so_far": found.num_floating_point_operations_so_far}
    saved = counts | found.args  # arguments of Megatron-LM's loop have the numbers of samples under the same names
    return {name: torch.tensor(saved.get(name, now.item()), dtype=now.dtype) for name, now in state.items()}


def _before(folders: NumberedFolders, step: int, num_kept: int) -> list[NumberedFolder]:
    """Returns the committed checkpoints up to this step except the newest `num_kept`, oldest first."""
    # Those of later steps, which training has left or has saved meanwhile, do not count: they would push out the newest
    # one.
    return [folder for folder in folders.committed() if folder.number <= step][:-num_kept]
