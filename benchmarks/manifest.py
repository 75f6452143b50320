"""Costs of a manifest of many chunks: seconds to build, encode, decode and read it whole, bytes on disk, peak memory.

    python benchmarks/run.py manifest                                   three layouts of 1,000,000 chunks
    python benchmarks/run.py manifest --tensors 500 --chunks 2000       500 tensors of 2,000 chunks each

The targets, for 1,000,000 chunks: encode and decode in about a second each, at most 40 MB on disk, checksums included.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from bytecheckpoint.manifest import (
    Chunk,
    DataFile,
    Manifest,
    TensorRecord,
    decode_manifest,
    encode_manifest,
    tensor_record,
)
from bytecheckpoint.planner.file_layout import cut_extents
from bytecheckpoint.region import Region
from bytecheckpoint.storage.object_io import BLOCK_BYTES
from shared.child_process import in_a_process

TITLES = ("build s", "encode s", "decode s", "records s", "MB", "peak MB")
LAYOUTS = ((500, 2000), (20_000, 50), (1_000_000, 1))
HEADER_BYTES = 1 << 16
SAVE_ID = "5f3a9c0d1e2f"
COLUMNS = 1024
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, help="tensors of one layout, instead of the three")
    parser.add_argument("--chunks", type=int, help="chunks of each tensor: as many ranks hold a part of each")
    parser.add_argument("--files", type=int, help="data files; by default one for each chunk of a tensor, at least 64")


def run(arguments: argparse.Namespace) -> None:
    """Prints a line for each layout."""
    one = arguments.tensors is not None or arguments.chunks is not None
    layouts = [(arguments.tensors or 500, arguments.chunks or 2000)] if one else LAYOUTS
    print(f"{'tensors x chunks':>18}" + "".join(f"{title:>10}" for title in TITLES))
    for num_tensors, num_chunks in layouts:
        in_a_process(measure, num_tensors, num_chunks, arguments.files or max(64, num_chunks))


def measure(num_tensors: int, num_chunks: int, num_files: int) -> None:
    """Prints the costs of one layout."""
    build_s, manifest = _timed(lambda: build(num_tensors, num_chunks, num_files))
    encode_s, data = _timed(partial(encode_manifest, manifest))
    del manifest  # so that the peak is not of two
    decode_s, decoded = _timed(lambda: decode_manifest(data))
    records_s, _ = _timed(lambda: sum(len(record.chunks) for record in decoded.tensors.values()))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = "".join(f"{seconds:>10.2f}" for seconds in (build_s, encode_s, decode_s, records_s))
    print(f"{num_tensors:>10} x {num_chunks:<5}{times}{len(data) / 1e6:>10.1f}{peak_mb:>10.0f}", flush=True)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def build(num_tensors: int, num_chunks: int, num_files: int) -> Manifest:
    """Cuts each tensor by rows over the files: chunks of about 1 MiB of bfloat16 that differ from tensor to tensor."""
    rng = random.Random(0)
    ends = [HEADER_BYTES] * num_files
    chunk_bytes: list[list[int]] = [[] for _ in ends]
    tensors: dict[str, TensorRecord] = {}
    for index in range(num_tensors):
        rows = rng.randrange(448, 576)
        chunks = []
        for part in range(num_chunks):
            file = (index + part) % num_files
            chunks.append(Chunk(Region((part * rows, 0), (rows, COLUMNS)), file, ends[file], rows * COLUMNS * 2))
            ends[file] += chunks[-1].byte_length
            chunk_bytes[file].append(chunks[-1].byte_length)
        fqn = f"model.layers.{index // 12}.block{index % 12}.feed_forward.weight"
        tensors[fqn] = tensor_record("bfloat16", (rows * num_chunks, COLUMNS), chunks)
    files = [
        _data_file(file, cut_extents(HEADER_BYTES, lengths, block_bytes=BLOCK_BYTES, state_bytes=sum(ends)), rng)
        for file, lengths in enumerate(chunk_bytes)
    ]
    return Manifest(save_id=SAVE_ID, step=1000, files=files, tensors=tensors)


def _data_file(index: int, extent_lengths: list[int], rng: random.Random) -> DataFile:
    digests = [rng.getrandbits(64) for _ in extent_lengths]
    return DataFile(f"data/{SAVE_ID}-{index:05d}-0.safetensors", sum(extent_lengths), extent_lengths, digests)
