"""The calls of DeepSpeed's engines, `engine.save_checkpoint` and `engine.load_checkpoint`, as functions that take the
engine first. Tags, the file `latest` and client state work as in DeepSpeed. Each rank saves the shards that it holds in
memory, as global tensors, so any number of ranks and any stage of ZeRO resume from them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch import nn

from bytecheckpoint import api
from bytecheckpoint.adapters.data.loader_state import DataLoaderState
from bytecheckpoint.adapters.frameworks.deepspeed import COUNTERS
from bytecheckpoint.adapters.native.module_parts import is_extra_state
from bytecheckpoint.adapters.native.module_walk import tree_of
from bytecheckpoint.adapters.plain.plain_data import decode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves, with_leaves
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.checkpoint import Checkpoint
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.shared.partial_module import partial_module
from bytecheckpoint.integrations.shared.tracked_folder import TrackedFolder
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default
from bytecheckpoint.saving.handle import SaveHandle

try:
    from deepspeed import DeepSpeedEngine
except ImportError as error:
    raise missing_framework("deepspeed", "deepspeed") from error

__all__ = ["load_checkpoint", "save_checkpoint"]

logger = logging.getLogger("bytecheckpoint")

LATEST = "latest"
_REPORT = "bcp_load_report"
"""Attribute of an engine: the report of its last load."""
_STATES, _GROUPS, _SCHEDULER = "optimizer.state.*", "optimizer.groups*", "optimizer.facts.lr_scheduler.*"
_OF_DEEPSPEED = "deepspeed"
"""Format of DeepSpeed's own checkpoints."""
_OF_ENGINE = {
    *("model", "module", "optimizer", "engine", "lr_scheduler", "mixed_precision", "dp_world_size", "mp_world_size"),
    *("data_sampler", "random_ltd"),
}
"""Top-level names in DeepSpeed's own checkpoints that are no client state."""


def save_checkpoint(  # noqa: PLR0917 - DeepSpeed's signature
    engine: DeepSpeedEngine,
    save_dir: str | os.PathLike[str],
    tag: str | int | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's signature
    exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's signature
    *,
    data: DataLoaderState | None = None,
    async_save: bool = True,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveHandle:
    """Saves an engine, with all ranks together, at `save_dir/tag`; replaces a checkpoint of this tag atomically.

    Args:
        engine: Of `deepspeed.initialize`.
        save_dir: A folder or any fsspec URL.
        tag: `global_step<n>` if None. The same on all ranks.
        client_state: Your own plain data and tensors, which `load_checkpoint` gives back. What differs between ranks is
            kept for each of them.
        save_latest: Write the tag into the file `latest`, when the checkpoint is committed.
        exclude_frozen_parameters: Leave out parameters that do not require gradients; load with
            `load_module_strict=False` then.
        data: The state of the loader.
        async_save: Return as soon as training may go on, and write in the background: the handle then raises the errors
            of the write.
        options: See SaveOptions; their `overwrite` has no effect, since a checkpoint of this tag is always replaced.
        storage_options: For the fsspec backend; never stored.

    Returns:
        The handle of the save. It is truthy, as the True that DeepSpeed returns.

    Raises:
        ValueError: `save_dir` is empty.
        StorageError: The checkpoint is committed, and `latest` could not be written; and other errors of the store.
        CheckpointError: As `bytecheckpoint.save` raises it.
    """
    if not os.fspath(save_dir):
        raise ValueError(f"save_dir takes a folder or a URL, not {save_dir!r}")
    options = given_or_default(options, SaveOptions)
    name = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    state: dict[str, Any] = {"model": _TrainedEngine(engine) if exclude_frozen_parameters else engine}
    if _has_optimizer(engine):
        state["optimizer"] = engine.optimizer
    state |= {"rng": RngState(elastic="keep"), "extra_state": {"client_state": dict(client_state or {}), "tag": name}}
    if data is not None:
        state["data"] = data
    folder = TrackedFolder(os.fspath(save_dir), LATEST, storage_options, options.timeout_s)
    return folder.save(
        name,
        state,
        tracked_as=name if save_latest else None,
        async_save=async_save,
        metadata=marked("deepspeed", {"deepspeed_tag": name}),
        options=options,
        on_tracked=None,
    )


def load_checkpoint(  # noqa: PLR0917 - DeepSpeed's signature
    engine: DeepSpeedEngine,
    load_dir: str | os.PathLike[str],
    tag: str | int | None = None,
    load_module_strict: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's signature
    load_optimizer_states: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's signature
    load_lr_scheduler_states: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's signature
    load_module_only: bool = False,  # noqa: FBT001, FBT002 - DeepSpeed's signature
    custom_load_fn: None = None,
    *,
    data: DataLoaderState | None = None,
    options: LoadOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Fills an engine, in place and with all ranks together, from what `save_checkpoint` or DeepSpeed has saved.

    Any number of ranks, any stage of ZeRO and any precision load what any other saved. Generators of random numbers are
    set too, unless `load_module_only`; call `engine.bcp_load_report.restore_rng()` after the first batch of the loader,
    which may have drawn from them, to set them again.

    Args:
        engine: Of `deepspeed.initialize`.
        load_dir: As `save_dir` was.
        tag: That of `latest` if None.
        load_module_strict: Raise for keys that are missing on either side; otherwise load what fits.
        load_optimizer_states: Load the state of the optimizer. If False, counters and loss scales are loaded all the
            same.
        load_lr_scheduler_states: Load the scheduler.
        load_module_only: Load weights alone; the client state is returned all the same.
        custom_load_fn: Not supported: use `bytecheckpoint.load` with `key_map`.
        data: The state of the loader, which is filled too.
        options: See LoadOptions.
        storage_options: For the fsspec backend.

    Returns:
        The path and the client state, empty if none was saved; (None, None) without `tag` where there is no `latest`,
        with a warning.

    Raises:
        CheckpointNotFoundError: No committed checkpoint has this tag, or `latest` is empty.
        CheckpointMismatchError: The checkpoint does not fit, or `custom_load_fn` was given; the engine is unchanged.
        CheckpointError: As `bytecheckpoint.load` raises it.
    """
    if custom_load_fn is not None:
        raise CheckpointMismatchError(
            "custom_load_fn is not supported, because no rank has the whole state dict that it takes; nothing was "
            "loaded: use bytecheckpoint.load with key_map, or include and exclude",
            kind="conflict",
        )
    options = given_or_default(options, LoadOptions)
    folder = TrackedFolder(os.fspath(load_dir), LATEST, storage_options, options.timeout_s)
    found = folder.decide_together(lambda: _find(folder, tag), _Found)
    if not found.name:
        return None, None
    path, excluded = folder.path_of(found.name), list[str]()
    extra: dict[str, Any] = {}  # takes whatever the checkpoint has
    state: dict[str, Any] = {"model": engine}
    if not load_module_only:
        if _has_optimizer(engine) and (load_optimizer_states or found.has_facts):
            state["optimizer"] = engine.optimizer
        if found.has_rng:
            state["rng"] = RngState(elastic="keep")
        if data is not None:
            state["data"] = data
        excluded += [] if load_optimizer_states else found.globs_of_states
        excluded += [] if load_lr_scheduler_states else found.globs_of_scheduler
    if found.has_shared_client_state:
        state["extra_state"] = extra
    report = api.load(
        path,
        state,
        strict=load_module_strict,
        exclude=excluded or None,
        storage_options=storage_options,
        options=options,
    )
    setattr(engine, _REPORT, report)
    if not found.has_shared_client_state:
        return path, _own_client_state(path, storage_options)
    return path, extra.get("client_state", {})


def _own_client_state(path: str, storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the client state that this rank has saved, or that of the lowest rank if this rank saved none; an empty
    dict if no rank did. From a checkpoint of DeepSpeed itself, returns all entries but the engine's: DeepSpeed saves
    both in one dict.
    """
    with api.open(path, storage_options=storage_options) as checkpoint:
        if checkpoint.info.format == _OF_DEEPSPEED:
            return _client_state_of_deepspeed(checkpoint)
        if "extra_state" not in checkpoint.manifest.rank_objects:
            return {}
        by_rank = checkpoint.rank_values("extra_state")
        own: dict[str, dict[str, Any]] = by_rank.get(dist.get_rank(), by_rank[min(by_rank)])
        return own.get("client_state", {})


def _client_state_of_deepspeed(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the client state in a checkpoint of DeepSpeed itself, with its tensors on the host."""
    found: dict[str, Any] = {}
    for name, data in checkpoint.manifest.objects.items():
        if name not in _OF_ENGINE and not (name.startswith("model.") and is_extra_state(name)):
            tree = decode_plain(data)
            items = leaves(tree, name, may_repeat=True).items()
            tensors = {fqn: checkpoint[item.fqn][...] for fqn, item in items if isinstance(item, TensorRef)}
            found[name] = with_leaves(tree, name, tensors)
    return found


class _Found(msgspec.Struct):
    """Message of rank 0 about the checkpoint that is to be loaded."""

    name: str = ""
    """Empty if there is none."""
    has_rng: bool = False
    has_shared_client_state: bool = False
    """True if all ranks have the same client state, in a checkpoint of this library."""
    has_facts: bool = False
    """True if the checkpoint has counters, loss scales or a scheduler."""
    globs_of_states: list[str] = []
    """Patterns of what the checkpoint has for the optimizer besides the facts."""
    globs_of_scheduler: list[str] = []


def _find(folder: TrackedFolder, tag: str | int | None) -> _Found:
    """Describes the checkpoint of this tag, or for None that of `latest`; without that file, warns and returns
    `_Found()`. Raises the errors of `TrackedFolder.open`.
    """
    name = str(tag) if tag is not None else folder.read(content="the name")
    if name is None:
        logger.warning(
            "there is no file %s, so no checkpoint was loaded and training begins anew. Committed checkpoints beside "
            "it: %s. To load one of them, pass its tag",
            folder.shown(LATEST),
            folder.shown_committed(),
        )
        return _Found()
    source = "the tag that was asked for" if tag is not None else f"the tag in {folder.shown(LATEST)}"
    with folder.open(name, about=f"{name!r}, {source},") as checkpoint:
        return _described(name, checkpoint)


def _described(name: str, checkpoint: Checkpoint) -> _Found:
    objects = checkpoint.objects
    of_optimizer = objects.get("optimizer", {})
    facts = of_optimizer.get("facts", {})
    has_states = any(fqn.startswith("optimizer.state.") for fqn in checkpoint)
    return _Found(
        name=name,
        has_rng="rng" in checkpoint.manifest.rank_objects,
        has_shared_client_state="extra_state" in checkpoint.manifest.objects,
        has_facts=bool(facts),
        globs_of_states=[_STATES] * has_states + [_GROUPS] * ("param_groups" in of_optimizer),
        globs_of_scheduler=[_SCHEDULER] * ("lr_scheduler" in facts),
    )


def _has_optimizer(engine: DeepSpeedEngine) -> bool:
    """Returns False if the engine was made without an optimizer: DeepSpeed then puts a stand-in in its place."""
    optimizer = engine.optimizer
    return isinstance(optimizer, torch.optim.Optimizer) or isinstance(
        getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    )


class _TrainedEngine(nn.Module):
    """An engine without its frozen parameters, to save."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__()
        self.module = _trained(engine.module)
        self.__dict__ |= {name: getattr(engine, name) for name in ("optimizer", "lr_scheduler", *COUNTERS)}


def _trained(module: nn.Module) -> nn.Module:
    """Returns a new module that shares the values of this one, under the same names, except frozen parameters."""
    tree = tree_of(module).walked()  # its state_dict has nothing that hooks add, for which a module has no place
    frozen = {
        join_fqn(name, own)
        for name, each in tree.submodules
        for own, parameter in each._parameters.items()  # a buffer may be a Parameter too, and stays
        if parameter is not None and not parameter.requires_grad
    }
    return partial_module({name: value for name, value in tree.state_dict().items() if name not in frozen})
