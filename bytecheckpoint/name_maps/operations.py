"""The operations of name maps: the regions of stored tensors that a tensor of the other framework consists of. Each has
an inverse, so that every map goes both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from bytecheckpoint.errors import UnsafeCheckpointError
from bytecheckpoint.name_maps.parameters import Options
from bytecheckpoint.name_maps.schema import Interleave, Padding
from bytecheckpoint.planner.copy_plan import CopySource
from bytecheckpoint.region import Region, rows, whole

MAX_PIECES = 1 << 24


class LayerTensor(NamedTuple):
    """A tensor of the checkpoint, or the part of it that is one layer."""

    name: str
    """The checkpoint's name, which may be an alias."""
    fqn: str
    """The name under which it is stored."""
    layer: int | None
    """Index of the layer in the leading dimension of a stored tensor that holds all layers, else None."""
    dtype: str
    shape: tuple[int, ...]
    """The shape without that dimension."""

    def piece(self, target: Region, source: Region) -> CopySource:
        """Returns the piece that fills the region `target` of another tensor with the region `source` of this one."""
        return CopySource(target, self.fqn, source if self.layer is None else in_stack(source, self.layer))


class TargetTensor(NamedTuple):
    """A tensor of the other framework, or the part of it that is one layer."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[CopySource]


def in_stack(region: Region, index: int) -> Region:
    """Returns the region of a stack that a region of its tensor number `index` takes."""
    return Region((index, *region.offsets), (1, *region.lengths))


def unchanged(tensor: LayerTensor) -> TargetTensor:
    """Returns the tensor of the other framework that has all elements of this one, in the same shape."""
    all_of_it = whole(tensor.shape)
    return TargetTensor(tensor.dtype, tensor.shape, [tensor.piece(all_of_it, all_of_it)])


def padded(padding: Padding, tensor: LayerTensor, side: str, options: Options) -> TargetTensor:
    """Returns the other side's tensor for one of `side`: without its padding if `side` has the padding, else with rows
    of zeros added. Raises ValueError if the number of rows does not fit.
    """
    all_of_it = whole(tensor.shape)
    num_rows = _num_rows(tensor)
    num_real = padding.without.value(options.value)  # rows beyond these mean nothing on either side
    wanted = num_real if padding.side == side else padding.rows.value(options.value)
    if num_real > num_rows:
        raise ValueError(f"it has {num_rows} rows, which cannot be cut to {padding.without.text}, {num_real}")
    if wanted < num_real:
        raise ValueError(f"it has {num_real} rows, which cannot be padded to {padding.rows.text}, {wanted}")
    common = rows(all_of_it, 0, 0, num_real)
    pieces = [tensor.piece(common, common)]
    if wanted > num_real:
        zeros = Region((num_real, *all_of_it.offsets[1:]), (wanted - num_real, *all_of_it.lengths[1:]))
        pieces.append(CopySource(zeros, None, zeros))
    return TargetTensor(tensor.dtype, (wanted, *tensor.shape[1:]), pieces)


def split(interleave: Interleave, tensor: LayerTensor, num_parts: int, options: Options) -> list[TargetTensor]:
    """Returns the tensors into which the map cuts one. Raises ValueError if its rows do not fit."""
    num_rows = _num_rows(tensor)
    groups = interleave.groups.value(options.value)
    sizes = _sizes(interleave, options) or [_quotient(num_rows, groups * num_parts)] * num_parts
    if groups * sum(sizes) != num_rows:
        raise ValueError(f"it has {num_rows} rows, not {_expected(interleave, groups, sizes)}")
    refuse_too_many(groups * num_parts)
    made = []
    for size, start in zip(sizes, accumulate(sizes, initial=0), strict=False):
        shape = (groups * size, *tensor.shape[1:])
        pieces = [
            tensor.piece(
                rows(whole(shape), 0, group * size, size),
                rows(whole(tensor.shape), 0, group * sum(sizes) + start, size),
            )
            for group in range(groups)
        ]
        made.append(TargetTensor(tensor.dtype, shape, pieces))
    return made


def joined(interleave: Interleave, tensors: Sequence[LayerTensor], options: Options) -> TargetTensor:
    """Returns the tensor that the map makes of these parts. Raises ValueError if they do not fit together."""
    kinds = {(tensor.dtype, tensor.shape[1:]) for tensor in tensors}
    groups = interleave.groups.value(options.value)
    counts = [_num_rows(tensor) for tensor in tensors]
    sizes = _sizes(interleave, options) or [_quotient(counts[0], groups)] * len(tensors)
    if len(kinds) > 1:
        raise ValueError(f"it cannot be one tensor with those beside it, which differ: {describe_kinds(kinds)}")
    for tensor, count, size in zip(tensors, counts, sizes, strict=True):
        if count != groups * size:
            raise ValueError(f"{tensor.name} has {count} rows, not {groups} groups of {size}")
    refuse_too_many(groups * len(tensors))
    shape = (sum(counts), *tensors[0].shape[1:])
    pieces = []
    for group in range(groups):
        at = group * sum(sizes)
        for tensor, size, start in zip(tensors, sizes, accumulate(sizes, initial=0), strict=False):
            target = rows(whole(shape), 0, at + start, size)
            pieces.append(tensor.piece(target, rows(whole(tensor.shape), 0, group * size, size)))
    return TargetTensor(tensors[0].dtype, shape, pieces)


def _sizes(interleave: Interleave, options: Options) -> list[int]:
    return [size.value(options.value) for size in interleave.rows]


def _expected(interleave: Interleave, groups: int, sizes: Sequence[int]) -> str:
    options = sorted({name for size in (interleave.groups, *interleave.rows) for name in size.names})
    about = f" by the options {', '.join(options)}" if options else ""
    return f"{groups} groups of {' + '.join(map(str, sizes))}, {groups * sum(sizes)} in all{about}"


def _num_rows(tensor: LayerTensor) -> int:
    if not tensor.shape:
        raise ValueError("it has no dimensions, and rows were expected")
    return tensor.shape[0]


def _quotient(num_rows: int, by: int) -> int:
    if num_rows % by:
        raise ValueError(f"it has {num_rows} rows, which are not {by} equal parts")
    return num_rows // by


def describe_kinds(kinds: set[tuple[str, tuple[int, ...]]]) -> str:
    return " and ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds)[:3])


def refuse_too_many(num_pieces: int) -> None:
    """Raises UnsafeCheckpointError (limits_exceeded) for more than MAX_PIECES."""
    if num_pieces > MAX_PIECES:
        raise UnsafeCheckpointError(
            f"the name map cuts the checkpoint into more than {MAX_PIECES} pieces; nothing was loaded or written: "
            "check the options of the map, and where the checkpoint comes from",
            kind="limits_exceeded",
        )
