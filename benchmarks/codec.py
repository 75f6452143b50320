"""Costs and savings of compressing random weights on one core, and the storage for which it pays.

    python benchmarks/run.py codec               # 64 MiB of bfloat16 and of float32
    python benchmarks/run.py codec --mib 512

The weights are normal random numbers: their exponents compress, their signs and mantissas do not. Chunks are compressed
while others are written, so a save gains from a codec where the storage, or a rank's part of it, is slower than the
threads that compress; a load, where it is slower than those that decompress.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from bytecheckpoint.manifest.frames import CODECS, FRAME_BYTES
from bytecheckpoint.storage.compression import FrameEncoder, decode_frame

DTYPES = (torch.bfloat16, torch.float32)


class Cost(NamedTuple):
    """Cost of one codec on one dtype."""

    ratio: float
    """Bytes stored for each byte of weights."""
    encode: float
    """Bytes of weights a second, on one core."""
    decode: float
    """Bytes of weights a second, decompressed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=64, help="of weights, for each dtype")
    parser.add_argument("--rounds", type=int, default=5)


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(
        "| weights | codec | size | compress, MB/s a core | decompress, MB/s a core | pays for storage below, a core |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for dtype in DTYPES:
        raw = random_weights(dtype, arguments.mib << 20)
        for codec in CODECS:
            if codec == "none":
                print(f"| {name_of(dtype)} | none | 100.0% | | | |")
            else:
                print(line(dtype, codec, measure(codec, raw, dtype.itemsize, arguments.rounds)), flush=True)


def random_weights(dtype: torch.dtype, num_bytes: int) -> memoryview:
    weights = torch.randn(num_bytes // dtype.itemsize, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    return memoryview(weights.view(torch.uint8).numpy())


def measure(codec: str, raw: memoryview, item_bytes: int, rounds: int) -> Cost:
    """Returns medians. Raises RuntimeError if the weights do not come back."""
    encoder = FrameEncoder()
    frames = encode_all(encoder, codec, raw, item_bytes)
    back = memoryview(bytearray(raw.nbytes))
    encode_s = [timed(lambda: encode_all(encoder, codec, raw, item_bytes)) for _ in range(rounds)]
    decode_s = [timed(lambda: decode_all(codec, frames, item_bytes, back)) for _ in range(rounds)]
    if back != raw:
        raise RuntimeError(f"{codec} gave other weights back")
    num_encoded = sum(map(len, frames))
    return Cost(
        num_encoded / raw.nbytes, raw.nbytes / statistics.median(encode_s), raw.nbytes / statistics.median(decode_s)
    )


def encode_all(encoder: FrameEncoder, codec: str, raw: memoryview, item_bytes: int) -> list[bytes]:
    starts = range(0, raw.nbytes, FRAME_BYTES)
    return [encoder.encode(codec, raw[start : start + FRAME_BYTES], item_bytes) for start in starts]


def decode_all(codec: str, frames: list[bytes], item_bytes: int, into: memoryview) -> None:
    for number, frame in enumerate(frames):
        part = into[number * FRAME_BYTES : (number + 1) * FRAME_BYTES]
        decode_frame(codec, memoryview(frame), item_bytes, part)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def line(dtype: torch.dtype, codec: str, cost: Cost) -> str:
    speeds = f"{cost.encode / 1e6:.0f} | {cost.decode / 1e6:.0f}"
    pays = f"{cost.encode / 1e6:.0f} MB/s a core to save, {cost.decode / 1e6:.0f} to load"
    return f"| {name_of(dtype)} | {codec} | {cost.ratio:.1%} | {speeds} | {pays} |"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
