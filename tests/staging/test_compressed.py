"""Compressed chunks read as raw ones are: whole, in part, into any memory, checked, and never a crash on damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_checkpoints import Content, codecs_in, compress_checkpoint, contents_of, tensor_bytes, write_checkpoint
from sample_tensors import random_bits, same_bits
from training import mlp, same_module

import bytecheckpoint as bcp
from bytecheckpoint.manifest import Manifest, decode_manifest, encode_manifest
from bytecheckpoint.manifest.envelope import seal, unseal
from bytecheckpoint.manifest.frames import FRAME_BYTES
from bytecheckpoint.region import Region, whole
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.safetensors_header import read_header

SHAPE = (700, 900)
"""Of float32: three frames, none of which ends at the end of a row."""


def weights(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random numbers that compress."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grid(shape: tuple[int, ...], rows: int, columns: int) -> list[Region]:
    """A matrix cut into parts."""
    height, width = -(-shape[0] // rows), -(-shape[1] // columns)
    return [
        Region((top, left), (min(height, shape[0] - top), min(width, shape[1] - left)))
        for top in range(0, shape[0], height)
        for left in range(0, shape[1], width)
    ]


TENSORS = {
    "whole": weights(*SHAPE),
    "rows": weights(*SHAPE, seed=1),
    "blocks": weights(*SHAPE, dtype=torch.bfloat16, seed=2),
    "cube": weights(40, 90, 110, dtype=torch.float64, seed=3),
    "complex": torch.complex(weights(300, 300).double(), torch.zeros(300, 300, dtype=torch.float64)),
    "flags": weights(1500, 1100) > 1,
    "small": weights(9),
    "noise": random_bits(torch.uint8, (5000,)),
    "scalar": torch.tensor(7),
}


def write_all(folder: Path) -> Manifest:
    cuts = {"rows": grid(SHAPE, 4, 1), "blocks": grid(SHAPE, 2, 3)}
    contents = [
        content
        for fqn, tensor in TENSORS.items()
        for content in contents_of(fqn, tensor, cuts.get(fqn, [whole(tensor.shape)]), "zstd")
    ]
    return write_checkpoint(folder, [contents[::2], contents[1::2]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compressed") / "c"
    codecs = codecs_in(write_all(path))
    assert {fqn for fqn, used in codecs.items() if used == {"none"}} == {"small", "noise", "scalar"}
    assert all(used == {"zstd"} for fqn, used in codecs.items() if fqn not in {"small", "noise", "scalar"})
    return path


@pytest.fixture(scope="module")
def opened(folder: Path) -> bcp.Checkpoint:
    return bcp.open(folder)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("layout", ["flat", "strided", "other dtype"])
def test_a_load_gives_what_was_stored(folder: Path, layout: str, verify: bool) -> None:
    targets = {fqn: torch.zeros_like(tensor) for fqn, tensor in TENSORS.items()}
    if layout == "strided":
        targets = {fqn: target.mT.contiguous().mT if target.ndim > 1 else target for fqn, target in targets.items()}
    if layout == "other dtype":
        targets = {fqn: target.to(torch.complex128) for fqn, target in targets.items()}
    bcp.load(folder, targets, cast=layout == "other dtype", options=bcp.LoadOptions(verify=verify))
    for fqn, target in targets.items():
        assert same_bits(target, TENSORS[fqn].to(target.dtype)), fqn


@pytest.mark.parametrize("threads", [1, 7])
def test_little_scratch_memory_is_enough(folder: Path, threads: int) -> None:
    options = bcp.LoadOptions(reader_threads=threads, scratch_bytes=8 << 20, max_gap_bytes=0)
    found = bcp.open(folder, options=options).state_dict()
    assert all(same_bits(found[fqn], tensor) for fqn, tensor in TENSORS.items())


def slices_of(length: int) -> st.SearchStrategy[Any]:
    bounds = st.integers(0, length)
    return st.builds(slice, bounds, bounds, st.sampled_from([None, None, 3])) | st.integers(0, length - 1)


@given(st.sampled_from(["whole", "rows", "blocks", "cube", "flags"]), st.data())
@settings(max_examples=80, deadline=None)
def test_any_region_is_that_of_the_tensor(opened: bcp.Checkpoint, fqn: str, data: st.DataObject) -> None:
    tensor = TENSORS[fqn]
    index = data.draw(st.tuples(*map(slices_of, tensor.shape[: data.draw(st.integers(0, tensor.ndim))])))
    assert same_bits(opened[fqn][index], tensor[index])


def test_only_the_frames_that_are_needed_are_read(tmp_path: Path) -> None:
    tensor = weights(4, FRAME_BYTES // 4)
    manifest = write_checkpoint(tmp_path / "c", [contents_of("a", tensor, [whole(tensor.shape)], "zstd")])
    (chunk,) = manifest.tensors["a"].chunks
    damage(tmp_path / "c", chunk.byte_offset + 100)
    view = bcp.open(tmp_path / "c")["a"]
    assert same_bits(view[1:], tensor[1:])
    assert same_bits(view[2, 5:9], tensor[2, 5:9])
    with pytest.raises(bcp.CheckpointCorruptError):
        view[0, -1]


def damage(folder: Path, byte_offset: int, file: int = 0) -> None:
    path = sorted((folder / "data").iterdir())[file]
    content = bytearray(path.read_bytes())
    content[byte_offset] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.7, 0.999])
@pytest.mark.parametrize("is_flat", [True, False])
def test_a_flipped_bit_in_a_frame_is_found(tmp_path: Path, where: float, is_flat: bool) -> None:
    tensor = weights(*SHAPE)
    manifest = write_checkpoint(tmp_path / "c", [contents_of("a", tensor, [whole(SHAPE)], "zstd")])
    (chunk,) = manifest.tensors["a"].chunks
    damage(tmp_path / "c", chunk.byte_offset + int(where * chunk.byte_length))
    target = torch.zeros(SHAPE) if is_flat else torch.zeros(SHAPE).mT.contiguous().mT
    with pytest.raises(bcp.CheckpointCorruptError, match=r"they are part of a\.") as error:
        bcp.load(tmp_path / "c", {"a": target})
    assert error.value.kind == "checksum"


def test_without_verification_what_zstd_notices_is_an_error(tmp_path: Path) -> None:
    tensor = weights(*SHAPE)
    manifest = write_checkpoint(tmp_path / "c", [contents_of("a", tensor, [whole(SHAPE)], "zstd")])
    (chunk,) = manifest.tensors["a"].chunks
    damage(tmp_path / "c", chunk.byte_offset)
    with pytest.raises(bcp.CheckpointCorruptError, match=r"bytes \d+ to \d+, part of a: a compressed frame") as error:
        bcp.load(tmp_path / "c", {"a": torch.zeros(SHAPE)}, options=bcp.LoadOptions(verify=False))
    assert error.value.kind == "checksum"


@pytest.mark.parametrize("seed", range(20))
def test_without_verification_no_damage_crashes(tmp_path: Path, seed: int) -> None:
    tensor = weights(300, 300, seed=seed)
    manifest = write_checkpoint(tmp_path / "c", [contents_of("a", tensor, [whole((300, 300))], "zstd")])
    (chunk,) = manifest.tensors["a"].chunks
    damage(tmp_path / "c", chunk.byte_offset + seed * seed * 7)
    try:
        found = bcp.open(tmp_path / "c", options=bcp.LoadOptions(verify=False))["a"][...]
    except bcp.CheckpointCorruptError as error:
        assert error.kind == "checksum"  # noqa: PT017 - zstd notices most of it, not all
    else:
        assert found.shape == tensor.shape


def test_a_codec_of_a_later_release_keeps_only_its_tensors_from_being_read(tmp_path: Path) -> None:
    chunks = [
        *contents_of("a", weights(90, 90), [whole((90, 90))], "zstd"),
        *contents_of("b", torch.ones(3), [whole((3,))], "none"),
    ]
    write_checkpoint(tmp_path / "c", [chunks])
    manifest = tmp_path / "c" / "manifest.bcp"
    body = msgspec.msgpack.decode(unseal(manifest.read_bytes()))
    body["codecs"] = ["lz9" if name == "zstd" else name for name in body["codecs"]]
    manifest.write_bytes(seal(msgspec.msgpack.encode(body)))
    opened = bcp.open(tmp_path / "c")
    assert opened["b"][...].tolist() == [1, 1, 1]
    target = torch.zeros(3)
    bcp.load(tmp_path / "c", {"b": target}, strict=False)
    assert target.tolist() == [1, 1, 1]
    with pytest.raises(bcp.CheckpointCorruptError, match=r"a is stored with the codec 'lz9'.*newer release") as error:
        opened["a"][...]
    assert error.value.kind == "unsupported_version"


def test_a_saved_checkpoint_that_is_compressed_afterwards_loads(tmp_path: Path) -> None:
    model, state = mlp(0), {"n": 3, "tables": [weights(200, 100)]}
    bcp.save(tmp_path / "c", {"model": model, "state": state})
    manifest = compress_checkpoint(tmp_path / "c", lambda fqn: "zstd" if fqn.startswith("state") else "none")
    assert codecs_in(manifest)["state.tables.0"] == {"zstd"}
    loaded, found = mlp(1), {"n": 0, "tables": [torch.zeros(200, 100)]}
    bcp.load(tmp_path / "c", {"model": loaded, "state": found})
    assert same_module(model, loaded)
    assert found["n"] == 3
    assert same_bits(found["tables"][0], state["tables"][0])


def test_other_readers_see_a_compressed_chunk_as_bytes(folder: Path) -> None:
    manifest = decode_manifest((folder / "manifest.bcp").read_bytes())
    header = read_header(LocalStore(str(folder), writer_threads=1), manifest.files[0].name)
    entries = {entry.name: entry for entry in header.entries}
    (chunk,) = manifest.tensors["whole"].chunks
    entry = entries["whole"]
    assert (entry.dtype, entry.shape, entry.byte_offset) == ("U8", (chunk.byte_length,), chunk.byte_offset)


def test_manifests_with_compressed_chunks_come_back(folder: Path) -> None:
    data = (folder / "manifest.bcp").read_bytes()
    manifest = decode_manifest(data)
    assert encode_manifest(manifest) == data
    assert manifest.tensors["small"].codecs == ()
    assert [chunk.codec for chunk in manifest.tensors["rows"].chunks] == ["zstd"] * 4


def test_an_empty_tensor_is_never_compressed(tmp_path: Path) -> None:
    content = Content("e", "float32", (0, 3), whole((0, 3)), tensor_bytes(torch.zeros(0, 3)), "zstd")
    assert codecs_in(write_checkpoint(tmp_path / "c", [[content]])) == {"e": {"none"}}
    assert bcp.open(tmp_path / "c")["e"][...].shape == (0, 3)
