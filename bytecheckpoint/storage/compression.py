"""Frames of compressed chunks, made and undone. The bytes of numbers are sorted by their place in the number first: the
bytes that hold signs and exponents are alike then and compress well, those of the mantissa are noise and cost no time.
It knows no file, no tensor and no plan. Everything may be called from any thread, and other threads run meanwhile.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import zstandard

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest.frames import FRAME_BYTES, unknown_codec

_LEVEL = 1
_HASH_LOG = 6
"""Entries of zstd's table of matches, as a power of two; level 1 has 14. Sorted bytes of numbers hardly ever repeat in
sequence: with fewer false hopes bfloat16 compresses three times as fast, and better. Long runs are found all the same.
"""


class FrameEncoder:
    """Makes one frame after the other, in memory that it keeps: new memory for each would cost as much as sorting the
    bytes. Serves one thread at a time.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_parameters())
        self._sorted = np.empty(0, np.uint8)

    def encode(self, codec: str, raw: memoryview, item_bytes: int) -> bytes:
        """One frame with these raw bytes, a flat view of at most FRAME_BYTES. Raises ValueError for a codec that has no
        frames.
        """
        if codec != "zstd":
            raise ValueError(f"{codec!r} is no codec that has frames")
        if item_bytes == 1:
            return self._compressor.compress(raw)
        if self._sorted.nbytes < raw.nbytes:
            self._sorted = np.empty(raw.nbytes, np.uint8)
        shuffled = self._sorted[: raw.nbytes]
        _shuffle(np.frombuffer(raw, np.uint8), item_bytes, shuffled)
        return self._compressor.compress(shuffled.data)


@cache
def _parameters() -> zstandard.ZstdCompressionParameters:
    """Made at first use: importing this module does nothing."""
    return zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, hash_log=_HASH_LOG, source_size=FRAME_BYTES, write_content_size=1
    )


def decode_frame(codec: str, frame: memoryview, item_bytes: int, into: memoryview) -> None:
    """Fills `into`, a flat writable view of bytes, with the raw bytes of a frame.

    Raises CheckpointCorruptError: `unsupported_version` for a codec that is not known, `checksum` for a frame that
    zstd does not understand or that does not hold exactly so many bytes. No more memory is taken than `into` has, but
    for small change, whatever the frame says.
    """
    if codec != "zstd":
        raise unknown_codec(codec, "a frame")
    _unshuffle(_decompress(frame, into.nbytes), item_bytes, into)


def _decompress(frame: memoryview, raw_bytes: int) -> bytes:
    try:
        # The size in the frame decides how much is allocated: it is compared before anything is decompressed.
        found = zstandard.frame_content_size(frame)
        if found != raw_bytes:
            raise _damaged(f"{raw_bytes} bytes were expected in it, it says {'nothing' if found < 0 else found}")
        decompressor = zstandard.ZstdDecompressor(max_window_size=FRAME_BYTES)
        raw = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _damaged(f"it cannot be decompressed ({error})") from error
    if len(raw) != raw_bytes:
        raise _damaged(f"{raw_bytes} bytes were expected in it, {len(raw)} were found")
    return raw


def _damaged(what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"a compressed frame is damaged: {what}; nothing of it was used: load another checkpoint, or copy this one "
        "again from a good replica",
        kind="checksum",
    )


_Bytes = npt.NDArray[np.uint8]


def _shuffle(source: _Bytes, item_bytes: int, into: _Bytes) -> None:
    """The first byte of each item, then the second of each, ...; bytes that make no whole item stay at the end."""
    num_sorted = source.nbytes // item_bytes * item_bytes
    planes = into[:num_sorted].reshape(item_bytes, -1)
    if item_bytes in {2, 4}:  # a narrowing cast is several times as fast as single bytes far apart
        words = source[:num_sorted].view(f"<u{item_bytes}")
        for number, plane in enumerate(planes):
            np.right_shift(words, 8 * number, out=plane, casting="unsafe", dtype=words.dtype)
    else:
        for number, plane in enumerate(planes):
            plane[:] = source[number:num_sorted:item_bytes]
    into[num_sorted:] = source[num_sorted:]


def _unshuffle(shuffled: bytes, item_bytes: int, into: memoryview) -> None:
    if item_bytes == 1:
        into[:] = shuffled
        return
    source = np.frombuffer(shuffled, np.uint8)
    target = np.frombuffer(into, np.uint8)
    num_sorted = into.nbytes // item_bytes * item_bytes
    planes = source[:num_sorted].reshape(item_bytes, -1)
    if item_bytes in {2, 4}:
        words = target[:num_sorted].view(f"<u{item_bytes}")
        words[:] = planes[-1]
        for plane in planes[-2::-1]:
            words <<= 8
            words |= plane
    else:
        for number, plane in enumerate(planes):
            target[number:num_sorted:item_bytes] = plane
    target[num_sorted:] = source[num_sorted:]
