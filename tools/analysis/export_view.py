"""Shows a checkpoint as `bcp convert` would write it, without writing it: its tensors under the names of the target.
The elements stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.optimizers.stored_optimizer import is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain
from bytecheckpoint.adapters.plain.plain_types import as_plain
from bytecheckpoint.conversion.assemble import quantized_weights
from bytecheckpoint.conversion.dcp import WHY_LOST
from bytecheckpoint.conversion.huggingface import left_out_values
from bytecheckpoint.conversion.link import link_manifest
from bytecheckpoint.conversion.mapped_source import mapped_view, names_for_experts
from bytecheckpoint.loading.plain_trees import without_numpy
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.select import LeftOut, SelectionRequest, select
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn
from bytecheckpoint.name_maps.fused_experts import EXPERT_NAMES, with_packed_weights, with_separate_experts
from bytecheckpoint.name_maps.load import CheckpointFolder
from bytecheckpoint.name_maps.rewrite_manifest import relink
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.planner.copy_plan import same_tensor

from ..arguments import Opened
from ..name_options import NameOptions
from .tensor_diff import ReadAs


class ExportView(NamedTuple):
    """The manifest that would be written, and what has no place in it."""

    opened: Opened
    left_out: Sequence[LeftOut]


def export_of(opened: Opened, names: NameOptions, *, exclude: Sequence[str], beside: Opened) -> ExportView:
    """Returns a checkpoint as `bcp convert --to` would write it with these options at the path of `beside`.

    Raises what the conversion raises; CheckpointMismatchError (conflict) also for a map that makes tensors of which the
    checkpoint does not hold every element, as the zeros of a padded vocabulary.
    """
    source = Source(opened.store, opened.folder, opened.manifest, LoadOptions(), is_exchanged=False, path=opened.path)
    to: Any = names.to
    view = mapped_view(source, names.name_map(), is_state=to == "bcp", in_place=True)
    request = SelectionRequest(
        to=to, exclude=exclude, rename=names.rename, keep_names=names.keep_names, experts=names.experts or ""
    )
    manifest, selection = link_manifest(view, request, source=opened.folder, target=opened.folder)
    left_out = list(selection.left_out)
    if to == "hf":
        left_out += left_out_values(view.manifest, selection)
        experts = names_for_experts(request, source, CheckpointFolder(beside.store, beside.folder))
        manifest = _with_separate_experts(manifest, experts)
    elif to != "bcp":
        trees = {fqn: decode_plain(data) for fqn, data in manifest.objects.items()}
        lost: list[str] = []
        trees = _without_empty(trees, "", lost) if to == "dcp" else trees
        left_out += [LeftOut(fqn, 0, 0, WHY_LOST) for fqn in lost]
        objects = {fqn: _as_written(to, fqn, tree) for fqn, tree in trees.items()}
        manifest = replace(manifest, objects=objects)
    return ExportView(opened._replace(manifest=manifest), left_out)


def in_dtype(opened: Opened, dtype: str | None) -> tuple[Opened, ReadAs]:
    """Returns a checkpoint with its tensors as `bcp convert --dtype` would write them, and how they are read for that.

    Raises CheckpointMismatchError (shape, dtype, conflict) for scales whose product would not be the weight.
    """
    if dtype is None:
        return opened, ReadAs({}, {})
    manifest = with_packed_weights(opened.manifest)
    selection = select(manifest, SelectionRequest(to="bcp", dtype=dtype, is_in_memory=True), None)
    stored = manifest.describe_all()
    dtypes = {tensor.fqn: tensor.dtype for tensor in selection.wanted if tensor.dtype != stored[tensor.fqn][0]}
    return opened._replace(manifest=manifest), ReadAs(dtypes, quantized_weights(selection.wanted, manifest))


def _without_empty(tree: Any, fqn: str, lost: list[str]) -> Any:
    """Returns plain data without the dicts and lists in it that torch does not write, and adds their names to `lost`.
    Optimizers stay as they are: their own reader adds what was empty.
    """
    if not _is_taken_apart(tree):
        return tree
    kept: dict[Any, Any] = {}
    for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
        name = join_fqn(fqn, key)
        if _is_empty(item):
            lost.append(name)
        else:
            kept[key] = item if is_optimizer_tree(item) else _without_empty(item, name, lost)
    if isinstance(tree, dict):
        return type(tree)(kept)
    # As the reader has it: without an item before others, positions are keys.
    return [*kept.values()] if [*kept] == [*range(len(kept))] else kept


def _is_taken_apart(tree: Any) -> bool:
    """Returns True for a dict, and for a list with a dict or a tensor in it: torch writes their items one by one."""
    if isinstance(tree, list):
        return any(isinstance(item, TensorRef | torch.Tensor) or _is_taken_apart(item) for item in tree)
    return isinstance(tree, dict)


def _is_empty(tree: Any) -> bool:
    """Returns True for what torch takes apart and finds nothing in."""
    return _is_taken_apart(tree) and all(map(_is_empty, tree.values() if isinstance(tree, dict) else tree))


def _as_written(to: str, fqn: str, tree: Any) -> bytes:
    """Encodes plain data as `bcp convert` writes it for other programs: sets as lists, times as text; for a file of
    torch.save, numpy's arrays as tensors.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)({key: plain(item) for key, item in value.items()})
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else as_plain(value)

    value = plain(tree)
    return encode_plain(without_numpy(value, fqn) if to == "torch" else value, fqn)


def _with_separate_experts(manifest: Manifest, experts: str) -> Manifest:
    if experts not in EXPERT_NAMES:
        return manifest
    records = [same_tensor(fqn, *manifest.describe(fqn), stored_fqn=fqn) for fqn in manifest.tensors]
    separate = with_separate_experts(records, EXPERT_NAMES[experts])
    return manifest if len(separate) == len(records) else replace(manifest, tensors=relink(manifest, separate).records)
