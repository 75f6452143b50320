"""Frames of compressed chunks, each of which can be read alone: manifest, planner and codecs agree on them here.

A chunk's raw bytes are its elements, row-major, before they are compressed. Frame i holds FRAME_BYTES of them from
`i * FRAME_BYTES` on, the last frame the rest. The frames of a chunk follow one another in its file, and each is one
checksummed extent.
"""

from __future__ import annotations

from bytecheckpoint.errors import CheckpointCorruptError

CODECS = ("none", "zstd")
"""Names of the known codecs. A chunk of codec `none` has no frames."""
FRAME_BYTES = 1 << 20
"""Raw bytes of a frame. A multiple of every item size."""
MAX_ENCODED_BYTES = FRAME_BYTES + FRAME_BYTES // 256
"""Limit of a compressed frame: zstd never makes a MiB longer than that."""
MIN_CHUNK_BYTES = 4096
"""A smaller chunk is stored as it is: it would save little, and take an extent and a checksum of its own."""


def count_frames(raw_bytes: int) -> int:
    """Returns the number of frames of a chunk of `raw_bytes`."""
    return -(-raw_bytes // FRAME_BYTES)


def frame_bytes(raw_bytes: int, number: int) -> int:
    """Returns the number of raw bytes in frame `number` of a chunk of `raw_bytes`."""
    return min(FRAME_BYTES, raw_bytes - number * FRAME_BYTES)


def unknown_codec(codec: str, what: str) -> CheckpointCorruptError:
    """Returns the error for something that only a later release can decode."""
    return CheckpointCorruptError(
        f"{what} is stored with the codec {codec!r:.80}, and this release knows {', '.join(CODECS)}; nothing is wrong "
        "with the checkpoint: use a newer release of bytecheckpoint, or leave it out with exclude",
        kind="unsupported_version",
    )


def is_compressible(raw_bytes: int) -> bool:
    """Returns True if compressing a chunk of `raw_bytes` may be worth it."""
    return raw_bytes >= MIN_CHUNK_BYTES


def is_worth_it(raw_bytes: int, encoded_bytes: int) -> bool:
    """Returns True if a chunk is stored compressed, given the length of all its frames together."""
    return is_compressible(raw_bytes) and encoded_bytes < raw_bytes
