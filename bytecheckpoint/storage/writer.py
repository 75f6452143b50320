"""A data file written in large blocks, checksummed on the way. It handles bytes; what they mean, and in which memory
they are, is nothing to it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import xxhash

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.storage.store import Block, Store

BLOCK_BYTES = 16 << 20
"""How much one write carries, and no checksummed extent reaches from one block into the next."""


class Image(NamedTuple):
    """The exact bytes of one data file, before it is written."""

    name: str
    """Relative to the checkpoint's folder."""
    extent_lengths: Sequence[int]
    """In bytes, adding up to the length of the file."""
    blocks: Sequence[tuple[int, int]]
    """Byte offset and length of the ranges in which the content is asked for, once each and in this order. An extent
    lies in one of them."""
    content: Callable[[int, int], AbstractContextManager[memoryview]]
    """Gives such a range, for as long as the context lasts."""
    extent_digests: Sequence[int] | None = None
    """Where they are known already; extents may then reach over several blocks."""


def write_image(store: Store, name: str, image: Image, on_checksum: Callable[[float], None]) -> DataFile:
    """Writes the image as the object `name`, durably, and returns what the manifest says about it.

    `on_checksum` is told, from any thread, how many seconds a checksum took.
    """
    digests = list(image.extent_digests or [0] * len(image.extent_lengths))

    @contextmanager
    def checked(byte_offset: int, byte_length: int, extents: range) -> Iterator[memoryview]:
        with image.content(byte_offset, byte_length) as content:
            yield content
            # Only now, because stores enter one block at a time but write several at once: this is done side by side.
            started = time.perf_counter()
            lengths = [image.extent_lengths[extent] for extent in extents]
            for extent, end in zip(extents, accumulate(lengths), strict=True):
                digests[extent] = xxhash.xxh3_64_intdigest(content[end - image.extent_lengths[extent] : end])
            on_checksum(time.perf_counter() - started)

    contents: list[Callable[[], AbstractContextManager[memoryview]]]
    if image.extent_digests is None:
        contents = [partial(checked, *block, extents) for block, extents in _with_extents(image)]
    else:
        contents = [partial(image.content, *block) for block in image.blocks]
    blocks = [Block(*block, content) for block, content in zip(image.blocks, contents, strict=True)]
    store.write(name, blocks, replace=False)
    return DataFile(image.name, sum(image.extent_lengths), tuple(image.extent_lengths), tuple(digests))


def _with_extents(image: Image) -> list[tuple[tuple[int, int], range]]:
    """The blocks, and the numbers of the extents that each is made of."""
    ends = [0, *accumulate(image.extent_lengths)]
    bounds = [*(bisect_left(ends, byte_offset) for byte_offset, _ in image.blocks), len(image.extent_lengths)]
    return [(block, range(*bound)) for block, bound in zip(image.blocks, pairwise(bounds), strict=True)]
