"""Compression of chunks into frames. The bytes of numbers are shuffled by their position in the number first: the bytes
with signs and exponents are alike then and compress well, the mantissa is noise and costs no time. Knows no
file, no tensor and no plan. Functions may be called from any thread, and release the GIL.
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
"""Entries of zstd's table of matches, as a power of two; level 1 has 14. Shuffled bytes of numbers hardly ever repeat
in sequence: with fewer false matches bfloat16 compresses three times as fast, and better. Long runs are found all the
same.
"""


class FrameEncoder:
    """Makes frames with scratch memory that it reuses: new memory for each would cost as much as shuffling. For one
    thread at a time.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_parameters())
        self._scratch = np.empty(0, np.uint8)

    def encode(self, codec: str, raw: memoryview, item_bytes: int) -> bytes:
        """Returns one frame of these raw bytes, a flat view of at most FRAME_BYTES. Raises ValueError for a codec
        without frames.
        """
        if codec != "zstd":
            raise ValueError(f"{codec!r} is not a codec that has frames")
        if item_bytes == 1:
            return self._compressor.compress(raw)
        if self._scratch.nbytes < raw.nbytes:
            self._scratch = np.empty(raw.nbytes, np.uint8)
        shuffled = self._scratch[: raw.nbytes]
        _shuffle(np.frombuffer(raw, np.uint8), item_bytes, shuffled)
        return self._compressor.compress(shuffled.data)


@cache
def _parameters() -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters.from_level(
        _LEVEL, hash_log=_HASH_LOG, source_size=FRAME_BYTES, write_content_size=1
    )


def decode_frame(codec: str, frame: memoryview, item_bytes: int, into: memoryview) -> None:
    """Fills `into`, a flat writable view of bytes, with the raw bytes of a frame.

    Raises CheckpointCorruptError: `unsupported_version` for an unknown codec, `checksum` for a frame that zstd cannot
    decompress or whose raw bytes have another length than `into`. Takes about as much memory as `into` has, whatever
    the frame says.
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
    """Writes the first byte of each item, then the second of each, ...; what follows the last whole item stays last."""
    num_shuffled = source.nbytes // item_bytes * item_bytes
    planes = into[:num_shuffled].reshape(item_bytes, -1)
    if item_bytes in {2, 4}:  # a narrowing cast is several times as fast as single bytes far apart
        words = source[:num_shuffled].view(f"<u{item_bytes}")
        for number, plane in enumerate(planes):
            np.right_shift(words, 8 * number, out=plane, casting="unsafe", dtype=words.dtype)
    else:
        for number, plane in enumerate(planes):
            plane[:] = source[number:num_shuffled:item_bytes]
    into[num_shuffled:] = source[num_shuffled:]


def _unshuffle(shuffled: bytes, item_bytes: int, into: memoryview) -> None:
    if item_bytes == 1:
        into[:] = shuffled
        return
    source = np.frombuffer(shuffled, np.uint8)
    target = np.frombuffer(into, np.uint8)
    num_shuffled = into.nbytes // item_bytes * item_bytes
    planes = source[:num_shuffled].reshape(item_bytes, -1)
    if item_bytes in {2, 4}:
        words = target[:num_shuffled].view(f"<u{item_bytes}")
        words[:] = planes[-1]
        for plane in planes[-2::-1]:
            words <<= 8
            words |= plane
    else:
        for number, plane in enumerate(planes):
            target[number:num_shuffled:item_bytes] = plane
    target[num_shuffled:] = source[num_shuffled:]
