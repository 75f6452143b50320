"""Strategies of Fabric whose checkpoints are this library's: `Fabric.save` and `Fabric.load` of live objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from bytecheckpoint import api
from bytecheckpoint.adapters.collect import optimizers_in
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.lightning.model_state import module_or_part
from bytecheckpoint.integrations.lightning.saves import SaveInFlight, refuse_deepspeed
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.named_parameters import parameters_named
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default
from bytecheckpoint.state_tree import load_tree


class BcpFabricMixin(Strategy):
    """Makes a strategy of Fabric save and load with this library: `class Mine(BcpFabricMixin, Theirs)`.

    Args:
        async_save: Write in the background. The strategy waits for a save before its next save or load, and the
            program before it ends.
        options: See SaveOptions. Their `overwrite` has no effect: a checkpoint that is at the path is always replaced.
        storage_options: For the fsspec backend.
    """

    def __init__(
        self,
        *args: Any,
        async_save: bool = True,
        options: SaveOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_deepspeed(self, DeepSpeedStrategy)
        super().__init__(*args, **kwargs)
        self.bcp_async_save = async_save
        self.bcp_options = replace(given_or_default(options, SaveOptions), overwrite=True)
        self.bcp_storage_options = storage_options
        self._bcp_saves = SaveInFlight()

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 - Fabric's name
    ) -> None:
        """Saves a state, with all ranks together: what `bytecheckpoint.save` takes, under the same names.

        `filter` maps the name of a module in the state to a function of the name and value of each of its tensors; a
        tensor is saved if that returns True. Raises CheckpointMismatchError (conflict) for a filter of anything else,
        or of an FSDP1 module, and the errors of `bytecheckpoint.save`.
        """
        self._bcp_saves.settle(timeout_s=self.bcp_options.timeout_s)
        parts = {name: _filtered(name, value, (filter or {}).get(name)) for name, value in state.items()}
        taken = {name: value for name, value in state.items() if parts[name] is not value}
        with parameters_named(taken, optimizers_in(state) if taken else ()):
            handle = api.save(
                path,
                parts,
                async_save=self.bcp_async_save,
                metadata=marked("fabric"),
                storage_options=storage_options or self.bcp_storage_options,
                options=self.bcp_options,
            )
        self._bcp_saves.note_begun(handle)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,  # noqa: FBT001, FBT002 - Fabric's signature
        weights_only: bool | None = None,  # noqa: FBT001
    ) -> dict[str, Any]:
        """Fills a state, with all ranks together, and returns the plain data of the checkpoint under names that the
        state does not have. Without a state, returns the whole checkpoint.

        Lightning's own files are read too. `weights_only` has no effect: nothing is unpickled. Raises
        CheckpointMismatchError (conflict) if `state` is a module or an optimizer instead of a dict, and the errors of
        `bytecheckpoint.load`.
        """
        del weights_only
        self._bcp_saves.settle(timeout_s=self.bcp_options.timeout_s)
        options, storage_options = LoadOptions(timeout_s=self.bcp_options.timeout_s), self.bcp_storage_options
        if not state:
            return load_tree(path, step=None, storage_options=storage_options, options=options)
        if isinstance(state, nn.Module | Optimizer):
            raise CheckpointMismatchError(
                f"a {type(state).__name__} has no name in the checkpoint {os.fspath(path)}; nothing was changed: pass "
                'a dict, as in fabric.load(path, {"model": model})',
                kind="conflict",
            )
        api.load(path, state, step=None, strict=strict, storage_options=storage_options, options=options)
        objects = api.open(path, step=None, storage_options=storage_options).objects
        return {name: value for name, value in objects.items() if name not in state}

    def teardown(self) -> None:
        """Waits for the save in flight. Raises its error."""
        try:
            self._bcp_saves.settle(timeout_s=self.bcp_options.timeout_s)
        finally:
            self._bcp_saves.close()
            super().teardown()


class BcpFabricDDPStrategy(BcpFabricMixin, DDPStrategy):
    """Fabric's DDPStrategy, saving with this library."""


class BcpFabricFSDPStrategy(BcpFabricMixin, FSDPStrategy):
    """Fabric's FSDPStrategy, saving with this library. `state_dict_type` has no effect: shards are saved as they are,
    and any layout loads them.
    """


def _filtered(name: str, value: Any, chooses: Callable[[str, Any], bool] | None) -> Any:
    """Returns a module with the tensors for which `chooses` returns True; the value itself if `chooses` is None. Raises
    CheckpointMismatchError (conflict) if the value is no module, or one under FSDP1.
    """
    if chooses is None:
        return value
    module = value.module if isinstance(value, nn.parallel.DistributedDataParallel) else value
    if not isinstance(module, nn.Module) or isinstance(module, FullyShardedDataParallel):
        raise CheckpointMismatchError(
            f"the filter of {name!r} is for a {type(value).__name__}, and filters are for modules that FSDP has not "
            "flattened; nothing was saved: leave the filter out, or leave the names out at the load, with "
            "bcp.load(..., exclude=...)",
            kind="conflict",
        )
    shown = module.state_dict()
    return module_or_part(module, shown, {key: item for key, item in shown.items() if chooses(key, item)})
