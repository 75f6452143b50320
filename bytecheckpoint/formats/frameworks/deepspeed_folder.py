"""Folders of DeepSpeed: ZeRO 1, 2 and 3, the optimizer for bfloat16, and training without ZeRO.

A parameter in full precision, and each piece of its optimizer state, is a set of ranges in the flat buffers that the
ranks have saved. `model` has the weights in full precision, `module` those of lower precision, where ranks have them
whole; `optimizer` has the rest. Without ZeRO the optimizer lies whole beside the weights, and has numbers for names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.formats.file_reader import conflicting, missing_file, not_readable
from bytecheckpoint.formats.flat_ranges import divided_runs
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks import deepspeed_zero
from bytecheckpoint.formats.manifest_builder import holds_tensor, is_extra_state
from bytecheckpoint.formats.torch_save.file import SavedFile, translated
from bytecheckpoint.formats.torch_save.unpickler_globals import Call, StoredView, instances, lengths_of, with_values

_MODEL = re.compile(r"\A(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt\Z")
_OPTIMIZER = re.compile(r"\A(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
_OTHER = re.compile(r"\A(?:layer_\d+.*-model_\d+.*|layer_\d+_expert_.*|expp_rank_.*)_states\.pt\Z")

_WRITER = "DeepSpeed"
_LOADED = ("module", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_LEFT = ("ds_config", "universal_checkpoint_info", "checkpoint_parallel_dimensions", "autotp_uc_info")
_OPTIMIZER_ENTRY, _INNER = "optimizer", "optimizer_state_dict"
_WRAPPER_ENTRY = "mixed_precision"
"""The entry of DeepSpeed's wrapper of an optimizer without ZeRO: weights in full precision, the loss scale."""
_KNOWN = frozenset({*_LOADED, *_COUNTERS, *_LEFT, _OPTIMIZER_ENTRY, "lr_scheduler"})

_find_class = with_values(
    {
        **instances(
            {
                "deepspeed.utils.tensor_fragment": "fragment_address",
                "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler LossScaleConfig",
                "deepspeed.checkpoint.universal_checkpoint": "SubparamShape",
            }
        ),
        "deepspeed.runtime.zero.config.ZeroStageEnum": Call(lambda stage: stage),
    }
)


def is_folder(source: SourceFolder) -> bool:
    """Returns True for a folder of a step, by the names of its files."""
    return any(_MODEL.match(name) or _OPTIMIZER.match(name) for name in source.files)


def read_folder(source: SourceFolder) -> None:
    """Adds the files of all ranks to the builder. Raises as `detect.read_manifest` does."""
    models, optimizers = (_by_rank(source.files, pattern, source.path) for pattern in (_MODEL, _OPTIMIZER))
    odd = sorted(filter(_OTHER.match, source.files))
    if odd:
        advice = "make it universal with DeepSpeed's ds_to_universal, or save it from a universal checkpoint"
        raise not_readable(source.path, f"{odd[0]!r:.200} is of a pipeline or of experts", advice)
    model_files = source.open_dicts(models, _find_class)
    if not model_files:
        raise missing_file(source.path, "has optimizer states and no model states")
    first = model_files[0]
    zero = deepspeed_zero.ZeroBuilder(source.builder)
    state = None
    if source.is_folder(deepspeed_zero.UNIVERSAL_FOLDER):
        open_files = partial(source.open_all, find_global=_find_class)
        state = translated(first.path, _WRITER, deepspeed_zero.read_universal, source, open_files, first, zero)
    elif optimizers:
        files = source.open_dicts(optimizers, _find_class)
        state = translated(files[0].path, _WRITER, deepspeed_zero.read_zero_state, model_files, files, zero)
    translated(first.path, _WRITER, _add_frozen, model_files, zero)
    translated(first.path, _WRITER, _add_model, first, state)
    _name_left_out(model_files)


def _by_rank(names: set[str], pattern: re.Pattern[str], path: str) -> list[str]:
    """Returns the files in the order of their ranks.

    Raises CheckpointNotFoundError (missing_file) if ranks are missing, CheckpointMismatchError (conflict) if a rank has
    two files, CheckpointCorruptError (unsupported_version) if tensor parallelism has cut tensors as well.
    """
    by_rank: dict[int, str] = {}
    for match in filter(None, map(pattern.match, sorted(names))):
        if int(match[2]):
            advice = "make it universal with DeepSpeed's ds_to_universal, which knows how tensors were cut"
            raise not_readable(path, f"{match[0]!r:.200} is of a model that is divided by tensor parallelism", advice)
        other = by_rank.setdefault(int(match[1] or 0), match[0])
        if other != match[0]:
            advice = "remove the one that is older, with those of its save"
            raise conflicting(path, f"has {other!r:.200} and {match[0]!r:.200}, which are of one rank", advice)
    missing = sorted(set(range(len(by_rank))) - set(by_rank))
    if missing:
        raise missing_file(path, f"has no file of rank {missing[0]} like {by_rank[max(by_rank)]!r}")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _add_frozen(models: Sequence[SavedFile], zero: deepspeed_zero.ZeroBuilder) -> None:
    """Adds parameters that no optimizer has. Each file has the whole parameter; with ZeRO 3, its rank's part."""
    builder = models[0].builder
    for name, shape in (models[0].value.get("frozen_param_shapes") or {}).items():
        fqn = f"model.{name}"
        if fqn in builder.tensors:  # universal checkpoints may have them
            continue
        lengths = lengths_of(shape)
        views = [saved.value["frozen_param_fragments"][name] for saved in models]
        if views[0].shape == lengths:
            models[0].add_tensor(fqn, views[0])
            continue
        buffers, dtype = deepspeed_zero.buffers_of(models, views, name)
        runs = divided_runs(lengths, 0, [[buffer] for buffer in buffers], item_bytes=itemsize(dtype))
        zero.add(fqn, dtype, lengths, runs)


def _add_model(saved: SavedFile, state: deepspeed_zero.ZeroState | None) -> None:
    """Adds all of the model's file, client state too, and the plain data of `state`, which is None without ZeRO. A
    weight that `state` names goes under `module`, because `model` has it in full precision; others under `model`.
    """
    value, builder = saved.value, saved.builder
    flat = state.names if state else frozenset()
    shared = _tied(value)
    for name, view in value["module"].items():
        stored = shared.get(name, name)
        # ZeRO 3 leaves empty tensors in the place of parameters.
        if flat and isinstance(view, dict) and holds_tensor(view) and not is_extra_state(name):
            continue  # weights in nested dicts, which `model` has in full precision
        if not isinstance(view, StoredView) or is_extra_state(name):
            builder.trees[f"model.{name}"] = saved.plain(view, f"model.{name}")
        elif not (stored in flat and not all(view.shape)):
            fqn = f"module.{name}" if stored in flat else f"model.{stored}"
            if fqn not in builder.tensors:  # else it was added as a frozen one
                saved.add_tensor(fqn, view)
    for alias, name in shared.items():
        if f"model.{alias}" not in builder.tensors and f"model.{name}" in builder.tensors:
            builder.add_alias(f"model.{alias}", f"model.{name}")
    facts: dict[str, Any] = {"engine": {name: value[name] for name in _COUNTERS if type(value.get(name)) is int}}
    if isinstance(value.get("lr_scheduler"), dict):
        facts["lr_scheduler"] = value["lr_scheduler"]
    if state is None:
        entries = facts | _optimizer_entries(value.get(_OPTIMIZER_ENTRY))
    else:
        entries = {_OPTIMIZER_ENTRY: {**state.tree, "facts": {**state.facts, **facts}}}
        if value.get(_OPTIMIZER_ENTRY) is not None:
            builder.leave_out(_OPTIMIZER_ENTRY, "the files of the optimizer have its state")
    builder.trees |= {name: saved.plain(entry, name) for name, entry in entries.items()}
    for key, item in value.items():
        if key in _KNOWN or item is None:
            continue
        if str(key) in builder.trees:
            builder.leave_out(f"{saved.name}: {key}", "another entry has this name")
        else:
            builder.trees[str(key)] = saved.plain(item, str(key))
    builder.set_step(value.get("global_steps"))


def _tied(value: Any) -> dict[str, str]:
    """Returns the name of each tied parameter by its other names.

    DeepSpeed counts parameters as tied that begin at one address, as one that is a slice of another and all that are
    empty do. Those of other shapes are not.
    """
    module, shared = value["module"], value.get("shared_params") or {}
    pairs = {alias: (module.get(alias), module.get(name)) for alias, name in shared.items()}
    apart = {
        alias
        for alias, views in pairs.items()
        if all(isinstance(view, StoredView) for view in views) and len({view.shape for view in views}) > 1
    }
    return {alias: name for alias, name in shared.items() if alias not in apart}


def _name_left_out(models: Sequence[SavedFile]) -> None:
    """Adds to the builder's `left_out` descriptions of the run, and tensors that are read from the first file only."""
    builder = models[0].builder
    for key in _LEFT:
        if models[0].value.get(key) is not None:
            builder.leave_out(key, "it describes the run, and is not state")
    for saved in models[1:]:
        for key, item in saved.value.items():
            if key not in _KNOWN and holds_tensor(item):
                builder.leave_out(f"{saved.name}: {key}", "what the first rank has under this name is read")


def _optimizer_entries(optimizer: Any) -> dict[str, Any]:
    """Returns entries for the optimizer of a training without ZeRO: `optimizer`, and `mixed_precision` for the rest of
    a wrapper's state_dict. Returns none if `optimizer` is None.
    """
    if not isinstance(optimizer, dict):
        return {} if optimizer is None else {_OPTIMIZER_ENTRY: optimizer}
    if not isinstance(optimizer.get(_INNER), dict):
        return {_OPTIMIZER_ENTRY: optimizer}
    wrapper = {key: item for key, item in optimizer.items() if key != _INNER}
    return {_OPTIMIZER_ENTRY: optimizer[_INNER], _WRAPPER_ENTRY: wrapper}
