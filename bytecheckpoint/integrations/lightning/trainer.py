"""Strategies of Lightning's Trainer whose checkpoints are this library's: what a strategy is asked to save and to load,
from the live module, optimizers and loaders.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from bytecheckpoint import api
from bytecheckpoint.adapters.data.loader_state import Elastic
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.info import LoadReport
from bytecheckpoint.integrations.lightning.loaders import TrainLoaders, count_batches_anew
from bytecheckpoint.integrations.lightning.model_state import is_same, module_or_part
from bytecheckpoint.integrations.lightning.paths import (
    GLOBAL_STEP,
    ChosenCheckpoint,
    chosen_by_lightning,
    drop_gone_paths,
    find_checkpoint,
    lasting_paths,
    refuse_weights_only,
    take_place,
)
from bytecheckpoint.integrations.lightning.plain_state import as_plain, from_plain, is_mid_epoch
from bytecheckpoint.integrations.lightning.saves import SaveInFlight, refuse_deepspeed
from bytecheckpoint.integrations.shared.agreed_stop import AgreedStop
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.named_parameters import parameters_named
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default
from bytecheckpoint.storage.credentials import showable_url


class BcpStrategyMixin(Strategy):
    """Makes a strategy of Lightning's Trainer save and load with this library: `class Mine(BcpStrategyMixin, Theirs)`.

    Args:
        async_save: Write in the background during training. The strategy waits before its next save, load or teardown.
        options: See SaveOptions. Their `overwrite` has no effect: a checkpoint that is at the path is always replaced.
        storage_options: For the fsspec backend; those of a call of `Trainer.save_checkpoint` take precedence.
        elastic: For train loaders that are not exact on another number of ranks: see DataLoaderState.
        signals: Names of signals after which all ranks stop at the end of the same batch with Lightning's
            SIGTERMException; () leaves them to Lightning.
        exception_timeout_s: After an exception, a checkpoint is saved only if all ranks begin the save within this many
            seconds, and an earlier save then ends within as many; the save itself may take longer.
    """

    def __init__(
        self,
        *args: Any,
        async_save: bool = True,
        options: SaveOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        elastic: Elastic = "at_least_once",
        signals: tuple[str, ...] = ("SIGTERM",),
        exception_timeout_s: float = 30.0,
        **kwargs: Any,
    ) -> None:
        refuse_deepspeed(self, DeepSpeedStrategy)
        super().__init__(*args, **kwargs)
        self.bcp_async_save = async_save
        self.bcp_options = replace(given_or_default(options, SaveOptions), overwrite=True)
        self.bcp_storage_options = storage_options
        self.bcp_exception_timeout_s = exception_timeout_s
        self._bcp_saves = SaveInFlight()
        self._bcp_loaders = TrainLoaders(elastic)
        self._bcp_signals = signals
        self._bcp_stop: AgreedStop | None = None
        self._bcp_shown: dict[str, Any] = {}
        self._bcp_random: LoadReport | None = None
        self._bcp_is_foreign = False

    # What `Trainer.save_checkpoint` asks for.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the live tensors, for hooks to choose from; an empty dict under FSDP1, which would gather them."""
        is_gathered = isinstance(self.model, FullyShardedDataParallel)
        self._bcp_shown = {} if is_gathered else dict(self._bcp_module().state_dict())
        return dict(self._bcp_shown)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns an empty dict: optimizers are saved as live objects instead."""
        del optimizer
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves the module, optimizers, loaders and random state of all ranks, and what rank 0 has in `checkpoint`.
        After an exception in training that leaves a save impossible, raises it again, with a note that says why.
        """
        given = os.fspath(filepath)
        original = sys.exception() if self._bcp_trainer().state.status == TrainerStatus.INTERRUPTED else None
        if original is None:
            # After training, the caller may read the checkpoint at once: nothing would wait for the save.
            is_async = self.bcp_async_save and self._bcp_trainer().state.status == TrainerStatus.RUNNING
            self._bcp_save(checkpoint, given, storage_options or self.bcp_storage_options, is_async=is_async)
            return
        try:
            wait_s = self.bcp_exception_timeout_s
            Decisions(None, given, timeout_s=wait_s).do("saving after an exception", bool)
            self._bcp_saves.settle(timeout_s=wait_s, wait_s=wait_s)
            self._bcp_save(checkpoint, given, storage_options or self.bcp_storage_options, is_async=False)
        except (CheckpointError, TimeoutError) as error:
            # Lightning would go on with collectives, for which the other ranks may not come.
            why = str(error) or f"an earlier save was still under way after {self.bcp_exception_timeout_s:g} s"
            original.add_note(f"No checkpoint was saved at {showable_url(given)}: {why}")
            self._bcp_end_stop()  # raised from here, Lightning tears nothing down
            raise original from None

    def _bcp_save(
        self, checkpoint: dict[str, Any], given: str, storage_options: Mapping[str, Any] | None, *, is_async: bool
    ) -> None:
        decide = partial(take_place, self._bcp_trainer(), given, storage_options)
        source, placeholder = self._bcp_decide("naming a checkpoint", decide, tuple[str, str])
        if not (source and is_async):  # a copy is made after the save in flight, which training need not wait for
            self._bcp_saves.settle(timeout_s=self.bcp_options.timeout_s)
        if source:
            self._bcp_saves.copy(source, given, storage_options, timeout_s=self.bcp_options.timeout_s)
        else:
            self._bcp_begin(checkpoint, given, storage_options, is_async=is_async)
        if placeholder and self.is_global_zero:
            self._bcp_saves.remove_object(given, placeholder, storage_options)

    def _bcp_begin(
        self, checkpoint: dict[str, Any], path: str, storage_options: Mapping[str, Any] | None, *, is_async: bool
    ) -> None:
        metadata = {
            GLOBAL_STEP: int(checkpoint["global_step"]),
            "epoch": int(checkpoint["epoch"]),
            "weights_only": "optimizer_states" not in checkpoint,
            "num_loaders": len(self._bcp_loaders.states),
            "ended_loaders": self._bcp_loaders.ended(self._bcp_trainer().fit_loop._data_fetcher),
        }
        state, module = self._bcp_state(checkpoint), self._bcp_module()
        taken = {} if state["model"] is module or "current_model" in state else {"model": module}
        with parameters_named(taken, self.optimizers):
            handle = api.save(
                path,
                state,
                async_save=is_async,
                metadata=marked("lightning", metadata),
                storage_options=storage_options,
                options=self.bcp_options,
            )
        self._bcp_saves.note_begun(handle)

    def _bcp_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns the state to save: live objects of all ranks, and plain data of rank 0."""
        rest = dict(checkpoint)
        is_whole = "optimizer_states" in rest
        rest.pop("optimizer_states", None)
        module = self._bcp_module()
        shown, self._bcp_shown = self._bcp_shown, {}
        left = rest.pop("state_dict", {})
        state: dict[str, Any] = {"model": module_or_part(module, shown, left)}
        if isinstance(state["model"], dict):
            rest = {key: value for key, value in rest.items() if not is_same(value, shown)}
            state["current_model"] = module
        if is_whole and self.optimizers:
            state["optimizer"] = _one_or_all(self.optimizers)
        if is_whole:
            state["rng"] = RngState(elastic="keep")
            state.update(self._bcp_loaders.entries(self._bcp_trainer().fit_loop._data_fetcher))
        schedulers = rest.pop("lr_schedulers", [])
        if self.is_global_zero:
            if schedulers:
                state["scheduler"] = _one_or_all(schedulers)
            state["extra_state"] = as_plain(rest)
        return state

    # What `_CheckpointConnector` asks for when it loads.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self._bcp_is_foreign and bool(super().lightning_restore_optimizer)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: FBT001 - Lightning's signature
        """Loads into the live module and, in `fit`, the optimizers; returns what Lightning restores by itself.

        Raises CheckpointMismatchError (missing_key) for a checkpoint of weights alone that training is to go on from.
        """
        trainer = self._bcp_trainer()
        self._bcp_saves.settle(timeout_s=self.bcp_options.timeout_s)
        given, options = os.fspath(checkpoint_path), self.bcp_storage_options
        is_chosen = chosen_by_lightning(trainer)
        found = self._bcp_decide(
            "choosing a checkpoint",
            lambda: find_checkpoint(given, options, is_chosen=is_chosen),
            ChosenCheckpoint,
        )
        self._bcp_is_foreign = not found.is_own
        if self._bcp_is_foreign:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            return loaded
        if found.path != given:  # for messages, and so that the checkpoint resumed from is not removed
            trainer._checkpoint_connector._ckpt_path = found.path
        checkpoint = self._bcp_load(found, is_fitting=trainer.state.fn == TrainerFn.FITTING)
        callbacks = checkpoint.get("callbacks", {})
        lasting = self._bcp_decide(
            "looking for checkpoints", lambda: lasting_paths(trainer, callbacks, found.path, options), list[str]
        )
        drop_gone_paths(trainer, callbacks, found.path, lasting)
        return checkpoint

    def _bcp_load(self, found: ChosenCheckpoint, *, is_fitting: bool) -> dict[str, Any]:
        """Fills the live objects; returns the checkpoint as Lightning and its hooks expect it."""
        module, extra = self._bcp_module(), dict[str, Any]()
        state: dict[str, Any] = {"model": module}
        if is_fitting:
            refuse_weights_only(found)
            state |= {"optimizer": _one_or_all(self.optimizers)} if self.optimizers else {}
            state |= {name: {} for name in ("scheduler",) if name in found.names}
            state |= {"rng": RngState(elastic="keep")} if "rng" in found.names else {}
        if "extra_state" in found.names:
            state["extra_state"] = extra
        shown_by_hooks = is_fitting and "current_model" in found.names
        averaged = None
        if shown_by_hooks:  # the hooks that have replaced the weights expect both
            averaged = state["model"] = {name: value.clone() for name, value in module.state_dict().items()}
            state["current_model"] = module
        report = api.load(
            found.path,
            state,
            step=None,
            strict=module_of(self).strict_loading,
            storage_options=self.bcp_storage_options,
            options=LoadOptions(timeout_s=self.bcp_options.timeout_s),
        )
        checkpoint = {"pytorch-lightning_version": pl.__version__, **from_plain(extra)}
        current = {} if isinstance(self.model, FullyShardedDataParallel) else dict(module.state_dict())
        checkpoint["state_dict"] = averaged if averaged is not None else current
        if averaged is not None:
            checkpoint["current_model_state"] = current
        if is_fitting:
            scheduler = state.get("scheduler", [])
            checkpoint["lr_schedulers"] = scheduler if isinstance(scheduler, list) else [scheduler]
            # A new epoch draws its order from the random state as it was loaded: it is not put back there.
            self._bcp_random = report if "rng" in state and is_mid_epoch(checkpoint) else None
            restore, timeout_s = report.restore_rng if "rng" in state else bool, self.bcp_options.timeout_s
            self._bcp_loaders.load_later(found, self.bcp_storage_options, timeout_s=timeout_s, restore_random=restore)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002 - Lightning's signature
        """Loads a file of Lightning's own; else does nothing, because `load_checkpoint` has loaded the module."""
        if self._bcp_is_foreign:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads a file of Lightning's own; else does nothing, because `load_checkpoint` has loaded the optimizers."""
        if self._bcp_is_foreign:
            super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint, if any, on rank 0, once the save in flight is committed; never if that save fails."""
        if not self.is_global_zero:
            return
        path = os.fspath(filepath)
        if os.path.isfile(path) and not os.path.islink(path):  # noqa: PTH113, PTH114 - one of Lightning's own
            super().remove_checkpoint(filepath)
        else:
            self._bcp_loaders.when_loaded(path, partial(self._bcp_saves.remove, path, self.bcp_storage_options))

    # The course of training.

    def process_dataloader(self, dataloader: object) -> object:
        """Notes a train loader that has a state, and loads the state that was saved."""
        loader: object = super().process_dataloader(dataloader)
        trainer = self._bcp_trainer()
        if trainer.training:
            sharing = getattr(self, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
            self._bcp_loaders.add(loader, trainer.fit_loop, rank=sharing["rank"], size=sharing["num_replicas"])
        return loader

    def on_train_start(self) -> None:
        """Prepares a resumed epoch, and begins to handle signals. Raises CheckpointMismatchError (conflict) if
        Lightning reads a loader ahead by another number of batches than the `read_ahead` of its Streams.
        """
        super().on_train_start()
        trainer, fetcher = self._bcp_trainer(), self._bcp_trainer().fit_loop._data_fetcher
        self._bcp_loaders.check_read_ahead(fetcher)
        self._bcp_loaders.go_on_from_ended(fetcher)
        self._bcp_loaders.begin_next_epoch(trainer.fit_loop)
        count_batches_anew(trainer)
        if getattr(fetcher, "batches", None):  # read ahead: all draws to begin loaders are done
            self._bcp_restore_random()
        self._bcp_end_stop()
        if self._bcp_signals:
            root, timeout_s = trainer.default_root_dir, self.bcp_options.timeout_s
            self._bcp_stop = AgreedStop(root, signals=self._bcp_signals, timeout_s=timeout_s)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Puts the random state of a load back once the first batch is there: loaders draw from it when they begin."""
        if self._bcp_random is not None and self._bcp_trainer().training:
            self._bcp_restore_random()
        return super().batch_to_device(batch, *args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Stops all ranks after this batch if one of them was requested to stop."""
        super().on_train_batch_start(batch, batch_idx)
        self._bcp_restore_random()  # for a training_step(dataloader_iter), which takes batches itself
        if self._bcp_stop is not None and self._bcp_stop.end_step():
            self._bcp_trainer()._signal_connector.received_sigterm = True  # Lightning raises at the end of the batch

    def _bcp_restore_random(self) -> None:
        report, self._bcp_random = self._bcp_random, None
        if report is not None:
            report.restore_rng()

    def _bcp_end_stop(self) -> None:
        if self._bcp_stop is not None:
            self._bcp_stop.close()
            self._bcp_stop = None

    def teardown(self) -> None:
        """Waits for the save in flight, its copies and removals, however long they take. Raises the error of the save
        or of a copy, or adds it as a note to an exception that ends training.
        """
        self._bcp_end_stop()
        try:
            self._bcp_saves.settle(timeout_s=self.bcp_options.timeout_s)
        except CheckpointError as error:
            original = error.__context__ if self._bcp_is_interrupted() else None
            if original is None:
                raise
            original.add_note(str(error))
        finally:
            self._bcp_saves.close()
            self._bcp_loaders.clear()
            super().teardown()

    def _bcp_is_interrupted(self) -> bool:
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    def _bcp_trainer(self) -> pl.Trainer:
        return module_of(self).trainer

    def _bcp_module(self) -> nn.Module:
        """Returns the module to save: the user's module, or with FSDP the wrapper around it, which knows the layout."""
        model: nn.Module = self.model if isinstance(self.model, FullyShardedDataParallel) else module_of(self)
        return model

    def _bcp_decide(self, doing: str, decide: Any, kind: Any) -> Any:
        return Decisions(None, "", timeout_s=self.bcp_options.timeout_s).decide_together(doing, decide, kind)


def module_of(strategy: Strategy) -> pl.LightningModule:
    """Returns the user's module. Raises RuntimeError before the first run."""
    module = strategy.lightning_module
    if module is None:
        raise RuntimeError("the strategy has no LightningModule: it saves and loads within Trainer.fit, test, ...")
    return module


class BcpDDPStrategy(BcpStrategyMixin, DDPStrategy):
    """Lightning's DDPStrategy, saving with this library."""


class BcpFSDPStrategy(BcpStrategyMixin, FSDPStrategy):
    """Lightning's FSDPStrategy, saving with this library. `state_dict_type` has no effect: shards are saved as they
    are, and any layout loads them.
    """


class BcpModelParallelStrategy(BcpStrategyMixin, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, saving with this library. `save_distributed_checkpoint` has no effect: shards
    are saved as they are, and any layout loads them.
    """


class BcpSingleDeviceStrategy(BcpStrategyMixin, SingleDeviceStrategy):
    """Lightning's SingleDeviceStrategy, saving with this library: for training in one process."""


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else list(values)
