"""Plans which frames of a compressed chunk are decompressed for a wanted region. Decompresses nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from bytecheckpoint.manifest import Chunk
from bytecheckpoint.manifest.frames import FRAME_BYTES, frame_bytes
from bytecheckpoint.manifest.ranges import FlatPart, Frame, Part
from bytecheckpoint.planner.byte_ranges import boxes_in_run
from bytecheckpoint.region import Region, flat_span, is_contiguous_in


def frame_parts(
    want: int, chunk: Chunk, common: Region, *, flat_target: Region | None, item_bytes: int
) -> Iterator[tuple[int, Part]]:
    """Cuts the region `common` of a compressed chunk into parts that lie in one frame each; yields for each part the
    number of the frame, and the part.

    Byte offsets of the parts count from the frame's first raw byte. `flat_target` is the region whose memory takes raw
    bytes, which contains `common`; None if elements have to be placed one by one.
    """
    first, last = flat_span(common, chunk.region)
    start, end = first * item_bytes, last * item_bytes
    numbers = range(start // FRAME_BYTES, -(-end // FRAME_BYTES))
    is_run = flat_target is not None and is_contiguous_in(common, chunk.region)
    num_items = FRAME_BYTES // item_bytes
    if flat_target is None or not is_run or not is_contiguous_in(common, flat_target):
        for number in numbers:
            start = number * num_items
            run = range(start, min(start + num_items, chunk.region.numel))
            for part in boxes_in_run(want, chunk, common, run, byte_offset=-start * item_bytes, item_bytes=item_bytes):
                yield number, part
        return
    target = flat_span(common, flat_target)[0] * item_bytes
    for number in numbers:
        frame_start = number * FRAME_BYTES
        low, high = max(start, frame_start), min(end, frame_start + FRAME_BYTES)
        yield number, FlatPart(want, low - frame_start, high - low, target + low - start)


def frames_of(
    chunk: Chunk, parts: Mapping[int, Sequence[Part]], extent_bounds: Sequence[int], *, item_bytes: int
) -> list[Frame]:
    """Returns the frames of a chunk that wanted parts lie in; `parts` has these by the number of their frame.

    `extent_bounds` has the byte offset of each extent of the file, and the length of the file.
    """
    first = bisect_left(extent_bounds, chunk.byte_offset)
    raw_bytes = chunk.region.numel * item_bytes
    frames = []
    for number, of_frame in parts.items():
        start, end = extent_bounds[first + number : first + number + 2]
        num_bytes = frame_bytes(raw_bytes, number)
        frames.append(Frame(start, end - start, num_bytes, chunk.codec, item_bytes, tuple(of_frame)))
    return frames
