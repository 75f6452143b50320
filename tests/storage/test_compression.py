"""Frames: what goes in comes out, and no bytes make decompressing crash or take more memory than it was given."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoints import encode_frames

from bytecheckpoint.errors import CheckpointCorruptError
from bytecheckpoint.manifest.frames import (
    CODECS,
    FRAME_BYTES,
    MAX_ENCODED_BYTES,
    MIN_CHUNK_BYTES,
    count_frames,
    frame_bytes,
)
from bytecheckpoint.storage.compression import FrameEncoder, decode_frame

ITEM_BYTES = [1, 2, 4, 8, 16]


def weights(num_bytes: int, item_bytes: int, seed: int = 0) -> bytes:
    """Numbers whose high bytes are alike."""
    numbers = np.random.default_rng(seed).standard_normal(num_bytes // 2 + 4).astype(np.float32)
    words = numbers.view(np.uint32) if item_bytes != 2 else (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return words.tobytes()[:num_bytes]


def encoded(raw: bytes | memoryview, item_bytes: int) -> bytes:
    return FrameEncoder().encode("zstd", memoryview(raw), item_bytes)


def decoded(frame: bytes, raw_bytes: int, item_bytes: int) -> bytes:
    into = bytearray(raw_bytes)
    decode_frame("zstd", memoryview(frame), item_bytes, memoryview(into))
    return bytes(into)


@given(st.binary(max_size=300), st.sampled_from([*ITEM_BYTES, 3]), st.integers(1, 400))
def test_any_frame_comes_back(raw: bytes, item_bytes: int, times: int) -> None:
    raw *= times
    frame = encoded(raw, item_bytes)
    assert decoded(frame, len(raw), item_bytes) == raw


@given(st.sampled_from(ITEM_BYTES), st.integers(0, 3 * FRAME_BYTES + 9))
@settings(max_examples=30, deadline=None)
def test_any_chunk_comes_back(item_bytes: int, num_bytes: int) -> None:
    raw = memoryview(weights(num_bytes, item_bytes))
    frames = encode_frames("zstd", raw, item_bytes)
    if frames is None:
        assert num_bytes < MIN_CHUNK_BYTES or item_bytes in {1, 8, 16}
        return
    assert len(frames) == count_frames(num_bytes)
    parts = [decoded(frame, frame_bytes(num_bytes, at), item_bytes) for at, frame in enumerate(frames)]
    assert b"".join(parts) == raw
    assert sum(map(len, frames)) < num_bytes


def test_an_encoder_makes_the_same_frames_whatever_it_made_before() -> None:
    encoder = FrameEncoder()
    for num_bytes, item_bytes in [(9, 4), (FRAME_BYTES, 2), (5000, 4), (5001, 8), (FRAME_BYTES, 1), (70_000, 2)]:
        raw = memoryview(weights(num_bytes, item_bytes))
        assert encoder.encode("zstd", raw, item_bytes) == encoded(raw, item_bytes)


def test_a_frame_decompresses_into_memory_of_any_alignment() -> None:
    raw = weights(4096, 4)
    frame = encoded(memoryview(b"x" + raw)[1:], 4)
    into = bytearray(4097)
    decode_frame("zstd", memoryview(b"x" + frame)[1:], 4, memoryview(into)[1:])
    assert into[1:] == raw


def test_bytes_are_sorted_by_their_place_in_the_item() -> None:
    frame = encoded(bytes(range(9)), 4)
    assert zstandard.decompress(frame) == bytes([0, 4, 1, 5, 2, 6, 3, 7, 8])
    assert zstandard.frame_content_size(frame) == 9


def test_weights_get_smaller_by_as_much_as_is_promised() -> None:
    raw = memoryview(weights(FRAME_BYTES, 2))
    assert len(encoded(raw, 2)) < 0.7 * FRAME_BYTES
    assert len(encoded(weights(FRAME_BYTES, 4), 4)) < 0.87 * FRAME_BYTES


@pytest.mark.parametrize("item_bytes", ITEM_BYTES)
def test_noise_makes_no_frame_longer_than_may_be(item_bytes: int) -> None:
    noise = np.random.default_rng(0).bytes(FRAME_BYTES + 5000)
    assert len(encoded(memoryview(noise)[:FRAME_BYTES], item_bytes)) <= MAX_ENCODED_BYTES
    assert encode_frames("zstd", memoryview(noise), item_bytes) is None


def test_a_small_chunk_is_not_compressed() -> None:
    assert encode_frames("zstd", memoryview(bytes(MIN_CHUNK_BYTES - 1)), 4) is None
    assert encode_frames("zstd", memoryview(bytes(MIN_CHUNK_BYTES)), 4) is not None
    assert encode_frames("zstd", memoryview(b""), 4) is None


def test_threads_do_not_disturb_one_another() -> None:
    raws = [weights(50_000 + 4 * number, 4, number) for number in range(64)]

    def there_and_back(raw: bytes) -> bytes:
        return decoded(encoded(raw, 4), len(raw), 4)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, raws)) == raws


FRAME = encoded(weights(4096, 4), 4)
DAMAGES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "noise": lambda: b"\xff" * 100,
    "cut short": lambda: FRAME[:-1],
    "a header alone": lambda: FRAME[:9],
    "more behind it": lambda: FRAME + b"\0",
    "two frames": lambda: FRAME + FRAME,
    "another length": lambda: encoded(bytes(4100), 4),
    "no length": lambda: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096)),
    "a frame to be skipped": lambda: b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
    "a window for gigabytes": lambda: b"\x28\xb5\x2f\xfd\x40\xb0\x00\x0f" + FRAME[6:],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_frame_is_refused(name: str) -> None:
    with pytest.raises(CheckpointCorruptError, match="compressed frame is damaged") as error:
        decoded(DAMAGES[name](), 4096, 4)
    assert error.value.kind == "checksum"


@given(st.integers(0, len(FRAME) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_another_value_or_an_error(at: int, bit: int) -> None:
    frame = bytearray(FRAME)
    frame[at] ^= 1 << bit
    try:
        assert len(decoded(bytes(frame), 4096, 4)) == 4096
    except CheckpointCorruptError as error:
        assert error.kind == "checksum"  # noqa: PT017 - zstd notices most flips, not all


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    bomb = zstandard.compress(bytes(512 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptError, match=f"4096 bytes were expected in it, it says {512 << 20}"):
            decoded(bomb, 4096, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_codecs_that_are_not_known() -> None:
    with pytest.raises(CheckpointCorruptError, match=r"codec 'lz9', and this release knows none, zstd") as error:
        decode_frame("lz9", memoryview(b""), 1, memoryview(bytearray(1)))
    assert error.value.kind == "unsupported_version"
    with pytest.raises(ValueError, match="not a codec that has frames"):
        FrameEncoder().encode("none", memoryview(b""), 1)
    assert CODECS == ("none", "zstd")
