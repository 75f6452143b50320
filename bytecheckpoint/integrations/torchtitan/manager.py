"""The checkpoint manager that torchtitan calls."""

from __future__ import annotations

import glob
import logging
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

from bytecheckpoint import api
from bytecheckpoint.adapters.data.loader_state import DataLoaderState, Elastic
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.errors import and_more
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.integrations.dcp.calls import SaveFuture
from bytecheckpoint.integrations.shared.agreed_folders import on_rank_0, record_together
from bytecheckpoint.integrations.shared.agreed_stop import AgreedStop
from bytecheckpoint.integrations.shared.loader_state import loader_state
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.shared.model_weights import load_weights, save_weights
from bytecheckpoint.integrations.shared.numbered_folders import NumberedFolders
from bytecheckpoint.integrations.torchtitan.resume import LoadChoice, choose, delete_left
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.manager.agreement.stopping import rank_in, size_of
from bytecheckpoint.manifest.plain_wire import is_at_or_below
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.saving.handle import SaveHandle

try:
    import tyro
    from torchtitan.components.checkpointer import BaseCheckpointManager
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem
except ImportError as error:
    raise missing_framework("torchtitan", "torchtitan >= 0.3") from error

logger = logging.getLogger("bytecheckpoint")

_ENTRIES = {"optimizer": "optimizer", "lr_scheduler": "scheduler", "dataloader": "data"}
"""Names in the checkpoint of what torchtitan calls otherwise; its other states are in `extra_state`."""


class BcpCheckpointManager(BaseCheckpointManager):
    """The `checkpointer` of torchtitan's Trainer.

    A save runs beside the next forward and backward pass; the Trainer waits for its staging before each step of the
    optimizers. After a SIGTERM to any rank, all ranks save at the end of the same step, and end with exit code 143.

    torchtitan's Trainer passes the arguments; see Config for `config`.

    Raises:
        ValueError: `last_save_in_hf` needs an `sd_adapter`.
        TypeError: The loader has no state.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, and these."""

        async_save: bool = True
        """Write in the background. The last checkpoint is written at once in any case."""
        elastic: Literal["exact", "same", "at_least_once", "restart"] | None = None
        """Treatment of the data loader on another number of data-parallel ranks, see bytecheckpoint.DataLoaderState.
        None is `exact` for loaders of streams, and `same`, which refuses another number, for all others."""
        stop_signals: list[str] = field(default_factory=lambda: ["SIGTERM"])
        """Signals that save and end the run."""
        options: Annotated[SaveOptions, tyro.conf.Suppress] = field(default_factory=SaveOptions)
        """See bytecheckpoint.SaveOptions. With snapshot="auto" staging is lazy."""
        load_options: Annotated[LoadOptions, tyro.conf.Suppress] = field(default_factory=LoadOptions)
        """See bytecheckpoint.LoadOptions."""
        storage_options: Annotated[dict[str, Any] | None, tyro.conf.Suppress] = field(default=None, repr=False)
        """For the fsspec backend of `folder` and of `initial_load_path`; never stored."""

        def to_dict(self) -> dict[str, Any]:
            """Returns the options without `storage_options`, which may have credentials: torchtitan logs and stores the
            result.
            """
            fields: dict[str, Any] = BaseCheckpointManager.Config.to_dict(replace(self, storage_options=None))
            return fields

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("checkpoint.last_save_in_hf needs an sd_adapter, and the model_spec has none")
        self.config = config
        self.folder = filesystem.join(base_folder, config.folder)
        self.keep_latest_k = config.keep_latest_k
        self.states = states
        self.save_future: SaveFuture | None = None
        self._model_parts = model_parts
        self._sd_adapter = sd_adapter
        self._dataloader = dataloader
        self._entries: dict[str, Any] = {
            # The inner optimizers: the state of the container is gathered under names of its own.
            "optimizer": list(optimizers) if optimizers is not None else None,
            "scheduler": lr_schedulers,
            "data": _data_state(dataloader, config.elastic),
        }
        self._handle: SaveHandle | None = None
        self._replaceable: set[int] = set()
        self._decisions = Decisions(None, self.folder, timeout_s=config.options.timeout_s)
        self._folders = on_rank_0(self._decisions, self._begun)
        """None on other ranks."""
        signals = () if config.load_only else config.stop_signals
        self._stop = AgreedStop(self.folder, signals=signals, timeout_s=config.options.timeout_s)

    def _begun(self) -> NumberedFolders:
        folders = NumberedFolders(self.folder, "step-", storage_options=self.config.storage_options)
        if not self.config.load_only:
            folders.begin()
        return folders

    # Saving

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 - torchtitan's signature
        """Saves the step if it is due; returns True if it was. Raises SystemExit after the save of a stop, unless
        this is the last step.
        """
        if self.config.load_only:  # then no signal is handled either
            return False
        is_stop = self._stop.end_step()
        is_first = curr_step == 1 and self.config.enable_first_step_checkpoint
        is_due = is_stop or is_first or last_step or curr_step % self.config.interval == 0
        if is_due:
            self.maybe_wait_for_saving()
            if last_step and self.config.last_save_model_only:
                self._save_model(curr_step)
            else:
                self._begin_save(curr_step, self._state(), async_save=self.config.async_save and not last_step)
        if is_stop and not last_step:
            self._end_run(curr_step)
        return is_due

    def _begin_save(self, step: int, state: Mapping[str, Any], *, async_save: bool, model_only: bool = False) -> None:
        options = self.config.options
        if options.snapshot == "auto" and async_save:
            options = replace(options, snapshot="lazy")
        if step in self._replaceable:
            options = replace(options, overwrite=True)
        record = record_together(self._decisions, self._folders, step, model_only=model_only)
        handle = api.save(
            filesystem.join(self.folder, f"step-{step}"),
            state,
            async_save=async_save,
            metadata=marked("torchtitan", record.as_metadata()),
            storage_options=self.config.storage_options,
            options=options,
        )
        self._replaceable.discard(step)
        if self._folders is not None:
            self._folders.keep_newest(handle, step, self.keep_latest_k)
        if async_save:
            self._handle, self.save_future = handle, SaveFuture(handle)
        else:
            handle.result()

    def _save_model(self, step: int) -> None:
        """Saves the weights alone, converted to `export_dtype`: with `last_save_in_hf` as a folder of Hugging Face's
        format, else as a checkpoint. Returns when they are saved.
        """
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        weights = {name: _in_dtype(tensor, dtype) for name, tensor in self._weights().items()}
        if self.config.last_save_in_hf:
            path = filesystem.join(self.folder, f"step-{step}")
            save_weights(
                path,
                self._sd_adapter.to_hf(weights),
                options=self.config.options,
                storage_options=self.config.storage_options,
                make_room=partial(self._delete_left, step) if step in self._replaceable else None,
            )
        else:
            self._begin_save(step, {"model": weights}, async_save=False, model_only=True)

    def _delete_left(self, step: int) -> None:
        """Deletes the checkpoint of a step that the run has left by going back to an earlier one."""

        def delete() -> None:
            if self._folders is not None:
                delete_left(self._folders, step, storage_options=self.config.storage_options)

        record_together(self._decisions, self._folders, step, then=delete)
        self._replaceable.discard(step)

    def _state(self) -> dict[str, Any]:
        others = {name: value for name, value in self.states.items() if name not in {"model", *_ENTRIES}}
        state = {"model": self._model_parts, **self._entries, "extra_state": others, "rng": RngState(elastic="keep")}
        return {name: value for name, value in state.items() if value is not None}

    def _weights(self) -> dict[str, Any]:
        return {name: value for part in self._model_parts for name, value in part.state_dict().items()}

    def _end_run(self, step: int) -> None:
        """Waits until the step is durable, closes this manager, and raises SystemExit with the signal's exit code."""
        self.maybe_wait_for_saving()
        logger.warning("%s: step %d is saved in %s, and the run ends", self._stop.reason, step, self.folder)
        number = signal.Signals[self._stop.reason]
        self.close()
        raise SystemExit(128 + number)

    # Waiting

    def _maybe_wait_for_staging(self) -> None:
        if self._handle is not None:
            self._handle.staged()
            self._handle = None

    def _wait_for_saving(self) -> None:
        future, self.save_future, self._handle = self.save_future, None, None
        if future is not None:
            future.result()

    def _close(self) -> None:
        self.enable = False  # torchtitan calls `close` once more when it ends
        try:
            self._wait_for_saving()
        finally:
            self._stop.close()
            if self._folders is not None:
                self._folders.close(self.config.options.timeout_s)

    # Loading

    def _load(self, step: int = -1) -> bool:
        unknown = set(self.config.exclude_from_loading) - set(self.states) - set(_ENTRIES)
        if unknown:
            raise ValueError(f"checkpoint.exclude_from_loading: {sorted(unknown)} are no states of this run")
        choice = self._decisions.decide_together("looking for a checkpoint", partial(self._choose, step), LoadChoice)
        if not choice.path:
            return False
        self._replaceable = set(choice.replaceable)
        if choice.is_initial and self.config.initial_load_in_hf:
            self._load_for_adapter(choice.path)
        elif choice.model_only:
            self._load_weights(choice.path, self._model_parts)
        else:
            self._load_state(choice.path)
        return True

    def _choose(self, step: int) -> LoadChoice:
        """Returns the choice of `choose` for this run. Rank 0 calls it."""
        if self._folders is None:
            raise RuntimeError("rank 0 decides")
        return choose(self._folders, step, self.config, assets=getattr(self._sd_adapter, "hf_assets_path", None))

    def _load_state(self, path: str) -> None:
        storage_options = self._storage_options_for(path)
        with api.open(path, storage_options=storage_options) as checkpoint:
            # Of either format: `bcp convert` writes those of torchtitan in that of this library, and back.
            names = {name.partition(".")[0] for name in (*checkpoint, *checkpoint.objects)}
            if "extra_state" not in names and (checkpoint.info.format != OWN_FORMAT or "train_state" in names):
                self._load_state_of_torchtitan(path, checkpoint.objects)
                return
            inside = [name.removeprefix("extra_state.") for name in checkpoint if name.startswith("extra_state.")]
            stored = {*map(self._state_with, inside), *checkpoint.objects.get("extra_state", ())}
        left_out = set(self.config.exclude_from_loading)
        state = self._state()
        for name in left_out & set(_ENTRIES):
            state.pop(_ENTRIES[name], None)
        state["extra_state"] = {name: each for name, each in state["extra_state"].items() if name not in left_out}
        own = state["extra_state"]
        # Where a dot may belong to the name of a state, the load refuses what has no place, rather than leave it out.
        gone = [name for name in stored - own.keys() if not any(each.startswith(f"{name}.") for each in own)]
        excluded = [_glob_of(name, others=own) for name in sorted(gone)]
        report = api.load(
            path,
            state,
            exclude=excluded or None,
            storage_options=storage_options,
            options=self.config.load_options,
        )
        _restore_at_first_forward(self._model_parts, report.restore_rng)

    def _state_with(self, fqn: str) -> str:
        """Returns the name of the run's state, which may have dots, to which a tensor in `extra_state` belongs; if none
        has it, the name up to the first dot.
        """
        return next((name for name in self.states if is_at_or_below(fqn, {name})), fqn.partition(".")[0])

    def _load_state_of_torchtitan(self, path: str, stored: Mapping[str, Any]) -> None:
        """Loads a checkpoint of torchtitan's own manager: it has the names of torchtitan, and no random numbers."""
        held = {**self.states, "dataloader": self._dataloader}
        held |= {name: self._entries[entry] for name, entry in _ENTRIES.items() if name != "dataloader"}
        left_out = {"model", *self.config.exclude_from_loading}
        state = {name: each for name, each in held.items() if each is not None and name not in left_out}
        # A state that holds nothing, as a loader that is None, is a single value.
        excluded = [glob.escape(name) + ".*" * bool(stored[name]) for name in sorted(set(stored) - set(state))]
        api.load(
            path,
            {"model": self._model_parts, **state},
            exclude=excluded or None,
            storage_options=self._storage_options_for(path),
            options=self.config.load_options,
        )

    def _load_weights(self, path: str, weights: Any) -> None:
        storage_options = self._storage_options_for(path)
        load_weights(path, weights, options=self.config.load_options, storage_options=storage_options)

    def _storage_options_for(self, path: str) -> dict[str, Any] | None:
        """Returns the options of the run; None for a local path, which takes none: an initial checkpoint may be one."""
        return self.config.storage_options if filesystem.is_remote(path) else None

    def _load_for_adapter(self, path: str) -> None:
        """Fills the model from weights in Hugging Face's format, whose names and order of rows the adapter translates.
        Raises ValueError without an adapter.
        """
        if self._sd_adapter is None:
            raise ValueError("checkpoint.initial_load_in_hf needs an sd_adapter, and the model_spec has none")
        weights = self._sd_adapter.to_hf(self._weights())
        if self.config.initial_load_in_hf_quantized:  # in a format that torchtitan knows
            torch_load(weights, storage_reader=self._sd_adapter.get_hf_storage_reader(path, True))
        else:
            self._load_weights(path, weights)
        own = self._sd_adapter.from_hf(weights)
        self._warn_of_unnamed(path, own)
        for part in self._model_parts:
            part.load_state_dict(own, strict=False)

    def _warn_of_unnamed(self, path: str, loaded: Collection[str]) -> None:
        """Warns on rank 0 of parameters that the adapter left out: torchtitan 0.3.0 forgets the experts of gpt-oss."""
        named = {name: each for part in self._model_parts for name, each in part.state_dict(keep_vars=True).items()}
        tied = {id(named[name]) for name in loaded if name in named}
        left = [name for name, each in named.items() if isinstance(each, nn.Parameter) and id(each) not in tied]
        if left and rank_in(None) == 0:
            who = type(self._sd_adapter).__name__
            logger.warning("%s: %s has no names for %s, which keep their first values", path, who, and_more(left, 10))


def _data_state(dataloader: Any, elastic: Elastic | None) -> DataLoaderState | None:
    if dataloader is None:
        return None
    rank = getattr(dataloader, "dp_rank", rank_in(None))
    size = getattr(dataloader, "dp_world_size", size_of(None))
    return loader_state(dataloader, rank=rank, size=size, elastic=elastic)


def _glob_of(name: str, *, others: Collection[str]) -> str:
    """Returns a glob for one of torchtitan's states: a single value, or the names below it. If the name of one of
    `others` begins with `name`, the glob only matches names below it.
    """
    is_start = any(other.startswith(name) for other in others)
    return f"extra_state.{glob.escape(name)}{'.*' if is_start else '*'}"


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    is_other = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
    return value.to(dtype) if is_other else value


def _restore_at_first_forward(model_parts: Sequence[nn.Module], restore: Any) -> None:
    """Calls `restore` once, at the first forward pass of any part. By then the loader has given its first batch, for
    which it has drawn from the generators.
    """

    def hook(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        if not done:
            done.append(True)
            restore()

    done: list[bool] = []
    handles = [part.register_forward_pre_hook(hook) for part in model_parts]
