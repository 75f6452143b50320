"""The envelope of a manifest file: magic, version, compressed body, checksum. Opening it gives a body that is whole,
and never decompresses more than the header says.
"""

from __future__ import annotations

import struct
import threading
from functools import lru_cache

import xxhash
import zstandard

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest.validation import bad_manifest, refuse_more_than

MAGIC = b"BCPMANIF"
FORMAT_VERSION = (1, 0)
RUNS_VERSION = (2, 0)
"""Version of a manifest with runs for columns, which readers of version 1 do not know."""
MAX_DECODED_BYTES = 1 << 30

_HEADER = struct.Struct("<8sHHIQ")  # magic, major, minor, reserved, decoded length of the body
_DIGEST = struct.Struct("<Q")
_ZSTD_LEVEL = 3


def seal(body: bytes, *, version: tuple[int, int] = FORMAT_VERSION) -> bytes:
    """Returns the bytes of a file with this body. Raises UnsafeCheckpointError (limits_exceeded) if no reader would
    accept it.
    """
    refuse_more_than(MAX_DECODED_BYTES, len(body), "bytes")
    compressed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(body)
    content = _HEADER.pack(MAGIC, *version, 0, len(body)) + compressed
    return content + _DIGEST.pack(xxhash.xxh3_64_intdigest(content))


def unseal(data: bytes) -> bytes:
    """Returns the body that the bytes of a file hold.

    Raises CheckpointCorruptError (bad_manifest, unsupported_version) or UnsafeCheckpointError (limits_exceeded).
    """
    if len(data) < _HEADER.size + _DIGEST.size or not data.startswith(MAGIC):
        raise bad_manifest(f"its {len(data)} bytes do not start like a manifest; it was cut short or is something else")
    content = memoryview(data)[: -_DIGEST.size]
    if _DIGEST.unpack(data[-_DIGEST.size :]) != (xxhash.xxh3_64_intdigest(content),):
        raise bad_manifest(f"its {len(data)} bytes do not have the checksum that they end with")
    _, major, minor, _, num_bytes = _HEADER.unpack_from(data)
    if major not in {FORMAT_VERSION[0], RUNS_VERSION[0]}:
        raise CheckpointCorruptError(
            f"the manifest has format version {major}.{minor}, this bytecheckpoint reads {FORMAT_VERSION[0]}.x and "
            f"{RUNS_VERSION[0]}.x; "
            f"nothing is wrong with the checkpoint: load it with a release that reads version {major}",
            kind="unsupported_version",
        )
    refuse_more_than(MAX_DECODED_BYTES, num_bytes, "bytes")
    return _decompress(content[_HEADER.size :], num_bytes)


def _decompress(compressed: memoryview, num_bytes: int) -> bytes:
    try:
        # The size in the frame decides how much is allocated: it is compared before anything is decompressed.
        if zstandard.frame_content_size(compressed) != num_bytes:
            raise bad_manifest("its compressed body has another size than its header says")
        return _decompressor(threading.get_ident()).decompress(compressed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise bad_manifest(f"its body cannot be decompressed: {error}") from error


@lru_cache(maxsize=16)
def _decompressor(_thread: int) -> zstandard.ZstdDecompressor:
    """Returns the decompressor of this thread, which no other thread may use. Making one takes three times as long as
    reading a small manifest.
    """
    return zstandard.ZstdDecompressor()
