"""Small inputs that ask for much: each took seconds, hours or all memory, or ended in an error of Python's own, before
there was a limit that it meets. None of them is large, so each test ends at once, or never.
"""

from __future__ import annotations

import json
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats.hand_pickles import BUILD, NEW, encoded, named
from msgspec.msgpack import Ext, encode

from bytecheckpoint.errors import CheckpointCorruptError, CheckpointError, UnsafeCheckpointError
from bytecheckpoint.formats import manifest_builder, strided_views
from bytecheckpoint.formats.frameworks import dcp_folder
from bytecheckpoint.formats.torch_save import unpickler
from fuzz.memory_store import pack
from fuzz.seeds import deepspeed_folders, folder_files, torch_file
from fuzz.targets import read_distcp_metadata, read_folder, read_header, read_pickle, read_plain_data, read_torch_file

HUGE = b"\x8b" + struct.pack("<i", 1000) + b"\xff" * 999 + b"\x7f"
"""An integer of 2,400 digits in a pickle."""
SAME_HASH = sys.hash_info.modulus
"""All its multiples hash to 0."""


def refused(read: Callable[[bytes], None], data: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(data)
    return caught.value


def tensor_of_shape(shape: bytes) -> bytes:
    """A pickle of a tensor; these instructions push the items of its shape, and of its strides."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n"
    return b"\x80\x02" + HUGE + b"q\x010" + rebuild + b"(" + storage + b"K\x00(" + shape + b"t(" + shape + b"t\x89)tR."


@pytest.mark.parametrize(
    "shape", [b"h\x01" * 8, b"h\x01" * 20_000, b"K\x01" * 65], ids=["huge", "huge and many", "many"]
)
def test_a_shape_is_bounded_before_its_lengths_are_multiplied(shape: bytes) -> None:
    assert refused(read_pickle, tensor_of_shape(shape)).kind == "bad_manifest"


def test_views_of_few_bytes_that_lie_in_millions_of_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_builder, "MAX_PIECES", 1000)
    base = torch.zeros(300, dtype=torch.uint8)
    views = {f"t{start}": base[start:].as_strided((100,), (2,)) for start in range(12)}
    read_torch_file(torch_file(dict(list(views.items())[:10])))
    error = refused(read_torch_file, torch_file(views))
    assert isinstance(error, UnsafeCheckpointError)
    assert (error.kind, "1000 pieces" in error.message) == ("limits_exceeded", True)


def test_a_stacked_tensor_of_too_many_pieces_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object) -> Any:
        raise AssertionError("pieces are made")

    stored = torch.zeros(strided_views.MAX_CHUNKS + 1, 1, 1, dtype=torch.uint8)
    with pytest.warns(UserWarning, match="disabled"):
        dcp.save({"flat": stored}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.mcore_data = {"flat": {"nd_reformulated_orig_global_shape": tuple(stored.shape[:2])}}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    monkeypatch.setattr(dcp_folder, "unstacked", made)
    error = refused(read_folder, pack(folder_files(tmp_path)))
    assert (error.kind, "65537 pieces, because Megatron has stored it in flat parts" in error.message) == (
        "unsupported_version",
        True,
    )


def test_objects_that_share_a_large_dict_and_have_slots_beside_it_are_counted() -> None:
    """Each has all attributes of both dicts, which are copied: a thousand copies of one dict took a minute."""
    shared = encoded({str(number): None for number in range(10_000)})
    kind = named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    one = b"h\x01)" + NEW + b"(h\x00" + encoded({"relative_path": "x", "offset": 0, "length": 1}) + b"t" + BUILD
    listed = shared + b"q\x000" + kind + b"q\x010" + b"](" + one * 80 + b"e"
    error = refused(read_distcp_metadata, b"\x80\x02" + listed + b".")
    assert "more than 67108864 bytes of values" in error.message


def test_objects_that_copy_keys_of_one_hash_are_counted_by_what_it_takes() -> None:
    keys = b"}(" + b"".join(key + b"N" for key in numbers(4095))
    kind = named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    one = b"h\x01)" + NEW + b"(h\x00" + encoded({"relative_path": "x"}) + b"t" + BUILD
    listed = keys + b"uq\x000" + kind + b"q\x010" + b"](" + one * 9 + b"e"
    error = refused(read_distcp_metadata, b"\x80\x02" + listed + b".")
    assert "more than 67108864 bytes of values" in error.message


def test_a_parameter_of_thousands_of_dimensions_is_refused() -> None:
    files = next(deepspeed_folders())
    states = {"module": {}, "param_shapes": [{"a": (1,) * 20_000}], "global_steps": 1}
    files["mp_rank_00_model_states.pt"] = torch_file(states)
    assert refused(read_folder, pack(files)).kind == "bad_manifest"


def numbers(count: int) -> list[bytes]:
    return [b"\x8a\x0a" + (SAME_HASH * number).to_bytes(10, "little") for number in range(1, count + 1)]


def complex_numbers(count: int) -> list[bytes]:
    """The hash of one is that of its real part and a million times that of its imaginary part."""
    pairs = [(1000003.0 * (count - number), float(number)) for number in range(count)]
    return [
        b"cbuiltins\ncomplex\n" + b"".join(b"G" + struct.pack(">d", each) for each in pair) + b"\x86R" for pair in pairs
    ]


def as_tuples(keys: list[bytes]) -> list[bytes]:
    return [key + b"\x85" for key in keys]


MANY = 1500
"""Under the limits that these tests set."""
CRAFTED = {"numbers": numbers(MANY), "complex numbers": complex_numbers(MANY), "tuples": as_tuples(numbers(MANY))}


@pytest.fixture
def _low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 128th and an 8th of the real ones, which such keys reach in half a second."""
    monkeypatch.setattr(unpickler, "MAX_PICKLE_BYTES", unpickler.MAX_PICKLE_BYTES >> 7)
    monkeypatch.setattr(unpickler, "_MAX_COLLIDING", unpickler._MAX_COLLIDING >> 3)


@pytest.mark.usefixtures("_low_limits")
@pytest.mark.parametrize("keys", CRAFTED)
def test_keys_that_all_have_one_hash_are_refused(keys: str) -> None:
    crafted = CRAFTED[keys]
    in_dict = b"\x80\x02}(" + b"".join(key + b"N" for key in crafted) + b"u."
    in_set = b"\x80\x04\x8f(" + b"".join(crafted) + b"\x90."
    in_frozenset = b"\x80\x04(" + b"".join(crafted) + b"\x91."
    ordered = b"\x80\x02ccollections\nOrderedDict\n](" + b"".join(key + b"N\x86" for key in crafted) + b"e\x85R."
    for content in (in_dict, in_set, in_frozenset, ordered):
        assert refused(read_pickle, content).kind == "bad_manifest"


@pytest.mark.parametrize("depth", [64, 65, 70])
def test_numbers_in_lists_that_are_nested_too_deep_are_refused(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    with pytest.raises(UnsafeCheckpointError, match="more than 64 deep") as caught:
        manifest_builder.ManifestBuilder("x").take_apart({"a": value}, on_tensor=lambda *_: None)
    assert caught.value.kind == "limits_exceeded"


def test_values_that_are_kept_under_numbers_of_one_hash_are_refused() -> None:
    kept = b"".join(b"p%d\n" % (number * sys.hash_info.modulus) for number in range(2))
    assert refused(read_pickle, b"\x80\x02N" + kept + b".").kind == "bad_manifest"
    assert refused(read_pickle, b"\x80\x02Np-1\n.").kind == "bad_manifest"


def test_a_malformed_text_of_megabytes_makes_no_message_of_megabytes() -> None:
    error = refused(read_pickle, b"\x80\x02S" + b"x" * (4 << 20) + b"\n.")
    assert error.kind == "bad_manifest"
    assert len(error.message) < 2_000


@pytest.mark.usefixtures("_low_limits")
def test_an_ordered_dict_of_such_keys_is_not_made_again_and_again() -> None:
    pairs = b"ccollections\nOrderedDict\nq\x000](" + b"".join(key + b"N\x86" for key in numbers(400)) + b"eq\x010"
    again = b"h\x00h\x01\x85R0"
    read_pickle(b"\x80\x02" + pairs + again * 2 + b"}.")
    assert refused(read_pickle, b"\x80\x02" + pairs + again * 20 + b"}.").kind == "bad_manifest"


def test_parameters_of_an_optimizer_that_all_have_one_hash_are_plain_data() -> None:
    params = b"](" + b"".join(numbers(20_000)) + b"e"
    optimizer = b"}(X\x05\x00\x00\x00state}X\x0c\x00\x00\x00param_groups](}X\x06\x00\x00\x00params" + params + b"seu."
    read_pickle(b"\x80\x02" + optimizer)


def test_other_keys_may_be_many() -> None:
    value = {"state": dict.fromkeys(range(30_000)), "names": dict.fromkeys(map(str, range(30_000)))}
    value["pairs"] = {(number, "x"): None for number in range(2000)}
    read_pickle(pickle.dumps(value, 2))


def test_places_in_a_folder_of_torch_are_found_by_text() -> None:
    """Offsets are numbers that somebody could have chosen by their hashes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    indices = [MetadataIndex("w", [SAME_HASH * number]) for number in range(1, 4)]
    infos = {index: _StorageInfo("__0_0.distcp", 0, 1) for index in indices}
    error = refused(read_distcp_metadata, pickle.dumps(Metadata({"w": None}, None, infos)))  # type: ignore[dict-item]
    assert error.kind == "bad_manifest"


@pytest.mark.parametrize("shape", [[(1 << 63) - 1] * 60_000, [1] * 65], ids=["huge and many", "many"])
def test_the_shape_of_a_small_tensor_is_bounded(shape: list[int]) -> None:
    assert refused(read_plain_data, encode(Ext(6, encode(["float32", shape, b""])))).kind == "bad_manifest"


@pytest.mark.parametrize("code", [2, 11, 12], ids=["dict", "OrderedDict", "Counter"])
@pytest.mark.parametrize(
    "key", [Ext(10, encode(str(SAME_HASH << 4))), Ext(3, bytes(16)), Ext(1, encode([1])), 0.5, None, b"x"]
)
def test_a_dict_has_keys_as_they_are_written_only(code: int, key: object) -> None:
    read_plain_data(encode(Ext(code, encode([[7, 1], ["x", 2]]))))
    assert refused(read_plain_data, encode(Ext(code, encode([[key, 1]])))).kind == "bad_manifest"


def test_a_header_with_a_number_of_thousands_of_digits_is_refused() -> None:
    """Only a header in which a name may stand twice is looked through in a way that meets the number."""
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
    text = f'{{"a": {entry}, "a": {entry[:-1]}, "x": {"1" * 5000}}}}}'.encode()
    error = refused(read_header, struct.pack("<Q", len(text)) + text)
    assert isinstance(error, CheckpointCorruptError)
    assert error.kind == "bad_manifest"
