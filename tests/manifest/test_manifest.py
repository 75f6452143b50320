"""The manifest: what goes in comes out, and whatever else comes in is one of the documented errors."""

from __future__ import annotations

import random
import struct
import tracemalloc
from dataclasses import replace
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES, itemsize
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manifest import (
    Chunk,
    DataFile,
    Manifest,
    decode_manifest,
    encode_manifest,
    encoding,
    outline,
    read_outline,
    records,
    tensor_record,
    validation,
)
from bytecheckpoint.manifest.envelope import FORMAT_VERSION, MAGIC, MAX_DECODED_BYTES, seal, unseal
from bytecheckpoint.region import Region, whole

FILE = "data/abc-00000-0.safetensors"
DOCUMENTED = {
    CheckpointCorruptError: {"bad_manifest", "unsupported_version"},
    UnsafeCheckpointError: {"path_escape", "limits_exceeded"},
}


def small_manifest() -> Manifest:
    """Two ranks' halves of a matrix, a scalar, an empty tensor, a tied one, and plain data."""
    weight = [
        Chunk(Region((0, 0), (2, 3)), 0, 4096, 24),
        Chunk(Region((2, 0), (2, 3)), 1, 4096, 24),
    ]
    return Manifest(
        save_id="abc",
        step=7,
        files=[
            DataFile(FILE, 4128, [4096, 32], [1, 1 << 63]),
            DataFile("data/abc-00001-0.safetensors", 4120),
        ],
        tensors={
            "weight": tensor_record("float32", (4, 3), weight),
            "step": tensor_record("int64", (), [Chunk(Region((), ()), 0, 4120, 8)]),
            "empty": tensor_record("bfloat16", (0, 5), [Chunk(Region((0, 0), (0, 5)), 0, 4128, 0)]),
            "nothing": tensor_record("complex32", (3, 0), []),
        },
        aliases={"tied": "weight"},
        objects={"lr": b"\xcb?\x00", "": b"\xc0"},
        rank_objects={"rng": {0: b"\x01", 3: b"\x02"}},
        metadata={"note": "first", "nested": {"a": [1, 2.5, None, True]}},
        provenance={"world_size": 2},
    )


def body_of(data: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(unseal(data))


def with_body(**changes: object) -> bytes:
    """A manifest file whose body was tampered with, its checksum right."""
    return seal(msgspec.msgpack.encode(body_of(encode_manifest(small_manifest())) | changes))


def column(*values: int, width: int = 8) -> bytes:
    return np.array(values, dtype=f"<u{width}").tobytes()


def kind_of(data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        decode_manifest(data)
    assert caught.value.kind in DOCUMENTED[type(caught.value)]
    return caught.value.kind


def same(left: Manifest, right: Manifest) -> bool:
    def plain(manifest: Manifest) -> Manifest:
        files = [DataFile(*file[:2], list(file[2]), list(file[3])) for file in manifest.files]
        return replace(manifest, files=files, tensors=dict(manifest.tensors))

    return plain(left) == plain(right)


# Round trip


def test_what_goes_in_comes_out() -> None:
    manifest = small_manifest()
    decoded = decode_manifest(encode_manifest(manifest))
    assert same(decoded, manifest)
    assert decoded.tensors["weight"].chunks == manifest.tensors["weight"].chunks
    assert decoded.tensors["weight"].num_chunks == 2
    assert decoded.tensors["step"].chunks == [Chunk(Region((), ()), 0, 4120, 8)]
    assert "weight" in decoded.tensors
    assert "tied" not in decoded.tensors
    assert len(decoded.tensors) == 4
    assert decoded.tensors.describe("empty") == ("bfloat16", (0, 5))


def test_an_empty_manifest_is_one() -> None:
    assert same(decode_manifest(encode_manifest(Manifest(save_id="x"))), Manifest(save_id="x"))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    num_files = draw(st.integers(1, 3))
    ends = [draw(st.integers(0, 1 << 40)) for _ in range(num_files)]
    tensors = {}
    for fqn in draw(st.sets(st.text(max_size=8), max_size=4)):
        dtype = draw(st.sampled_from(sorted(DTYPE_ITEMSIZES)))
        shape = draw(st.lists(st.integers(0, 300), max_size=4).map(tuple))
        chunks = []
        for region in draw(st.sampled_from([halves(shape), [whole(shape)]])):
            file = draw(st.integers(0, num_files - 1))
            chunks.append(Chunk(region, file, ends[file], region.numel * itemsize(dtype)))
            ends[file] += chunks[-1].byte_length
        tensors[fqn] = tensor_record(dtype, shape, chunks)
    plain = st.dictionaries(st.text(max_size=4), st.binary(max_size=8), max_size=3)
    return Manifest(
        save_id=draw(st.text("abcdef0123456789-", min_size=1)),
        step=draw(st.none() | st.integers(0, 1 << 40)),
        files=[
            DataFile(f"data/{index}", end, *draw(st.sampled_from([([], []), ([end], [end * 3])])) if end else ([], []))
            for index, end in enumerate(ends)
        ],
        tensors=tensors,
        aliases=draw(st.dictionaries(st.just("\0tied"), st.sampled_from(sorted(tensors)))) if tensors else {},
        objects=draw(plain),
        rank_objects=draw(
            st.dictionaries(st.text(max_size=4), st.dictionaries(st.integers(0, 1 << 33), st.binary(), min_size=1))
        ),
        metadata=draw(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers(-9, 1 << 63) | st.text())),
    )


def halves(shape: tuple[int, ...]) -> list[Region]:
    if not shape or shape[0] < 2:
        return [whole(shape)]
    middle, rest = shape[0] // 2, (0,) * (len(shape) - 1)
    return [Region((0, *rest), (middle, *shape[1:])), Region((middle, *rest), (shape[0] - middle, *shape[1:]))]


@given(manifests())
def test_any_manifest_comes_back(manifest: Manifest) -> None:
    data = encode_manifest(manifest)
    assert same(decode_manifest(data), manifest)
    assert encode_manifest(decode_manifest(data)) == data


def test_encoding_is_deterministic() -> None:
    assert encode_manifest(small_manifest()) == encode_manifest(small_manifest())


# Versions


def test_unknown_fields_are_ignored() -> None:
    assert same(decode_manifest(with_body(a_later_idea=[{"x": b"y"}, 1])), small_manifest())


def test_a_later_minor_version_is_read() -> None:
    assert same(decode_manifest(reseal(encode_manifest(small_manifest()), 10, 7)), small_manifest())


@pytest.mark.parametrize("major", [0, 3, 999])
def test_another_major_version_is_refused_with_its_number(major: int) -> None:
    data = reseal(encode_manifest(small_manifest()), 8, major)
    assert kind_of(data) == "unsupported_version"
    with pytest.raises(CheckpointCorruptError, match=f"version {major}"):
        decode_manifest(data)


def reseal(data: bytes, at: int, value: int) -> bytes:
    content = data[:at] + struct.pack("<H", value) + data[at + 2 : -8]
    return content + struct.pack("<Q", xxhash.xxh3_64_intdigest(content))


def test_the_layout_is_the_documented_one() -> None:
    data = encode_manifest(small_manifest())
    magic, major, minor, reserved, num_bytes = struct.unpack_from("<8sHHIQ", data)
    assert (magic, (major, minor), reserved) == (MAGIC, FORMAT_VERSION, 0)
    body = zstandard.decompress(data[24:-8])
    assert len(body) == num_bytes
    assert data[-8:] == struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))
    assert msgspec.msgpack.decode(body)["tensor_fqns"] == ["weight", "step", "empty", "nothing"]


# Damage


def test_every_flipped_bit_is_found() -> None:
    data = encode_manifest(small_manifest())
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(CheckpointCorruptError) as caught:
                decode_manifest(bytes(flipped))
            assert caught.value.kind == "bad_manifest"


def test_every_truncation_and_any_addition_is_found() -> None:
    data = encode_manifest(small_manifest())
    for length in range(len(data)):
        assert kind_of(data[:length]) == "bad_manifest"
    assert kind_of(data + b"\0") == "bad_manifest"


NO_GRIDS = {"tensor_is_grid": b"", "grid_parts": b""}


def chunk_columns(**changes: bytes) -> bytes:
    """Of `weight` twice, `step`, `empty`."""
    columns = {
        "chunk_coordinates": column(0, 0, 2, 3, 2, 0, 2, 3, 0, 0, 0, 5),
        "chunk_files": column(0, 1, 0, 0),
        "chunk_byte_offsets": column(4096, 4096, 4120, 4128),
        "chunk_byte_lengths": column(24, 24, 8, 0),
    }
    return with_body(**(NO_GRIDS | columns | changes))


def test_the_columns_of_the_bad_manifests_are_good_but_for_the_change() -> None:
    assert same(decode_manifest(chunk_columns()), small_manifest())


TENSORS = {"tensor_fqns": ["t"], "tensor_dtypes": column(0), "tensor_num_chunks": column(0), "dtypes": ["float32"]}
NO_CHUNKS = NO_GRIDS | dict.fromkeys(
    ("chunk_coordinates", "chunk_files", "chunk_byte_offsets", "chunk_byte_lengths"), b""
)


def one_tensor(*shape: int, **changes: object) -> bytes:
    parts: dict[str, object] = {"tensor_num_dims": column(len(shape)), "tensor_shapes": column(*shape), "aliases": {}}
    return with_body(**(TENSORS | NO_CHUNKS | parts | changes))


def grid(*parts: int, num_chunks: int = 2, **changes: object) -> bytes:
    """`weight`, of 4 x 3, as a grid."""
    counts = column(num_chunks, 1, 1, 0)
    return with_body(**({"grid_parts": column(*parts), "tensor_num_chunks": counts} | changes))


def test_the_grids_of_the_bad_manifests_are_good_but_for_the_change() -> None:
    assert same(decode_manifest(grid(2, 3)), small_manifest())


HUGE = (1 << 64) - 1
BAD = {
    "a grid of another number of chunks": grid(1, 3),
    "a grid of parts without elements": grid(2, 0),
    "a grid of parts larger than the tensor": grid(2, 4),
    "a grid of parts beyond int64": grid(HUGE, 3),
    "a grid without its parts": grid(2),
    "a grid without elements": grid(2, 3, tensor_is_grid=column(1, 1, 1, 0), chunk_coordinates=b""),
    "a mark that is none": grid(2, 3, tensor_is_grid=column(2, 1, 0, 0)),
    "a grid of more chunks than can be counted": one_tensor(
        1 << 40, 1 << 21, dtypes=["uint8"], tensor_is_grid=column(1), grid_parts=column(1, 1)
    ),
    "a save id that is empty": with_body(save_id=""),
    "a negative step": with_body(step=-1),
    "a step beyond any": with_body(step=HUGE),
    "a step that is text": with_body(step="7"),
    "a field of another type": with_body(chunk_files=5),
    "a list where a dict belongs": with_body(aliases=["weight"]),
    "a number where a list belongs": with_body(tensor_fqns=4),
    "an FQN that is not text": with_body(tensor_fqns=["weight", 5, "empty", "nothing"]),
    "a tensor twice": with_body(tensor_fqns=["weight", "weight", "empty", "nothing"]),
    "a tensor too many": with_body(tensor_fqns=["weight", "step", "empty", "nothing", "more"]),
    "a dtype number too high": with_body(tensor_dtypes=column(0, 1, 2, 9)),
    "an unknown dtype": with_body(dtypes=["float32", "int64", "bfloat16", "float3"]),
    "a dtype with torch's prefix": with_body(dtypes=["torch.float32", "int64", "bfloat16", "complex32"]),
    "too many dimensions": one_tensor(*[1] * 65),
    "a shape that wraps to nothing in 64 bits": one_tensor(1 << 32, 1 << 32),
    "a shape of too many bytes": one_tensor(1 << 61),
    "a dimension beyond int64": one_tensor(HUGE),
    "a negative dimension as unsigned": one_tensor(HUGE - 3, 0),
    "shapes that are missing": with_body(tensor_shapes=b""),
    "a hole": one_tensor(4),
    "a volume that is too large": chunk_columns(
        chunk_coordinates=column(0, 0, 2, 3, 1, 0, 3, 3, 0, 0, 0, 5), chunk_byte_lengths=column(24, 36, 8, 0)
    ),
    "a chunk past its shape": chunk_columns(chunk_coordinates=column(0, 0, 2, 3, 3, 0, 2, 3, 0, 0, 0, 5)),
    "a chunk past the second dimension": chunk_columns(chunk_coordinates=column(0, 0, 2, 3, 2, 1, 2, 3, 0, 0, 0, 5)),
    "a chunk whose end wraps around": chunk_columns(
        chunk_coordinates=column(0, 0, 2, 3, HUGE - 1, 0, 4, 3, 0, 0, 0, 5)
    ),
    "a chunk at the end of numbers": chunk_columns(
        chunk_coordinates=column(0, 0, 2, 3, 1 << 62, 0, 1 << 62, 3, 0, 0, 0, 5)
    ),
    "a chunk of the wrong length": chunk_columns(chunk_byte_lengths=column(24, 23, 8, 0)),
    "an empty chunk with bytes": chunk_columns(chunk_byte_lengths=column(24, 24, 8, 1)),
    "a file that is not listed": chunk_columns(chunk_files=column(0, 2, 0, 0)),
    "a file number beyond int64": chunk_columns(chunk_files=column(0, HUGE, 0, 0)),
    "a chunk past the end of its file": chunk_columns(chunk_byte_offsets=column(4096, 4097, 4120, 4128)),
    "a chunk far past the end of its file": chunk_columns(chunk_byte_offsets=column(4096, HUGE, 4120, 4128)),
    "an empty chunk past the end of its file": chunk_columns(chunk_byte_offsets=column(4096, 4096, 4120, 4129)),
    "chunks that share a byte": chunk_columns(chunk_byte_offsets=column(4096, 4096, 4119, 4128)),
    "chunks that share all bytes": chunk_columns(chunk_files=column(0, 0, 0, 0)),
    "a column cut short": chunk_columns(chunk_files=column(0, 1, 0)),
    "a column of odd width": chunk_columns(chunk_files=b"\0" * 12),
    "a column of chunks that nobody has": with_body(tensor_num_chunks=column(2, 1, 0, 0)),
    "no files at all": with_body(
        file_names=[], file_byte_lengths=b"", file_num_extents=b"", extent_lengths=b"", extent_digests=b""
    ),
    "a file twice": with_body(file_names=[FILE, FILE]),
    "a file without a length": with_body(file_byte_lengths=b""),
    "a file longer than any": with_body(file_byte_lengths=column(4128, HUGE)),
    "files that together wrap around": with_body(file_byte_lengths=column(4128, 1 << 62)),
    "extents that do not add up": with_body(extent_lengths=column(4096, 31)),
    "an empty extent": with_body(
        file_num_extents=column(3, 0), extent_lengths=column(4096, 0, 32), extent_digests=column(1, 2, 3)
    ),
    "extents without checksums": with_body(extent_digests=b""),
    "extents of no file": with_body(file_num_extents=column(0, 0)),
    "an alias of nothing": with_body(aliases={"tied": "gone"}),
    "an alias of an alias": with_body(aliases={"tied": "weight", "again": "tied"}),
    "an alias that is a tensor": with_body(aliases={"step": "weight"}),
    "an object that is no bytes": with_body(objects={"lr": 1}),
    "a negative rank": with_body(rank_objects=[["rng", -1, b""]]),
    "the object of a rank twice": with_body(rank_objects=[["rng", 1, b"a"], ["rng", 1, b"b"]]),
    "metadata that is not a dict": with_body(metadata=[1]),
    "metadata with a key that is not text": with_body(metadata={1: 2}),
    "an empty body": seal(b""),
    "a body that is not a dict": seal(b"\x90"),
    "a body without fields": seal(b"\x80"),
    "a body that is no msgpack": seal(b"\xc1" * 40),
    "text that is no UTF-8": seal(unseal(with_body()).replace(b"weight", b"we\xff\xfeht")),
    "a list longer than the file": seal(b"\x81\xacfile_names\xdd\xff\xff\xff\xff"),
    "lists in lists without end": seal(b"\x81\xa8metadata" + b"\x91" * 100_000),
}
FRAME = 1 << 20


def compressed(byte_length: int = 700_005, **changes: object) -> bytes:
    """`c`, of 1 MiB and 40 bytes in two frames, and 96 bytes of `w` behind it."""
    columns = {
        "file_byte_lengths": column(4096 + 700_101),
        "file_num_extents": column(4),
        "extent_lengths": column(4096, 700_000, 5, 96),
        "extent_digests": column(1, 2, 3, 4),
        "tensor_num_chunks": column(1, 1),
        "chunk_coordinates": column(0, FRAME // 4 + 10, 0, 24),
        "chunk_files": column(0, 0),
        "chunk_byte_offsets": column(4096, 704_101),
        "chunk_byte_lengths": column(byte_length, 96),
        "codecs": ["zstd", "none"],
        "chunk_codecs": column(0, 1),
    }
    tensors = {
        "file_names": [FILE],
        "tensor_fqns": ["c", "w"],
        "tensor_dtypes": column(0, 0),
        "tensor_num_dims": column(1, 1),
        "tensor_shapes": column(FRAME // 4 + 10, 24),
        "aliases": {},
    }
    return with_body(**(NO_GRIDS | columns | tensors | changes))


def three_frames(*extent_lengths: int) -> bytes:
    """The same with a tensor of 2 MiB and 40 bytes."""
    num_bytes = sum(extent_lengths)
    return compressed(
        num_bytes,
        file_byte_lengths=column(4096 + num_bytes + 96),
        file_num_extents=column(2 + len(extent_lengths)),
        extent_lengths=column(4096, *extent_lengths, 96),
        extent_digests=column(*range(2 + len(extent_lengths))),
        tensor_shapes=column(FRAME // 2 + 10, 24),
        chunk_coordinates=column(0, FRAME // 2 + 10, 0, 24),
        chunk_byte_offsets=column(4096, 4096 + num_bytes),
    )


def test_a_compressed_chunk_is_one_extent_for_each_frame() -> None:
    manifest = decode_manifest(compressed())
    assert manifest.tensors["c"].chunks == [Chunk(Region((0,), (FRAME // 4 + 10,)), 0, 4096, 700_005, "zstd")]
    assert manifest.tensors["w"].chunks == [Chunk(Region((0,), (24,)), 0, 704_101, 96, "none")]
    assert same(decode_manifest(encode_manifest(manifest)), manifest)
    assert decode_manifest(three_frames(5, FRAME + 4096, 5)).tensors["c"].num_chunks == 1


def test_codecs_cost_nothing_where_there_are_none() -> None:
    body = body_of(encode_manifest(small_manifest()))
    assert (body["codecs"], body["chunk_codecs"]) == ([], b"")
    lengths = column(24, 24, 8, 0, width=1)
    named = with_body(codecs=["none"], chunk_codecs=column(0, 0, 0, 0, width=1), chunk_byte_lengths=lengths)
    assert same(decode_manifest(named), small_manifest())
    assert encode_manifest(decode_manifest(named)) == encode_manifest(small_manifest())


def test_of_a_codec_that_is_not_known_nothing_is_expected() -> None:
    manifest = decode_manifest(compressed(5, codecs=["lz9", "none"]))
    assert [chunk.codec for chunk in manifest.tensors["c"].chunks] == ["lz9"]
    assert kind_of(compressed(5, codecs=["lz9", "none"], chunk_byte_offsets=column(4096, 4100))) == "bad_manifest"


BAD |= {
    "a codec number too high": compressed(chunk_codecs=column(0, 2)),
    "a codec number beyond int64": compressed(chunk_codecs=column(0, HUGE)),
    "codecs without names": compressed(codecs=[]),
    "names of codecs without a column": compressed(chunk_codecs=b""),
    "a codec that is not text": compressed(codecs=["zstd", 3]),
    "a compressed chunk that is said to be raw": compressed(chunk_codecs=column(1, 1)),
    "a compressed chunk longer than its bytes": three_frames(FRAME + 4096, FRAME, 40),
    "a frame longer than any": three_frames(FRAME + 4097, 5, 5),
    "fewer extents than frames": three_frames(700_000, 5),
    "more extents than frames": three_frames(1, 2, 3, 4),
    "a compressed chunk that starts inside an extent": compressed(700_004, chunk_byte_offsets=column(4097, 704_101)),
    "a compressed chunk that ends inside an extent": compressed(700_004),
    "a compressed chunk in a file without checksums": compressed(
        file_num_extents=column(0), extent_lengths=b"", extent_digests=b""
    ),
    "an empty chunk that is compressed inside an extent": compressed(
        0, tensor_shapes=column(0, 24), chunk_coordinates=column(0, 0, 0, 24), chunk_byte_offsets=column(4097, 704_101)
    ),
}
ESCAPES = [
    "",
    "/etc/passwd",
    "../other/data",
    "data/../../x",
    "data//x",
    "./x",
    "x/.",
    "x/..",
    "x/",
    "a\\b",
    "C:x",
    "a\0",
]


@pytest.mark.parametrize("name", BAD)
def test_a_manifest_that_cannot_be_right_is_refused(name: str) -> None:
    assert kind_of(BAD[name]) == "bad_manifest"


@pytest.mark.parametrize("name", [*ESCAPES, "s3://bucket/key", "x\n/.."])
def test_a_file_name_that_leaves_the_folder_is_refused(name: str) -> None:
    assert kind_of(with_body(file_names=[FILE, name])) == "path_escape"


@pytest.mark.parametrize("save_id", ["..", "a/b", "a\\b", "\0"])
def test_a_save_id_that_would_leave_the_folder_is_refused(save_id: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match="as a part of file names") as caught:
        decode_manifest(with_body(save_id=save_id))
    assert caught.value.kind == "path_escape"


@pytest.mark.parametrize("folder", ["../x", "/..", "/../x", "/a/../b", "/a/..", "/a\0", "S3://x", "/" + 5000 * "x"])
def test_a_link_to_anything_but_a_url_or_an_absolute_path_is_refused(folder: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match="a link leads to a URL, or to an absolute path") as caught:
        decode_manifest(with_body(linked_to=folder))
    assert caught.value.kind == "path_escape"


@pytest.mark.parametrize("folder", ["/", "/a/..b/c..", "/data/run 7", "s3://bucket/run"])
def test_other_links_are_accepted(folder: str) -> None:
    assert decode_manifest(with_body(linked_to=folder)).linked_to == folder


def test_the_last_step_of_a_root_is_accepted_and_the_one_after_it_is_not() -> None:
    assert decode_manifest(with_body(step=(1 << 63) - 1)).step == (1 << 63) - 1
    assert kind_of(with_body(step=1 << 63)) == "bad_manifest"


@pytest.mark.parametrize("name", ["x", "..x/y..", "data/ü \n", "a/b/c.safetensors"])
def test_other_file_names_are_accepted(name: str) -> None:
    assert decode_manifest(with_body(file_names=[FILE, name])).files[1].name == name


def test_empty_tensors_of_any_shape_are_accepted() -> None:
    for shape in ((1 << 40, 0, 1 << 62, 1 << 62), (*[1 << 62] * 63, 0)):
        assert decode_manifest(one_tensor(*shape)).tensors["t"].shape == shape


def test_the_largest_tensor_is_read_whole() -> None:
    num_bytes = 1 << 62
    manifest = Manifest(
        save_id="x",
        files=[DataFile("f", num_bytes)],
        tensors={"t": tensor_record("uint8", (num_bytes,), [Chunk(Region((0,), (num_bytes,)), 0, 0, num_bytes)])},
    )
    assert same(decode_manifest(encode_manifest(manifest)), manifest)


def test_chunks_whose_volumes_wrap_around_are_no_tiling() -> None:
    """Four times 2**62 elements are 0 in 64 bits, which is also what the hole has to be."""
    size = 1 << 62
    changes = {
        "tensor_fqns": ["a", "b"],
        "dtypes": ["uint8"],
        "tensor_dtypes": column(0, 0),
        "tensor_num_dims": column(1, 1),
        "tensor_num_chunks": column(5, 0),
        "tensor_shapes": column(size, 0),
        "chunk_coordinates": column(*[0, size] * 5),
        "chunk_files": column(0, 1, 0, 1, 0),
        "chunk_byte_offsets": column(*[0] * 5),
        "chunk_byte_lengths": column(*[size] * 5),
        "aliases": {},
    } | NO_GRIDS
    with pytest.raises(CheckpointCorruptError, match="elements, its shape has"):
        decode_manifest(with_body(**changes))


# Limits


@pytest.mark.parametrize(
    ("limit", "least"),
    [("MAX_FILES", 1), ("MAX_TENSORS", 3), ("MAX_CHUNKS", 3), ("MAX_EXTENTS", 1), ("MAX_OBJECTS", 1)],
)
def test_counts_have_limits_for_writer_and_reader(monkeypatch: pytest.MonkeyPatch, limit: str, least: int) -> None:
    data = encode_manifest(small_manifest())
    for module in (encoding, records):
        monkeypatch.setattr(module, limit, least, raising=False)
    assert kind_of(data) == "limits_exceeded"
    with pytest.raises(UnsafeCheckpointError, match="more than"):
        encode_manifest(small_manifest())


@pytest.mark.parametrize("field", ["metadata", "provenance"])
def test_metadata_has_limits_for_writer_and_reader(field: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(64):
        deep = {"a": [deep]}
    large = {"a": "x" * validation.MAX_METADATA_BYTES}
    for value in (deep, large):
        assert kind_of(with_body(**{field: value})) == "limits_exceeded"
        with pytest.raises(UnsafeCheckpointError) as caught:
            encode_manifest(replace(small_manifest(), **{field: value}))
        assert caught.value.kind == "limits_exceeded"


def test_metadata_may_be_as_deep_as_promised() -> None:
    deep: Any = 1
    for _ in range(validation.MAX_DEPTH):
        deep = {"a": deep}
    manifest = replace(small_manifest(), metadata=deep)
    assert decode_manifest(encode_manifest(manifest)).metadata == deep
    assert kind_of(with_body(metadata={"a": deep})) == "limits_exceeded"


def bomb(compressed: bytes, declared: int) -> bytes:
    content = struct.pack("<8sHHIQ", MAGIC, *FORMAT_VERSION, 0, declared) + compressed
    return content + struct.pack("<Q", xxhash.xxh3_64_intdigest(content))


def test_bombs_are_refused_before_they_go_off() -> None:
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26))
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(1 << 26))
    tracemalloc.start()
    try:
        assert kind_of(bomb(frame, MAX_DECODED_BYTES + 1)) == "limits_exceeded"
        assert kind_of(bomb(frame, HUGE)) == "limits_exceeded"
        assert kind_of(bomb(frame, 1000)) == "bad_manifest"
        assert kind_of(bomb(unsized, 1000)) == "bad_manifest"
        assert kind_of(bomb(b"junk", 1000)) == "bad_manifest"
        assert kind_of(bomb(b"", 0)) == "bad_manifest"
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_a_second_frame_is_refused() -> None:
    body = unseal(encode_manifest(small_manifest()))
    frame = zstandard.ZstdCompressor().compress(body)
    assert same(decode_manifest(bomb(frame, len(body))), small_manifest())
    assert kind_of(bomb(frame + frame, len(body))) == "bad_manifest"
    assert kind_of(bomb(frame[:-3], len(body))) == "bad_manifest"


def test_a_crowd_of_small_items_is_refused_before_it_is_made() -> None:
    crowd = b"\xdd" + struct.pack(">I", 5_000_000) + b"\xa0" * 5_000_000
    body = body_of(encode_manifest(small_manifest())) | {"file_names": msgspec.Raw(crowd)}
    data = seal(msgspec.msgpack.encode(body))
    tracemalloc.start()
    try:
        assert kind_of(data) == "limits_exceeded"
        assert tracemalloc.get_traced_memory()[1] < 4 * len(crowd)
    finally:
        tracemalloc.stop()


# Fuzz


def test_whatever_a_body_says_the_error_is_a_documented_one() -> None:
    """Bytes are changed behind the checksum, as someone who means harm would."""
    rng = random.Random(1)
    body = unseal(encode_manifest(small_manifest()))
    for _ in range(4000):
        changed = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.choice([0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xFF, rng.randrange(256)])
        try_decode(bytes(changed))


numbers = st.integers(0, 8) | st.sampled_from([24, 4096, 4120, 1 << 31, 1 << 32, (1 << 62) - 1, 1 << 62, 1 << 63, HUGE])
columns = st.lists(numbers, max_size=14).map(lambda values: column(*values)) | st.binary(max_size=16)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), HUGE)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted(body_of(encode_manifest(small_manifest())))


@given(st.dictionaries(st.sampled_from(FIELDS), columns | anything, min_size=1, max_size=4))
def test_whatever_a_field_holds_the_error_is_a_documented_one(changes: dict[str, object]) -> None:
    try_decode(unseal(with_body(**changes)))


@given(
    st.fixed_dictionaries(
        {
            "tensor_num_dims": st.lists(numbers, min_size=2, max_size=2),
            "tensor_num_chunks": st.lists(st.integers(0, 4), min_size=2, max_size=2),
            "tensor_shapes": st.lists(numbers, max_size=6),
            "chunk_coordinates": st.lists(numbers, max_size=12),
            "chunk_files": st.lists(st.integers(0, 2), max_size=6),
            "chunk_byte_offsets": st.lists(numbers, max_size=6),
            "chunk_byte_lengths": st.lists(numbers, max_size=6),
            "chunk_codecs": st.lists(st.integers(0, 3), max_size=6),
        }
    ),
    st.lists(st.sampled_from(["none", "zstd", "lz9"]), max_size=3),
)
def test_whatever_columns_hold_the_error_is_a_documented_one(changes: dict[str, list[int]], codecs: list[str]) -> None:
    values = {name: column(*values) for name, values in changes.items()}
    tensors = {"tensor_fqns": ["a", "b"], "tensor_dtypes": column(0, 1), "aliases": {}}
    try_decode(unseal(with_body(codecs=codecs, **tensors, **values)))


def try_decode(body: bytes) -> None:
    try:
        manifest = decode_manifest(seal(body))
    except (CheckpointCorruptError, UnsafeCheckpointError) as error:
        assert error.kind in DOCUMENTED[type(error)]  # noqa: PT017 - most changes are refused, some are harmless
    else:
        for record in manifest.tensors.values():
            assert sum(chunk.region.numel for chunk in record.chunks) == prod(record.shape)


# Writing


@pytest.mark.parametrize("metadata", [{"a": object()}, {"a": 1 << 64}, {"a": "\ud800"}, {1j: 2}])
def test_metadata_that_cannot_be_written_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(CheckpointSaveError) as caught:
        encode_manifest(replace(small_manifest(), metadata=metadata))
    assert caught.value.kind == "unsupported_value"


def test_metadata_that_contains_itself_is_refused() -> None:
    metadata: dict[str, Any] = {}
    metadata["self"] = metadata
    with pytest.raises(UnsafeCheckpointError):
        encode_manifest(replace(small_manifest(), metadata=metadata))


def test_a_number_that_no_column_holds_is_refused() -> None:
    with pytest.raises(CheckpointSaveError):
        encode_manifest(replace(small_manifest(), files=[DataFile(FILE, -1)]))


# Dtypes


def test_every_dense_dtype_of_torch_has_its_size() -> None:
    torch = pytest.importorskip("torch")
    names = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dense = {name for name in names if not name.startswith(("q", "bit")) or name.startswith("bits")}
    assert dense <= DTYPE_ITEMSIZES.keys()
    for name in dense:
        assert itemsize(name) == getattr(torch, name).itemsize


def test_a_dtype_that_is_not_known_is_named() -> None:
    with pytest.raises(CheckpointMismatchError, match="qint8") as caught:
        itemsize("qint8")
    assert caught.value.kind == "dtype"


@pytest.mark.parametrize("max_metadata_bytes", [validation.MAX_METADATA_BYTES, 100], ids=["short", "long"])
def test_an_outline_says_what_the_whole_manifest_says(monkeypatch: pytest.MonkeyPatch, max_metadata_bytes: int) -> None:
    monkeypatch.setattr(outline, "MAX_METADATA_BYTES", max_metadata_bytes)
    manifest = replace(small_manifest(), metadata={"a": 1}, provenance={"world_size": 2})
    content = encode_manifest(manifest)
    assert read_outline(content) == decode_manifest(content).outline
    assert read_outline(content).num_bytes == sum(file.byte_length for file in manifest.files)


def test_an_outline_of_a_body_that_is_no_manifest_is_refused() -> None:
    with pytest.raises(CheckpointCorruptError, match="cannot be decoded"):
        read_outline(seal(b"\x81\xa7save_id\x01"))


def test_an_outline_of_damaged_bytes_is_refused() -> None:
    content = bytearray(encode_manifest(small_manifest()))
    content[len(content) // 2] ^= 1
    with pytest.raises(CheckpointCorruptError):
        read_outline(bytes(content))
