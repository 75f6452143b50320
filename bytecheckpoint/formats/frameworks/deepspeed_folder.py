"""Folders of DeepSpeed: ZeRO 1, 2 and 3, the optimizer for bfloat16, and training without ZeRO.

A parameter in full precision, and each piece of its optimizer state, is a set of ranges in the flat buffers that the
ranks have saved. `model` has the weights in full precision, `module` those of lower precision, where ranks have them
whole; `optimizer` has the rest. Without ZeRO the optimizer lies whole beside the weights, and has numbers for names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.formats.file_reader import damaged, not_readable
from bytecheckpoint.formats.flat_ranges import chunks_of_runs, divided_runs
from bytecheckpoint.formats.frameworks.deepspeed_universal import UNIVERSAL_FOLDER, read_universal
from bytecheckpoint.formats.frameworks.deepspeed_zero import ZeroBuilder, ZeroState, lengths_of, read_zero_state
from bytecheckpoint.formats.manifest_builder import ManifestBuilder, holds_tensor, is_extra_state, plain_tree
from bytecheckpoint.formats.torch_save.files import SavedFile, missing_file, open_saved, translated
from bytecheckpoint.formats.torch_save.unpickler_globals import Call, StoredView, find_value, instances
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_MODEL = re.compile(r"\A(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt\Z")
_OPTIMIZER = re.compile(r"\A(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
_OTHER = re.compile(r"\A(?:layer_\d+.*-model_\d+.*|layer_\d+_expert_.*|expp_rank_.*)_states\.pt\Z")

_WRITER = "DeepSpeed"
_LOADED = ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LEFT = ("ds_config", "universal_checkpoint_info", "checkpoint_parallel_dimensions", "autotp_uc_info")
_OPTIMIZER_ENTRY, _INNER = "optimizer", "optimizer_state_dict"
_WRAPPER_ENTRY = "mixed_precision"
"""The entry for what DeepSpeed's wrapper of an optimizer without ZeRO keeps beside it: weights in full precision, and
the scale of the loss.
"""
_KNOWN = frozenset({*_LOADED, *_COUNTERS, *_LEFT, _OPTIMIZER_ENTRY, "lr_scheduler"})

_CLASSES: Mapping[str, Any] = MappingProxyType(
    {
        **instances(
            "deepspeed.utils.tensor_fragment.fragment_address",
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
            "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
        ),
        "deepspeed.runtime.zero.config.ZeroStageEnum": Call(lambda stage: stage),
    }
)


def is_folder(names: set[str]) -> bool:
    """Whether a folder with these files is one of a step."""
    return any(_MODEL.match(name) or _OPTIMIZER.match(name) for name in names)


def read_folder(store: Store, folder: str, listing: Mapping[str, int | None]) -> ManifestBuilder:
    """Raises CheckpointNotFoundError (missing_file), CheckpointCorruptError or UnsafeCheckpointError."""
    builder = ManifestBuilder(join_name(str(store), folder))
    names = {name for name, num_bytes in listing.items() if num_bytes is not None}
    models = _by_rank(names, _MODEL, builder.path)
    optimizers = _by_rank(names, _OPTIMIZER, builder.path)
    odd = sorted(name for name in names if _OTHER.match(name))
    if odd:
        advice = "make it universal with DeepSpeed's ds_to_universal, or save it from one"
        raise not_readable(builder.path, f"{odd[0]!r:.200} is of a pipeline or of experts", advice)
    reader = _DeepSpeedReader(store, folder, listing, builder)
    model_files = [reader.open(name) for name in models]
    if not model_files:
        raise missing_file(builder.path, "has optimizer states and no model states")
    state = None
    if UNIVERSAL_FOLDER in listing and listing[UNIVERSAL_FOLDER] is None:
        found = (reader.open_sized, store, folder, model_files[0], ZeroBuilder(builder))
        state = translated(model_files[0].path, _WRITER, read_universal, *found)
    elif optimizers:
        optimizer_files = [reader.open(name) for name in optimizers]
        found_files = (model_files, optimizer_files, ZeroBuilder(builder))
        state = translated(optimizer_files[0].path, _WRITER, read_zero_state, *found_files)
    translated(model_files[0].path, _WRITER, reader.add_frozen, model_files)
    translated(model_files[0].path, _WRITER, reader.add_model, model_files[0], state)
    reader.name_left_out(model_files)
    return builder


def _by_rank(names: set[str], pattern: re.Pattern[str], path: str) -> list[str]:
    """The files, in the order of their ranks. Raises where ranks are missing, or tensors are cut in other ways too."""
    found: dict[int, str] = {}
    for name in names:
        match = pattern.match(name)
        if match is None:
            continue
        rank, model_parallel = int(match.group(1) or 0), int(match.group(2))
        if model_parallel:
            advice = "make it universal with DeepSpeed's ds_to_universal, which knows how tensors were cut"
            raise not_readable(path, f"{name!r:.200} is of a model that is divided by tensor parallelism", advice)
        found[rank] = name
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise missing_file(path, f"has no file of rank {missing[0]} like {found[max(found)]!r}")
    return [found[rank] for rank in sorted(found)]


class _DeepSpeedReader:
    """The files of a folder, and what lies in model states."""

    def __init__(self, store: Store, folder: str, listing: Mapping[str, int | None], builder: ManifestBuilder) -> None:
        self._store = store
        self._folder = folder
        self._listing = listing
        self._builder = builder

    def open(self, name: str) -> SavedFile:
        """A file of the folder itself."""
        saved = self.open_sized(name, self._listing[name] or 0)
        if not isinstance(saved.value, dict):
            raise damaged(saved.path, "it has no dict")
        return saved

    def open_sized(self, name: str, num_bytes: int) -> SavedFile:
        """A file at or below the folder."""
        return open_saved(self._store, self._folder, name, num_bytes, builder=self._builder, find_global=_find_class)

    def add_frozen(self, models: list[SavedFile]) -> None:
        """Parameters that no optimizer has: whole in each file, or by ZeRO 3 divided over those of all ranks."""
        shapes = models[0].value.get("frozen_param_shapes") or {}
        for name, shape in shapes.items():
            if f"model.{name}" in self._builder.tensors:  # universal checkpoints may have them
                continue
            lengths = lengths_of(shape)
            views = [saved.value["frozen_param_fragments"][name] for saved in models]
            if len(views) == 1 or views[0].shape == lengths:
                self._add(models[0], f"model.{name}", views[0])
                continue
            found = [saved.buffer(view, name) for saved, view in zip(models, views, strict=True)]
            item_bytes = itemsize(found[0][1])
            runs = list(divided_runs(lengths, 0, [[buffer] for buffer, _ in found], item_bytes=item_bytes))
            chunks = chunks_of_runs(lengths, runs, item_bytes=item_bytes)
            self._builder.add_tensor(f"model.{name}", found[0][1], lengths, chunks, num_parts=len(chunks))

    def add_model(self, saved: SavedFile, state: ZeroState | None) -> None:
        """Adds what is saved with the model, but for what lies in flat buffers."""
        value, builder = saved.value, self._builder
        flat = state.names if state else frozenset()
        for name, view in value["module"].items():
            # ZeRO 3 leaves empty tensors in the place of parameters.
            if isinstance(view, StoredView) and not (name in flat and not all(view.shape)):
                fqn = f"module.{name}" if name in flat else f"model.{name}"
                if fqn not in builder.tensors:  # what is frozen
                    self._add(saved, fqn, view)
            elif is_extra_state(name):
                builder.trees[f"model.{name}"] = self._plain(saved, view, f"model.{name}")
        for alias, name in _pairs(value.get("shared_params")):
            if f"model.{alias}" not in builder.tensors and f"model.{name}" in builder.tensors:
                builder.add_alias(f"model.{alias}", f"model.{name}")
        facts: dict[str, Any] = {"engine": {name: value[name] for name in _COUNTERS if type(value.get(name)) is int}}
        if isinstance(value.get("lr_scheduler"), dict):
            facts["lr_scheduler"] = value["lr_scheduler"]
        if state is not None:
            builder.trees["optimizer"] = self._plain(
                saved, {**state.tree, "facts": {**state.facts, **facts}}, "optimizer"
            )
        else:
            facts |= _without_zero(value.get(_OPTIMIZER_ENTRY))
            builder.trees |= {name: self._plain(saved, fact, name) for name, fact in facts.items()}
        for key, item in value.items():
            if key not in _KNOWN and item is not None and str(key) not in builder.trees:
                builder.trees[str(key)] = self._plain(saved, item, str(key))
        if state is not None and value.get(_OPTIMIZER_ENTRY) is not None:
            builder.leave_out(_OPTIMIZER_ENTRY, "the files of the optimizer have its state")
        steps = value.get("global_steps")
        builder.step = steps if type(steps) is int and steps >= 0 else None

    def name_left_out(self, models: list[SavedFile]) -> None:
        """Names values of the model states that are not read, but for what describes the files alone."""
        for key in _LEFT:
            if models[0].value.get(key) is not None:
                self._builder.leave_out(key, "it describes the run, and is no state")
        for saved in models[1:]:
            for key, item in saved.value.items():
                if key not in _KNOWN and holds_tensor(item):
                    self._builder.leave_out(f"{saved.name}: {key}", "what the first rank has under this name is read")

    def _plain(self, saved: SavedFile, value: Any, fqn: str) -> Any:
        return plain_tree(value, fqn, path=saved.path, on_tensor=lambda name, view: self._add(saved, name, view))

    def _add(self, saved: SavedFile, fqn: str, view: StoredView) -> None:
        self._builder.add_tensor(fqn, view.dtype, view.shape, saved.chunks(view, fqn))


def _without_zero(optimizer: Any) -> dict[str, Any]:
    """The optimizer of a training without ZeRO as entries: torch's state_dict, or one of a wrapper around it."""
    if not isinstance(optimizer, dict):
        return {} if optimizer is None else {_OPTIMIZER_ENTRY: optimizer}
    if not isinstance(optimizer.get(_INNER), dict):
        return {_OPTIMIZER_ENTRY: optimizer}
    wrapper = {key: item for key, item in optimizer.items() if key != _INNER}
    return {_OPTIMIZER_ENTRY: optimizer[_INNER], _WRAPPER_ENTRY: wrapper}


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    yield from ((str(alias), str(name)) for alias, name in (value or {}).items())


def _find_class(module: str, name: str) -> Any:
    found = _CLASSES.get(f"{module}.{name}")
    return find_value(module, name) if found is None else found
