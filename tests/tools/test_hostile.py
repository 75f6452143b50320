"""Checkpoints that are damaged, or made to do harm: every command ends with an exit code and one line, and reads
nothing that it should not.
"""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
import torch
from command_lines import paths_of
from msgspec.msgpack import Ext, encode

import bytecheckpoint as bcp
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, decode_manifest, encode_manifest, tensor_record
from bytecheckpoint.manifest import encoding as manifest_module
from bytecheckpoint.manifest.envelope import seal, unseal
from bytecheckpoint.region import Region, whole

OF_ONE = ["diff", "pin", "rm", "show", "timeline", "unpin", "verify"]
"""Commands that look at one checkpoint, or at two."""
READ_ALL = [command for command in OF_ONE if command != "rm"]
"""Those that a damaged manifest stops."""


def changed_body(path, **fields) -> bytes:
    """Returns the manifest with other msgpack in some fields of its body, sealed as if nothing were wrong."""
    body = msgspec.msgpack.decode(bytes(unseal((path / "manifest.bcp").read_bytes())))
    return seal(encode({**body, **fields}))


@pytest.fixture
def small(tmp_path):
    """A checkpoint of one tensor and one number."""
    bcp.save(tmp_path / "small", {"w": torch.arange(6.0), "lr": 0.5})
    return tmp_path / "small"


def ends_well(call, command, path, codes) -> str:
    """Returns the kinds of errors of a command that must end with one of these codes, with and without --json."""
    ended = call(command, *paths_of(command, path))
    assert ended.code in codes, (command, ended)
    assert ended.err.count("\n") == (0 if ended.out else 1)
    assert "Traceback" not in ended.out + ended.err
    ended = call(command, *paths_of(command, path), "--json")
    assert ended.code in codes
    assert ended.err == ""
    return ended.json.get("error", {}).get("kind", "")


@pytest.mark.parametrize("command", READ_ALL)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 20, 40, -1])
def test_a_manifest_that_was_cut_short(call, small, command, length) -> None:
    content = (small / "manifest.bcp").read_bytes()
    (small / "manifest.bcp").write_bytes(content[:length])
    assert ends_well(call, command, small, {1}) in {"bad_manifest", "unsupported_version"}


@pytest.mark.parametrize("command", OF_ONE)
@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "data/../../x", "data\\x", "C:x", "data/\x00"])
def test_a_file_outside_of_the_folder(call, small, command, name) -> None:
    manifest = decode_manifest((small / "manifest.bcp").read_bytes())
    files = [file._replace(name=name) for file in manifest.files]
    (small / "manifest.bcp").write_bytes(encode_manifest(replace(manifest, files=files)))
    assert ends_well(call, command, small, {1}) == "path_escape"


HUGE = (1 << 62).to_bytes(8, "little")


@pytest.mark.parametrize("command", READ_ALL)
@pytest.mark.parametrize(
    "field", ["tensor_num_chunks", "tensor_num_dims", "tensor_shapes", "file_num_extents", "file_byte_lengths"]
)
def test_counts_beyond_all_bounds(call, small, command, field) -> None:
    for column in (b"\x08" + HUGE, b"\x08" + HUGE * 2, b"\x04" + b"\xff" * 4, b""):
        (small / "manifest.bcp").write_bytes(changed_body(small, **{field: column}))
        assert ends_well(call, command, small, {1}) in {"bad_manifest", "limits_exceeded"}


@pytest.mark.parametrize("command", OF_ONE)
def test_a_tensor_of_exabytes_in_a_file_that_is_not_there(call, tmp_path, command) -> None:
    shape = (1 << 59,)
    record = tensor_record("float32", shape, [Chunk(whole(shape), 0, 0, 4 << 59)])
    manifest = Manifest(save_id="s", files=[DataFile("data/s-00000-0.safetensors", 4 << 59)], tensors={"w": record})
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.bcp").write_bytes(encode_manifest(manifest))
    assert ends_well(call, command, tmp_path / "c", {0, 1, 3}) in {"", "missing_file", "not_found"}  # rm deletes it
    assert call("show", tmp_path / "c", "--stats").code == 3


ODD_VALUES = {
    "a tensor that is not there": Ext(9, encode("nowhere")),
    "an unknown type": Ext(99, b""),
    "no dtype": Ext(5, encode("load")),
    "a module for a dtype": Ext(5, encode("nn")),
    "a shape that its bytes have not": Ext(6, encode(["float32", [1 << 40], b""])),
    "a shape below zero": Ext(6, encode(["float32", [0, -5], b""])),
    "a shape of text": Ext(6, encode(["float32", ["a"], b""])),
    "an array of objects": Ext(7, encode(["|O", [1], b"\x00" * 8])),
    "an array of nonsense": Ext(7, encode(["(", [1], b"\x00"])),
    "a huge array": Ext(7, encode(["<f8", [1 << 62, 1 << 62], b"\x00"])),
    "a complex number cut short": Ext(3, b"\x00"),
    "pairs that are none": Ext(2, encode([1, 2])),
    "a key that is a list": Ext(2, encode([[[1], 2]])),
    "a number of no digits": Ext(10, encode("x" * 100)),
    "a number of many digits": Ext(10, encode("9" * 5000)),
    "two values of one name": Ext(2, encode([["a.b", 1], ["a", {"b": 2}]])),
    "a tuple of a number": Ext(1, encode(5)),
    "a size of text": Ext(4, encode(["a"])),
}


@pytest.mark.parametrize("what", sorted(ODD_VALUES))
def test_plain_data_that_nobody_saved(call, small, what) -> None:
    manifest = decode_manifest((small / "manifest.bcp").read_bytes())
    value = encode(ODD_VALUES[what])
    for changed in (replace(manifest, objects={"lr": value}), replace(manifest, rank_objects={"lr": {0: value}})):
        (small / "manifest.bcp").write_bytes(encode_manifest(changed))
        for args in (["show", small, "--objects"], ["diff", small, small]):
            ended = call(*args)
            assert ended.code in {0, 1}
            assert ended.err.count("\n") == (ended.code == 1 and not ended.out)
        assert call("verify", small).code == 0


@pytest.mark.parametrize("command", READ_ALL)
def test_nesting_beyond_all_bounds(call, small, command) -> None:
    deep = b"\x91" * 100_000 + b"\x01"
    for field in ("metadata", "provenance", "objects"):
        body = bytes(unseal((small / "manifest.bcp").read_bytes()))
        fields = msgspec.msgpack.decode(body, type=dict[str, msgspec.Raw])
        fields[field] = msgspec.Raw(b"\x81\xa1x" + deep)
        (small / "manifest.bcp").write_bytes(seal(encode(fields)))
        assert ends_well(call, command, small, {1}) in {"bad_manifest", "limits_exceeded"}
        bcp.save(small, {"w": torch.arange(6.0), "lr": 0.5}, options=bcp.SaveOptions(overwrite=True))


@pytest.mark.parametrize("seed", range(2))
def test_any_bit_of_a_manifest(call, small, seed) -> None:
    """Sealed anew, so that more than the checksum has to notice."""
    chance = random.Random(seed)
    body = bytes(unseal((small / "manifest.bcp").read_bytes()))
    for _ in range(25):
        changed = bytearray(body)
        for _ in range(chance.choice([1, 1, 3])):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        (small / "manifest.bcp").write_bytes(seal(bytes(changed)))
        for command in OF_ONE:
            ended = call(command, *paths_of(command, small))
            assert ended.code in {0, 1, 3}, (command, ended)
        assert call("show", small, "--tree", "--files", "--objects", "--tensor", "*").code in {0, 1, 3}


def test_names_that_fill_a_screen_or_steer_it(call, tmp_path) -> None:
    names = ["x" * 5000, "a\x1b[2J", "b\r\n", "\u202e", "..", "layers.1.", "layers.2."]
    bcp.save(tmp_path / "c", {name: torch.zeros(2) for name in names}, metadata={"\x1b": "\x07"})
    for args in (["show", "--tree"], ["show", "--tensor", "*"], ["verify"], ["timeline"]):
        ended = call(args[0], tmp_path / "c", *args[1:])
        assert ended.code == 0
        assert not {"\x1b", "\r", "\x07", "\u202e"} & set(ended.out)
    bcp.save(tmp_path / "d", {"other": torch.zeros(2)})
    assert "\x1b" not in call("diff", tmp_path / "c", tmp_path / "d").out


@pytest.mark.parametrize("command", ["show", "verify", "diff"])
def test_data_files_that_are_cut_short_grown_or_gone(call, root, command) -> None:
    (path,) = (root / "step_00001000" / "data").iterdir()
    content = path.read_bytes()
    more = {"show": ["--stats"], "diff": [], "verify": []}[command]
    for changed in (b"", content[:100], content[:-1], content + b"x", None):
        path.unlink(missing_ok=True)
        if changed is not None:
            path.write_bytes(changed)
        paths = [root / "step_00001000", root / "step_00000005"] if command == "diff" else [root]
        ended = call(command, *paths, *more, "--json")
        if command == "diff":  # nothing has to be read: the checksums of both manifests are the same
            assert ended.code == 0
        else:
            assert ended.code in {1, 3}


def test_the_module_of_the_wire_has_these_fields() -> None:
    """What the tests above change is there."""
    fields = set(manifest_module._Wire.__struct_fields__)
    assert {"tensor_num_chunks", "tensor_num_dims", "tensor_shapes", "file_num_extents", "file_byte_lengths"} <= fields
    assert Region((0,), (1,)).numel == 1
