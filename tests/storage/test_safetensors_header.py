from __future__ import annotations

import json
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES, itemsize
from bytecheckpoint.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from bytecheckpoint.region import Region
from bytecheckpoint.storage import safetensors_header as safetensors_header_module
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.storage.safetensors_header import (
    HEADER_ALIGNMENT,
    MAX_HEADER_BYTES,
    HeaderEntry,
    chunk_entry,
    chunk_name,
    decode_header,
    encode_header,
    read_header,
)

from .store_contract import put

_KEPT = {
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
}


def _file(path, entries, metadata=None):
    header = encode_header(entries, metadata or {})
    data = bytes(at % 251 for at in range(sum(entry.byte_length for entry in entries)))
    path.write_bytes(header + data)
    return header, data


@pytest.mark.parametrize("dtype", sorted(DTYPE_ITEMSIZES))
def test_safetensors_reads_every_dtype(tmp_path, dtype):
    size = itemsize(dtype)
    entries = [HeaderEntry("w", dtype, (2, 3), 6 * size), HeaderEntry("0d", dtype, (), size)]
    header, data = _file(tmp_path / "x.safetensors", entries)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["0d", "w"]
        tensor = file.get_tensor("w")
    assert tensor.contiguous().view(torch.uint8).flatten().tolist() == list(data[: 6 * size])
    assert (tensor.dtype == getattr(torch, dtype, None)) == (dtype in _KEPT)
    assert tensor.shape == ((2, 3) if size < 16 else (2, 3, 2))
    assert len(header) % HEADER_ALIGNMENT == 0


def test_names_are_escaped_and_metadata_comes_back(tmp_path):
    names = ['quote"back\\slash', "new\nline\x01", "ünï→😀", "", "a[0:1]"]
    entries = [HeaderEntry(name, "uint8", (at,), at) for at, name in enumerate(names)]
    header, _ = _file(tmp_path / "x.safetensors", entries, {'k"': "v\\", "save_id": "1"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {'k"': "v\\", "save_id": "1"}
        assert sorted(file.keys()) == sorted(names)
    decoded = decode_header(header)
    assert [entry.name for entry in decoded.entries] == names
    assert decoded.metadata == {'k"': "v\\", "save_id": "1"}
    assert decoded.data_offset == len(header)


def test_names_that_meet_are_told_apart(tmp_path):
    entries = [HeaderEntry(name, "uint8", (1,), 1) for name in ("a", "a", "a_", "__metadata__")]
    _file(tmp_path / "x.safetensors", entries)
    assert sorted(load_file(tmp_path / "x.safetensors")) == ["__metadata___", "a", "a_", "a__"]


def test_chunk_names():
    assert chunk_name("w", (4, 6), Region((0, 0), (4, 6))) == "w"
    assert chunk_name("w", (4, 6), Region((1, 0), (2, 6))) == "w[1:3,0:6]"
    assert chunk_name("s", (), Region((), ())) == "s"
    assert chunk_name("e", (0, 3), Region((0, 0), (0, 3))) == "e"
    assert chunk_name("__metadata__", (4,), Region((0,), (4,))) == "__metadata__[0:4]"


def test_a_compressed_chunk_is_listed_as_bytes(tmp_path):
    region = Region((2, 0), (2, 3))
    raw = chunk_entry("w", "bfloat16", (4, 3), region=region, byte_length=12, codec="none")
    assert raw == HeaderEntry("w[2:4,0:3]", "bfloat16", (2, 3), 12)
    packed = chunk_entry("w", "bfloat16", (4, 3), region=region, byte_length=7, codec="zstd")
    assert packed == HeaderEntry("w[2:4,0:3]", "uint8", (7,), 7)
    _file(tmp_path / "x.safetensors", [packed])
    assert load_file(tmp_path / "x.safetensors")["w[2:4,0:3]"].tolist() == list(range(7))


def test_empty_tensors_and_an_empty_file(tmp_path):
    entries = [
        HeaderEntry("a", "float32", (0, 3), 0),
        HeaderEntry("b", "float32", (2,), 8),
        HeaderEntry("c", "complex128", (0,), 0),
    ]
    header, _ = _file(tmp_path / "x.safetensors", entries)
    assert {name: tuple(t.shape) for name, t in load_file(tmp_path / "x.safetensors").items()} == {
        "a": (0, 3),
        "b": (2,),
        "c": (0, 2),
    }
    assert [entry.byte_length for entry in decode_header(header).entries] == [0, 8, 0]
    _file(tmp_path / "y.safetensors", [])
    assert load_file(tmp_path / "y.safetensors") == {}


def test_a_length_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="takes 8 bytes, not 7"):
        encode_header([HeaderEntry("a", "float32", (2,), 7)], {})


def test_a_header_that_readers_would_refuse_is_not_written(monkeypatch):
    monkeypatch.setattr(safetensors_header_module, "MAX_HEADER_BYTES", 10_000)
    with pytest.raises(UnsafeCheckpointError) as caught:
        encode_header([HeaderEntry("a" * 10_000, "uint8", (1,), 1)], {})
    assert caught.value.kind == "limits_exceeded"


def _header(text, *, length=None):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


def _entry(dtype="U8", shape=(2,), offsets=(0, 2)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 100_000,
        {"a": 1},
        {"a": {}},
        {"a": _entry(dtype="F4")},
        {"a": _entry(dtype=3)},
        {"a": _entry(shape=(-2,), offsets=(0, -2))},
        {"a": _entry(shape=(1,) * 65, offsets=(0, 1))},
        {"a": _entry(shape=(1 << 63, 1 << 63))},
        {"a": _entry(shape=(2.5,))},
        {"a": _entry(offsets=(0, 3))},
        {"a": _entry(offsets=(2, 0))},
        {"a": _entry(offsets=(1, 3))},
        {"a": _entry(offsets=(0, 1 << 70))},
        {"a": _entry(), "b": _entry()},
        {"a": _entry(), "b": _entry(offsets=(3, 5))},
        {"__metadata__": {"a": 1}},
        {"__metadata__": []},
    ],
)
def test_headers_that_cannot_be_right(content):
    with pytest.raises(CheckpointCorruptError) as caught:
        decode_header(_header(content))
    assert caught.value.kind == "bad_manifest"


_REPEATED = {
    "tensor": b'{"a":%s,"a":%s}',
    "something_else_first": b'{"a":{},"a":%s}',
    "escaped": b'{"a":%s,"\\u0061":%s}',
    "escaped_key_inside": b'{"a":{"dtype":"U8","shape":[2],"data\\u005foffsets":[0,2]},"a":%s}',
    "metadata": b'{"__metadata__":{"k":"1"},"__metadata__":{"k":"2"},"a":%s}',
    "with_spaces": b'{ "a" : %s , "a" : %s }  ',
    "no_letters": b'{"":{},"":%s}',
    "not_ascii": '{"é":%s,"é":%s}'.encode(),
    "in_metadata": b'{"__metadata__":{"x":"1","x":"2"},"a":%s}',
    "in_metadata_with_escapes": b'{"__metadata__":{"x":"\\"","x":"2"},"a":%s}',
    "dtype_of_a_tensor": b'{"a":{"dtype":"F64","dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    "shape_of_a_tensor": b'{"a":{"dtype":"U8","shape":[3],"shape":[2],"data_offsets":[0,2]}}',
    "beside_what_is_not_known": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":"","x":1}}',
}


@pytest.mark.parametrize("content", _REPEATED.values(), ids=_REPEATED)
def test_a_name_that_comes_twice_is_refused(content):
    entry = json.dumps(_entry(), separators=(",", ":")).encode()
    with pytest.raises(
        CheckpointCorruptError, match=r"^the header of a data file is damaged: 1 of its names"
    ) as caught:
        decode_header(_header(content.replace(b"%s", entry)))
    assert caught.value.kind == "bad_manifest"


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5)), st.sets(st.text(max_size=8)), st.data())
def test_names_that_come_once_are_read_however_they_are_written(metadata, names, data):
    expected = sorted(names - {"__metadata__"})
    tree = {
        "__metadata__": metadata,
        **{name: _entry(offsets=(2 * at, 2 * at + 2)) for at, name in enumerate(expected)},
    }
    is_ascii, gap = data.draw(st.booleans()), data.draw(st.sampled_from(["", " ", "\n"]))
    text = json.dumps(tree, ensure_ascii=is_ascii, separators=(f",{gap}", f":{gap}"))
    decoded = decode_header(_header(text.encode() + b" " * data.draw(st.integers(0, 3))))
    assert [entry.name for entry in decoded.entries] == expected
    assert decoded.metadata == metadata


def test_headers_that_are_cut_short_or_too_long():
    for data, error, kind in [
        (b"1234567", CheckpointCorruptError, "truncated"),
        (_header({}, length=100), CheckpointCorruptError, "truncated"),
        (_header({}, length=MAX_HEADER_BYTES + 1), UnsafeCheckpointError, "limits_exceeded"),
        (b"\xff" * 8, UnsafeCheckpointError, "limits_exceeded"),
    ]:
        with pytest.raises(error) as caught:
            decode_header(data)
        assert caught.value.kind == kind


@given(st.binary(max_size=200))
def test_no_bytes_make_decoding_crash(data):
    for header in (data, _header(data)):
        with suppress(CheckpointError):
            decode_header(header)


@given(st.data())
def test_no_changed_byte_makes_decoding_crash(data):
    header = bytearray(encode_header([HeaderEntry(name, "int16", (2, 2), 8) for name in "abc"], {"k": "v"})[:300])
    header[:8] = struct.pack("<Q", 292)
    at = data.draw(st.integers(0, 299))
    header[at] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(CheckpointError):
        decode_header(header)


def test_reading_a_header_from_a_store(tmp_path):
    store = LocalStore(str(tmp_path), writer_threads=1)
    header, _ = _file(tmp_path / "good", [HeaderEntry("w", "float32", (2,), 8)])
    assert read_header(store, "good") == decode_header(header)
    for name, content, error in [
        ("short", b"1", CheckpointCorruptError),
        ("cut", header[:100], CheckpointCorruptError),
        ("wrong", _header(b"[]"), CheckpointCorruptError),
        ("huge", b"\xff" * 100, UnsafeCheckpointError),
    ]:
        put(store, name, content)
        with pytest.raises(error) as caught:
            read_header(store, name)
        assert caught.value.path.endswith(name)
    with pytest.raises(CheckpointNotFoundError):
        read_header(store, "none")
