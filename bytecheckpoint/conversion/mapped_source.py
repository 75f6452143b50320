"""Applies a name map for a conversion: the checkpoint as the other framework has it, and the stored tensors from which
the elements of its tensors come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.formats.folder import read_config
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.select import LeftOut, ModelNames, SelectionRequest
from bytecheckpoint.manifest import Manifest, tensor_record
from bytecheckpoint.name_maps.fused_experts import TRANSPOSED_TYPES, expert_names_of
from bytecheckpoint.name_maps.load import CheckpointFolder, as_mapped, as_state, map_checkpoint
from bytecheckpoint.name_maps.objects import LEFT_OUT_BY_MAP, mapped_objects
from bytecheckpoint.options import NameMap
from bytecheckpoint.planner.copy_plan import CopySource, WantedTensor
from bytecheckpoint.region import whole


class MappedView(NamedTuple):
    """A checkpoint as a conversion sees it."""

    manifest: Manifest
    """The manifest under the names of the view; without chunks if there are `pieces`."""
    pieces: Mapping[str, Sequence[CopySource]] | None = None
    """The pieces of each of its tensors, by FQN; None if these are the stored tensors."""
    names_of_map: ModelNames | None = None
    left_out: Sequence[LeftOut] = ()
    """Tensors and values that the map leaves out."""
    sides: tuple[str, str] | None = None
    """Framework of the source and of the target."""

    def made_of_stored(self, wanted: Sequence[WantedTensor]) -> list[WantedTensor]:
        """Returns `wanted` with each piece, a whole tensor of the view, replaced by the pieces of stored tensors from
        which the map makes it.
        """
        if self.pieces is None:
            return list(wanted)
        found = [
            [each for piece in tensor.pieces if piece.fqn is not None for each in self.pieces[piece.fqn]]
            for tensor in wanted
        ]
        return [tensor._replace(pieces=pieces) for tensor, pieces in zip(wanted, found, strict=True)]


def mapped_view(source: Source, name_map: NameMap | None, *, is_state: bool, in_place: bool) -> MappedView:
    """Returns the view of a checkpoint through a map; without a map, as it is.

    With `is_state`, names are those of a state of this library. With `in_place`, the tensors of the view are chunks in
    the files of the checkpoint.

    Raises the errors of `map_checkpoint` and `mapped_objects`, and those of `relink` with `in_place`.
    """
    if name_map is None:
        return MappedView(source.manifest)
    manifest = source.manifest
    mapped = map_checkpoint(manifest, CheckpointFolder(source.store, source.folder), name_map)
    objects, without = mapped_objects(manifest, mapped)
    mapped = as_state(mapped, objects) if is_state else mapped
    left_out = [_dropped(manifest, fqn) for fqn in mapped.dropped]
    left_out += [LeftOut(fqn, 0, 0, why) for fqn, why in without.items()]
    names = ModelNames(mapped.in_model, frozenset(mapped.unmapped))
    if in_place:
        relinked = as_mapped(manifest, mapped, objects)
        return MappedView(relinked, names_of_map=names, left_out=left_out, sides=mapped.sides)
    tensors = {tensor.fqn: tensor_record(tensor.dtype, tensor.shape, ()) for tensor in mapped.tensors}
    return MappedView(
        replace(manifest, tensors=tensors, aliases=mapped.aliases, objects=objects),
        {tensor.fqn: tensor.pieces for tensor in mapped.tensors},
        names,
        left_out,
        mapped.sides,
    )


def names_for_experts(request: SelectionRequest, source: Source, target: CheckpointFolder) -> str:
    """Returns the key of the names that experts get in an HF target (of EXPERT_NAMES, or FUSED): the one that was asked
    for, else that of the model family in a `config.json` at the target or beside the source, else Qwen2-MoE's.

    Raises CheckpointMismatchError (conflict) for a family whose files hold experts transposed.
    """
    if request.experts:
        return request.experts
    configs = (read_config(*target), read_config(source.store, source.folder))
    model_type = next((str(config["model_type"]) for config in configs if "model_type" in config), "")
    if model_type in TRANSPOSED_TYPES:
        raise CheckpointMismatchError(
            f"the files of {model_type} hold experts transposed, which no conversion here does; nothing was written: "
            "load the checkpoint into the model and use its save_pretrained, or choose names with --experts",
            kind="conflict",
        )
    return expert_names_of(model_type)


def _dropped(manifest: Manifest, fqn: str) -> LeftOut:
    """Returns the record of a tensor that the map leaves out."""
    if fqn in manifest.aliases:
        return LeftOut(fqn, 0, 0, LEFT_OUT_BY_MAP)
    dtype, shape = manifest.describe(fqn)
    return LeftOut(fqn, 1, whole(shape).numel * itemsize(dtype), LEFT_OUT_BY_MAP)
