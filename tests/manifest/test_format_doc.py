"""docs/format.md tells the truth: its example is a manifest, and its reader reads what the library writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from packed_checkpoints import encode_frames

from bytecheckpoint.manifest import (
    Chunk,
    DataFile,
    Manifest,
    decode_manifest,
    encode_manifest,
    tensor_record,
    validation,
)
from bytecheckpoint.manifest.envelope import unseal
from bytecheckpoint.region import Region, whole

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def read_tensor(page: str) -> Any:
    return run_block(page, "def read_tensor")["read_tensor"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def run_block(page: str, mark: str) -> dict[str, Any]:
    (source,) = (block for block in blocks(page, "python") if mark in block)
    names: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), names)
    return names


def example(page: str) -> bytes:
    (dump,) = blocks(page, "hex")
    return bytes.fromhex("".join(line.split("  ", 1)[1] for line in dump.splitlines()))


def test_the_hex_example_is_a_manifest_with_the_body_that_is_shown(page: str) -> None:
    data = example(page)
    (shown,) = (block for block in blocks(page, "python") if block.startswith("{"))
    body = msgspec.msgpack.decode(unseal(data))
    assert eval(shown) == body
    assert body.keys() == msgspec.msgpack.decode(unseal(encode_manifest(Manifest(save_id="x")))).keys()
    manifest = decode_manifest(data)
    assert manifest.step == 1000
    assert manifest.tensors["w"].chunks[1] == Chunk(Region((2, 0), (2, 2)), 1, 4096, 8)


def test_every_field_is_in_the_table_in_order(page: str) -> None:
    table = next(part for part in page.split("\n\n") if "| `save_id` |" in part)
    fields = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert fields == list(msgspec.msgpack.decode(unseal(example(page))))


def test_the_limits_are_those_of_the_library(page: str) -> None:
    for limit, what in [
        (validation.MAX_FILES, "files"),
        (validation.MAX_TENSORS, "tensors"),
        (validation.MAX_CHUNKS, "chunks"),
        (validation.MAX_EXTENTS, "extents"),
        (validation.MAX_OBJECTS, "objects"),
    ]:
        assert f"2^{limit.bit_length() - 1} {what}" in page.replace("\n  ", " ")


def test_the_reader_reads_what_the_library_writes(tmp_path: Path, read_tensor: Any) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(4, 3) - 5
    bits = np.arange(6, dtype=np.uint16) * 9999
    large = np.arange(400_000, dtype=np.float32).reshape(800, 500)
    halves = [(encode_frames("zstd", memoryview(half.tobytes()), 4) or []) for half in (large[:30], large[30:])]
    parts = [part.tobytes() for part in (matrix[:, :1], matrix[:, 1:], np.array(-7, dtype=np.int64), bits)]
    extents = [bytes(4096), b"".join(parts), *halves[0], *halves[1]]
    content, sizes = b"".join(extents), [sum(map(len, half)) for half in halves]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x-00000-0.safetensors").write_bytes(content)
    tensors = {
        "matrix": tensor_record(
            "float32",
            (4, 3),
            [Chunk(Region((0, 1), (4, 2)), 0, 4112, 32), Chunk(Region((0, 0), (4, 1)), 0, 4096, 16)],
        ),
        "scalar": tensor_record("int64", (), [Chunk(Region((), ()), 0, 4144, 8)]),
        "empty": tensor_record("bool", (0, 3), []),
        "large": tensor_record(
            "float32",
            (800, 500),
            [
                Chunk(Region((0, 0), (30, 500)), 0, 4164, sizes[0], "zstd"),
                Chunk(Region((30, 0), (770, 500)), 0, 4164 + sizes[0], sizes[1], "zstd"),
            ],
        ),
        "bits": tensor_record("bfloat16", (6,), [Chunk(Region((0,), (6,)), 0, 4152, 12)]),
    }
    manifest = Manifest(
        save_id="x",
        files=[
            DataFile("data/x-00000-0.safetensors", len(content), [len(part) for part in extents], [0] * len(extents))
        ],
        tensors=tensors,
        aliases={"tied": "matrix"},
    )
    (tmp_path / "manifest.bcp").write_bytes(encode_manifest(manifest))
    assert np.array_equal(read_tensor(tmp_path, "matrix"), matrix)
    assert np.array_equal(read_tensor(tmp_path, "tied"), matrix)
    assert read_tensor(tmp_path, "scalar") == -7
    assert read_tensor(tmp_path, "scalar").shape == ()
    assert read_tensor(tmp_path, "empty").shape == (0, 3)
    assert np.array_equal(read_tensor(tmp_path, "bits"), bits)
    assert [len(half) for half in halves] == [1, 2]
    assert decode_manifest(encode_manifest(manifest)).tensors["large"].codecs == ["zstd", "zstd"]
    assert np.array_equal(read_tensor(tmp_path, "large"), large)


def test_the_reader_refuses_a_codec_that_it_does_not_know(tmp_path: Path, read_tensor: Any) -> None:
    record = tensor_record("uint8", (2,), [Chunk(whole((2,)), 0, 0, 2, "lz9")])
    (tmp_path / "x").write_bytes(b"ab")
    (tmp_path / "manifest.bcp").write_bytes(
        encode_manifest(Manifest(save_id="x", files=[DataFile("x", 2)], tensors={"t": record}))
    )
    with pytest.raises(ValueError, match="the codec lz9"):
        read_tensor(tmp_path, "t")


def test_the_reader_refuses_another_version(tmp_path: Path, read_tensor: Any) -> None:
    data = bytearray(encode_manifest(Manifest(save_id="x")))
    data[8] = 2
    (tmp_path / "manifest.bcp").write_bytes(data)
    with pytest.raises(ValueError, match="not a manifest"):
        read_tensor(tmp_path, "any")
