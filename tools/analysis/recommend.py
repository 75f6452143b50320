"""Recommends options of saves and loads from a store's measurements, and measures how fast this machine compresses."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bytecheckpoint.diagnostics.store_speed import Latency, Speed
from bytecheckpoint.manifest.frames import FRAME_BYTES
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.runtime.threads import map_jobs
from bytecheckpoint.storage.compression import FrameEncoder
from bytecheckpoint.storage.object_io import BLOCK_BYTES

from ..render.number_format import rate_text, size_text

_AS_GOOD = 0.9
"""Share of the best speed. Of the numbers of threads that reach this share, the smallest is recommended."""
_WORTH_IT = 1.25
_LOCAL_WORTH_IT = 2.0
_MAX_GAP_BYTES = 64 << 20
_SAMPLE_FRAMES = 16


class CompressionSpeed(NamedTuple):
    """Speed of compressing values like bfloat16 weights, all threads together."""

    bytes_per_s: float
    """Raw bytes a second."""
    ratio: float
    """Compressed bytes divided by raw bytes."""
    threads: int


class Recommendation(NamedTuple):
    """A value for one option, and why. The value is None if nothing was measured for the option."""

    option: str
    value: int | str | bool | None
    why: str


def measure_compression(threads: int) -> CompressionSpeed:
    """Measures compression by this number of threads, but no more than there are processors."""
    threads = max(1, min(threads, os.cpu_count() or 1))
    numbers = np.random.default_rng(0).normal(0, 0.02, FRAME_BYTES // 2).astype(np.float32)
    frame = memoryview((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())

    def compress(_: int) -> int:
        encoder = FrameEncoder()
        return sum(len(encoder.encode("zstd", frame, 2)) for _ in range(_SAMPLE_FRAMES))

    compress(0)  # the first one makes memory and tables
    started = time.perf_counter()
    compressed_bytes = sum(map_jobs(compress, range(threads), num_threads=threads))
    seconds = time.perf_counter() - started
    raw_bytes = threads * _SAMPLE_FRAMES * frame.nbytes
    return CompressionSpeed(raw_bytes / max(seconds, 1e-9), compressed_bytes / raw_bytes, threads)


def recommend(
    latency: Latency,
    writes: Sequence[Speed],
    reads: Sequence[Speed],
    compression: CompressionSpeed,
    local: Sequence[Speed] | None,
) -> list[Recommendation]:
    """Recommends values for five options. `local` are the writes to a disk that could be the local stage, None if they
    were not measured; the value of `local_stage` says if the disk is worth it.
    """
    best_write = _fewest_threads(_of_library_parts(writes))
    best_read = _fewest_threads(reads)
    return [
        Recommendation(
            "SaveOptions.writer_threads",
            best_write.threads,
            f"{rate_text(best_write.bytes_per_s)} with {best_write.threads}; more threads are no faster by a tenth "
            f"(the default is {SaveOptions().writer_threads})",
        ),
        Recommendation(
            "LoadOptions.reader_threads",
            best_read.threads,
            f"{rate_text(best_read.bytes_per_s)} with {best_read.threads} reads of {size_text(best_read.part_bytes)} "
            f"in flight (the default is {LoadOptions().reader_threads})",
        ),
        _gap(latency, reads),
        _codec(best_write, compression),
        _local_stage(best_write, local),
    ]


def _of_library_parts(writes: Sequence[Speed]) -> Sequence[Speed]:
    """Returns the writes with blocks as long as those of saves, or else the longest measured; all if there are none."""
    longest = max(write.part_bytes for write in writes)
    return [write for write in writes if write.part_bytes == min(BLOCK_BYTES, longest)] or writes


def _fewest_threads(speeds: Sequence[Speed]) -> Speed:
    enough = _AS_GOOD * max(speed.bytes_per_s for speed in speeds)
    return min((speed for speed in speeds if speed.bytes_per_s >= enough), key=lambda speed: speed.threads)


def _gap(latency: Latency, reads: Sequence[Speed]) -> Recommendation:
    alone = max(speed.bytes_per_s for speed in reads if speed.threads == 1)
    gap_bytes = min(int(latency.read_s * alone) // 1000 * 1000, _MAX_GAP_BYTES)
    return Recommendation(
        "LoadOptions.max_gap_bytes",
        gap_bytes,
        f"a request takes {latency.read_s * 1e3:.2f} ms, in which one reader gets {size_text(gap_bytes)}",
    )


def _codec(write: Speed, compression: CompressionSpeed) -> Recommendation:
    is_faster = compression.ratio < 1 and compression.bytes_per_s >= _WORTH_IT * write.bytes_per_s
    return Recommendation(
        "SaveOptions.codec",
        "zstd" if is_faster else "none",
        f"{compression.threads} threads compress {rate_text(compression.bytes_per_s)} of what looks like bfloat16 "
        f"weights to {compression.ratio:.0%}, and the storage takes {rate_text(write.bytes_per_s)}",
    )


def _local_stage(write: Speed, local: Sequence[Speed] | None) -> Recommendation:
    if local is None:
        return Recommendation("SaveOptions.local_stage", None, "not measured: --local-stage FOLDER measures a disk")
    disk = _fewest_threads(_of_library_parts(local))
    factor = disk.bytes_per_s / max(write.bytes_per_s, 1e-9)
    return Recommendation(
        "SaveOptions.local_stage",
        factor >= _LOCAL_WORTH_IT,
        f"the disk takes {rate_text(disk.bytes_per_s)}, {factor:.1f} times what the storage takes",
    )
