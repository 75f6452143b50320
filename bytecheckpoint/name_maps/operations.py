"""The operations of name maps: tensors of one layer, and from which regions of stored tensors the other framework's are
made. A few, so that each goes both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from bytecheckpoint.errors import UnsafeCheckpointError
from bytecheckpoint.name_maps.parameters import Options
from bytecheckpoint.name_maps.records import Interleave, Padding
from bytecheckpoint.planner.copy_plan import CopySource
from bytecheckpoint.region import Region, rows, whole

MAX_PIECES = 1 << 24


class Part(NamedTuple):
    """A tensor of the checkpoint, or what it holds of one layer."""

    name: str
    """As the checkpoint has it; an alias, maybe."""
    fqn: str
    """Under which it is stored."""
    layer: int | None
    """In the leading dimension of what is stored, where it is stacked."""
    dtype: str
    shape: tuple[int, ...]
    """Without that dimension."""

    def piece(self, target: Region, source: Region) -> CopySource:
        """The piece that a region of this is of a target."""
        return CopySource(target, self.fqn, source if self.layer is None else in_stack(source, self.layer))


class Made(NamedTuple):
    """A tensor of the other framework, or what it holds of one layer."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[CopySource]


def in_stack(region: Region, index: int) -> Region:
    return Region((index, *region.offsets), (1, *region.lengths))


def as_it_is(tensor: Part) -> Made:
    all_of_it = whole(tensor.shape)
    return Made(tensor.dtype, tensor.shape, [tensor.piece(all_of_it, all_of_it)])


def padded(padding: Padding | None, tensor: Part, side: int, options: Options) -> Made:
    """The tensor with as many rows as it has on the other side: without padding, or with rows of zeros."""
    if padding is None:
        return as_it_is(tensor)
    all_of_it = whole(tensor.shape)
    num_rows = _num_rows(tensor)
    kept = padding.without.value(options.value)  # what lies beyond means nothing on either side
    wanted = kept if padding.padded == side else padding.rows.value(options.value)
    if kept > num_rows:
        raise ValueError(f"it has {num_rows} rows, which cannot be cut to {padding.without.text}, {kept}")
    if wanted < kept:
        raise ValueError(f"it has {kept} rows, which cannot be padded to {padding.rows.text}, {wanted}")
    common = rows(all_of_it, 0, 0, kept)
    pieces = [tensor.piece(common, common)]
    if wanted > kept:
        zeros = Region((kept, *all_of_it.offsets[1:]), (wanted - kept, *all_of_it.lengths[1:]))
        pieces.append(CopySource(zeros, None, zeros))
    return Made(tensor.dtype, (wanted, *tensor.shape[1:]), pieces)


def split(interleave: Interleave, tensor: Part, num_parts: int, options: Options) -> list[Made]:
    """The parts of which a tensor consists."""
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
        made.append(Made(tensor.dtype, shape, pieces))
    return made


def joined(interleave: Interleave, tensors: Sequence[Part], options: Options) -> Made:
    """The tensor that consists of these parts."""
    kinds = {(tensor.dtype, tensor.shape[1:]) for tensor in tensors}
    groups = interleave.groups.value(options.value)
    counts = [_num_rows(tensor) for tensor in tensors]
    sizes = _sizes(interleave, options) or [_quotient(counts[0], groups)] * len(tensors)
    if len(kinds) > 1:
        raise ValueError(f"it cannot be one tensor with those beside it, which differ: {show_kinds(kinds)}")
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
    return Made(tensors[0].dtype, shape, pieces)


def _sizes(interleave: Interleave, options: Options) -> list[int]:
    return [size.value(options.value) for size in interleave.rows]


def _expected(interleave: Interleave, groups: int, sizes: Sequence[int]) -> str:
    names = sorted({name for size in (interleave.groups, *interleave.rows) for name in size.names})
    about = f" by the options {', '.join(names)}" if names else ""
    return f"{groups} groups of {' + '.join(map(str, sizes))}, {groups * sum(sizes)} in all{about}"


def _num_rows(tensor: Part) -> int:
    if not tensor.shape:
        raise ValueError("it has no dimensions, and rows were expected")
    return tensor.shape[0]


def _quotient(num_rows: int, by: int) -> int:
    if num_rows % by:
        raise ValueError(f"it has {num_rows} rows, which are not {by} equal parts")
    return num_rows // by


def show_kinds(kinds: set[tuple[str, tuple[int, ...]]]) -> str:
    return " and ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds)[:3])


def refuse_too_many(num_pieces: int) -> None:
    if num_pieces > MAX_PIECES:
        raise UnsafeCheckpointError(
            f"the name map cuts the checkpoint into more than {MAX_PIECES} pieces; nothing was loaded or written: "
            "check the options of the map, and where the checkpoint comes from",
            kind="limits_exceeded",
        )
