"""Reads the full-precision weights and the optimizer state of ZeRO: from flat buffers, in which DeepSpeed's lists of
the order and the shapes of parameters tell whose elements are where; or from universal checkpoints, as ds_to_universal
makes them: a folder for each parameter, with a file for its weights and one for each piece of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.formats import flat_ranges
from bytecheckpoint.formats.file_reader import conflicting, damaged, missing_file, not_readable
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.manifest_builder import ManifestBuilder, holds_tensor
from bytecheckpoint.formats.torch_save.file import SavedFile
from bytecheckpoint.formats.torch_save.unpickler_globals import Instance, StoredView, lengths_of

_READ = frozenset(
    {"base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups", "optimizer_state_dict"}
)
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Values of a dynamic loss scaler that change in training."""
UNIVERSAL_FOLDER = "zero"
_WEIGHTS, _SUFFIX, _GROUPS_FILE = "fp32.pt", ".pt", "optimizer_state.pt"
_ALIGNMENT = 2
"""Elements to which DeepSpeed aligns the part of each rank."""


class ZeroState(NamedTuple):
    """The optimizer's tree, and the parameters whose full-precision weights were added beside it."""

    names: frozenset[str]
    """Parameters whose full-precision weights lie in flat buffers, or in folders of a universal checkpoint."""
    tree: dict[str, Any]
    """The optimizer, without its tensors."""
    facts: Mapping[str, Any] = MappingProxyType({})
    """State of the optimizer's wrapper."""


def read_zero_state(models: Sequence[SavedFile], optimizers: Sequence[SavedFile], zero: ZeroBuilder) -> ZeroState:
    """Adds `model.<name>` and `optimizer.state.<name>.<key>` to the builder.

    Raises LookupError, TypeError, ValueError or AttributeError if the files are not DeepSpeed's,
    CheckpointNotFoundError (missing_file), CheckpointMismatchError (conflict) and CheckpointCorruptError (bad_manifest,
    truncated, unsupported_version).
    """
    states = [saved.value["optimizer_state_dict"] for saved in optimizers]
    count = states[0].get("partition_count", len(optimizers))
    num_ranks = max(count) if isinstance(count, list) else count
    if num_ranks > len(optimizers):
        have = f"there are files of {len(optimizers)} like it"
        raise missing_file(optimizers[0].path, f"is of an optimizer that {num_ranks} ranks have saved, and {have}")
    if num_ranks < len(optimizers):
        what = f"is of an optimizer that {num_ranks} ranks have saved, and there are files of {len(optimizers)} like it"
        raise conflicting(optimizers[0].path, what, "remove those of another save")
    if states[0].get("ds_zero_partition_groups"):
        advice = "make it universal with DeepSpeed's ds_to_universal"
        raise not_readable(optimizers[0].path, "parameters are divided over groups of ranks (MiCS, hpZ)", advice)
    files = _ZeroFiles(optimizers, states, _shapes_of_groups(models[0]))
    if states[0].get("zero_stage") == 3:
        _read_divided(files, zero)
    else:
        _read_shared(files, zero)
    for saved, state in zip(optimizers, states, strict=True):
        for key in sorted(state.keys() - _READ):
            zero.leave_out(f"{saved.name}: {key}", state[key], "this release does not know it")
    return ZeroState(frozenset(name for shapes in files.shapes for name in shapes), zero.tree, _facts(states[0]))


def _shapes_of_groups(model: SavedFile) -> list[dict[str, tuple[int, ...]]]:
    return [{name: lengths_of(shape) for name, shape in group.items()} for group in model.value["param_shapes"]]


def _facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of a dynamic loss scaler, as `loss_scaler`; {} if there is none."""
    scaler = state.get("loss_scaler")
    fields = scaler.fields if isinstance(scaler, Instance) else {}
    if fields.get("dynamic") is not True:
        return {}
    return {"loss_scaler": {name: fields[name] for name in _LOSS_SCALE if name in fields}}


class ZeroBuilder:
    """Puts together tensors of the manifest, and the optimizer's tree."""

    def __init__(self, builder: ManifestBuilder) -> None:
        self._builder = builder
        self.tree: dict[str, Any] = {"state": {}, "groups": {}}

    def add(self, fqn: str, dtype: str, shape: tuple[int, ...], runs: Iterable[flat_ranges.FlatRun]) -> None:
        chunks = flat_ranges.chunks_of_runs(shape, runs, item_bytes=itemsize(dtype))
        self._builder.add_tensor(fqn, dtype, shape, chunks, num_parts=len(chunks))

    def leave_out(self, name: str, value: Any, why: str) -> None:
        """Notes a value as left out, if it holds a tensor."""
        if holds_tensor(value):
            self._builder.leave_out(name, why)

    def add_one_value(self, names: Iterable[str], key: str, value: Any, saved: SavedFile) -> None:
        """Adds a value that is the same for all these parameters, such as the count of steps."""
        for name in names:
            if isinstance(value, StoredView):
                saved.add_tensor(f"optimizer.state.{name}.{key}", value)
            else:
                self.tree["state"].setdefault(name, {})[key] = value

    def add_group(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        values = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
        if names:
            self.tree["groups"][names[0]] = {"params": dict.fromkeys(names), "values": values}


class _ZeroFiles(NamedTuple):
    saved: Sequence[SavedFile]
    states: Sequence[dict[str, Any]]
    """The optimizer's state in each."""
    shapes: Sequence[dict[str, tuple[int, ...]]]
    """Shapes of the parameters in each group, in their order."""


def buffers_of(files: Sequence[SavedFile], views: Sequence[Any], what: str) -> tuple[list[flat_ranges.FlatBuffer], str]:
    """Returns where the flat tensor of each file lies, and their dtype. `what` names them in errors.

    Raises CheckpointCorruptError (bad_manifest) for a value that is no flat tensor, and for tensors of several dtypes.
    """
    buffers = [saved.buffer(view, what) for saved, view in zip(files, views, strict=True)]
    first = buffers[0][1]
    for saved, (_, dtype) in zip(files, buffers, strict=True):
        if dtype != first:
            raise damaged(saved.path, f"its part of {what} is {dtype}, and {first} in {files[0].path}")
    return [buffer for buffer, _ in buffers], first


def _read_shared(files: _ZeroFiles, zero: ZeroBuilder) -> None:
    """Adds what ZeRO 1 and 2 saved: the parameters of a group follow one another in flat memory, and each rank has an
    equal part of that memory.
    """
    first = files.states[0]
    paddings = first.get("param_alignment_paddings")
    for index, shapes in enumerate(files.shapes):
        placed, end = flat_ranges.lay_out(list(shapes.values()), None if paddings is None else paddings[index])
        part = flat_ranges.partition_length(end, len(files.saved), _ALIGNMENT)
        weights = [state["single_partition_of_fp32_groups"][index] for state in files.states]
        by_rank = [_state_of_group(state["base_optimizer_state"], index) for state in files.states]
        flat = {"model.{}": weights}
        for key, value in by_rank[0].items():
            if _is_flat(value, {part, *weights[0].shape}):
                flat[f"optimizer.state.{{}}.{key}"] = [of_rank[key] for of_rank in by_rank]
            else:
                zero.add_one_value(shapes, key, value, files.saved[0])
        for fqn, views in flat.items():
            buffers, dtype = buffers_of(files.saved, views, fqn)
            for name, where in zip(shapes, placed, strict=True):
                runs = flat_ranges.shared_runs(where, part, buffers, item_bytes=itemsize(dtype))
                zero.add(fqn.format(name), dtype, where.shape, runs)
        zero.add_group(list(shapes), _param_group(first["base_optimizer_state"], index))


def _read_divided(files: _ZeroFiles, zero: ZeroBuilder) -> None:
    """Adds what ZeRO 3 saved: every rank has an equal part of each parameter, one after the other in several
    buffers.
    """
    weights = [state["fp32_flat_groups"] for state in files.states]
    states = [state["optimizer_state_dict"]["state"] for state in files.states]
    num_buffers = len(weights[0])
    flat = {"model.{}": weights}
    lengths = {length for view in weights[0] for length in view.shape}
    for key, value in states[0].get(0, {}).items():
        if _is_flat(value, lengths):
            fqn = f"optimizer.state.{{}}.{key}"
            flat[fqn] = [[of_rank[index][key] for index in range(num_buffers)] for of_rank in states]
        else:
            names = [name for shapes in files.shapes for name in shapes]
            zero.add_one_value(names, key, value, files.saved[0])
    for fqn, views in flat.items():
        by_buffer = [buffers_of(files.saved, of_index, fqn) for of_index in zip(*views, strict=True)]
        dtype = by_buffer[0][1]
        if any(other != dtype for _, other in by_buffer):
            raise damaged(files.saved[0].path, f"its buffers of {fqn} are not all {dtype}")
        of_ranks = list(zip(*(buffers for buffers, _ in by_buffer), strict=True))
        at = 0
        for name, shape in (item for shapes in files.shapes for item in shapes.items()):
            runs = flat_ranges.divided_runs(shape, at, of_ranks, item_bytes=itemsize(dtype))
            zero.add(fqn.format(name), dtype, shape, runs)
            at += flat_ranges.divided_share(shape, len(files.saved))
    _add_groups(files, zero)


def _add_groups(files: _ZeroFiles, zero: ZeroBuilder) -> None:
    """Adds the user's groups, each of which is several buffers here; if unknown, one group of all parameters."""
    groups = files.states[0]["optimizer_state_dict"]["param_groups"]
    known = [list(shapes) for shapes in files.shapes]
    if sorted(index for group in groups for index in group["params"]) != list(range(len(known))):
        zero.add_group([name for names in known for name in names], groups[0])
        return
    for group in groups:
        zero.add_group([name for index in group["params"] for name in known[index]], group)


def _is_flat(value: Any, lengths: set[int]) -> bool:
    return isinstance(value, StoredView) and len(value.shape) == 1 and value.shape[0] in lengths


def _state_of_group(base: Any, index: int) -> dict[str, Any]:
    """Returns the state of the wrapped optimizer for a group, or {}; elastic checkpoints have a list of such states."""
    states: dict[int, dict[str, Any]] = base["state"] if isinstance(base, dict) else dict(enumerate(base))
    return states.get(index, {})


def _param_group(base: Any, index: int) -> Mapping[str, Any]:
    groups = base["param_groups"] if isinstance(base, dict) else []
    return groups[index] if index < len(groups) else {}


def read_universal(
    source: SourceFolder, open_files: Callable[[list[str]], Sequence[SavedFile]], model: SavedFile, zero: ZeroBuilder
) -> ZeroState:
    """Adds `model.<name>` and `optimizer.state.<name>.<key>` to the builder. Raises the errors of `read_zero_state`."""
    shapes = _shapes_of_groups(model)
    known = {name: shape for group in shapes for name, shape in group.items()}
    order = {name: number for number, name in enumerate(known)}
    root = source.list(UNIVERSAL_FOLDER)
    names = [name for name, num_bytes in root.items() if num_bytes is None]
    names.sort(key=lambda name: order.get(name, len(order)))
    listings = source.list_all(f"{UNIVERSAL_FOLDER}/{name}" for name in names)
    pieces = [
        (name, file)
        for name, listing in zip(names, listings, strict=True)
        for file, num_bytes in sorted(listing.items())
        if num_bytes is not None and file.endswith(_SUFFIX)
    ]
    opened = open_files([f"{UNIVERSAL_FOLDER}/{name}/{file}" for name, file in pieces])
    for (name, file), saved in zip(pieces, opened, strict=True):
        _add_piece(saved, file, name, known.get(name), zero)
    groups: list[Mapping[str, Any]] = []
    if root.get(_GROUPS_FILE) is not None:
        groups = _universal_groups(open_files([f"{UNIVERSAL_FOLDER}/{_GROUPS_FILE}"])[0], zero)
    for index, group in enumerate(shapes):
        is_same = len(groups) == len(shapes)
        zero.add_group(list(group), groups[index if is_same else 0] if groups else {})
    return ZeroState(frozenset(names), zero.tree)


def _add_piece(saved: SavedFile, file: str, name: str, shape: tuple[int, ...] | None, zero: ZeroBuilder) -> None:
    """Adds a file of a universal checkpoint: the weights, or one kind of state, of the parameter of this name."""
    value: Any = saved.value
    view = value.get("param") if isinstance(value, dict) else value
    key = file.removesuffix(_SUFFIX)
    if not isinstance(view, StoredView) or not (view.shape or file == _WEIGHTS):
        zero.add_one_value([name], key, view, saved)
        return
    fqn = f"model.{name}" if file == _WEIGHTS else f"optimizer.state.{name}.{key}"
    if shape is None or view.shape == shape or prod(view.shape) != prod(shape):
        saved.add_tensor(fqn, view)
        return
    # ZeRO 3 leaves the shape out.
    if len(view.shape) != 1:
        raise damaged(saved.path, f"{name!r:.200} has the shape {list(view.shape)}, and {list(shape)} elsewhere")
    buffer, dtype = saved.buffer(view, fqn)
    zero.add(fqn, dtype, shape, [flat_ranges.FlatRun(0, prod(shape), buffer.file, buffer.byte_offset)])


def _universal_groups(saved: SavedFile, zero: ZeroBuilder) -> list[Mapping[str, Any]]:
    """Returns the groups in a file, which ZeRO 3 nests deeper. Notes the file as left out if it holds tensors."""
    groups: list[Mapping[str, Any]]
    groups = (saved.value if "param_groups" in saved.value else saved.value["optimizer_state_dict"])["param_groups"]
    why = "its hyperparameters are read, and the state of parameters from their own folders"
    zero.leave_out(saved.name, saved.value, why)
    return groups
