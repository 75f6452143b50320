"""Safetensors files of the real library, alone, with an index and in parts; and what hostile ones get."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_files import assert_same
from safetensors.torch import save_file, save_model

import bytecheckpoint as bcp

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)
MIB = 1 << 20


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def of_all_dtypes() -> dict[str, torch.Tensor]:
    tensors = {str(dtype): torch.arange(12).to(torch.float32).to(dtype).reshape(3, 4) for dtype in DTYPES}
    return {**tensors, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}


def test_a_file_of_every_dtype_is_read_by_its_path_and_by_its_folder(tmp_path: Path) -> None:
    save_file(of_all_dtypes(), tmp_path / "model.safetensors", {"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = bcp.open(path)
        assert_same(checkpoint.state_dict(), of_all_dtypes())
        assert checkpoint.info.format == "safetensors"
        assert checkpoint.info.metadata == {"format": "pt"}
        assert (checkpoint.info.save_id, checkpoint.info.world_size, checkpoint.info.created_at) == ("", None, None)
        assert checkpoint.info.path == str(path)
    assert checkpoint["torch.int64"][1:, 2].tolist() == [6, 10]


def test_a_model_is_loaded_though_the_file_has_no_name_for_it(tmp_path: Path) -> None:
    saved, loaded = Model(), Model()
    save_model(saved, str(tmp_path / "model.safetensors"))
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.fill_(7)
    report = bcp.load(tmp_path, {"model": loaded})
    assert_same(dict(loaded.state_dict()), dict(saved.state_dict()))
    assert loaded.head.weight is loaded.embed.weight
    assert report.path == str(tmp_path)
    untied = Model()
    untied.head.weight = torch.nn.Parameter(torch.zeros(7, 4))
    bcp.load(tmp_path, {"anything": untied})
    assert_same(dict(untied.state_dict()), dict(saved.state_dict()))


def test_the_format_in_the_metadata_is_no_name_of_a_tensor(tmp_path: Path) -> None:
    save_file({"pt": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert list(bcp.open(tmp_path).state_dict()) == ["pt"]


def test_a_part_of_the_model_is_found_under_the_name_that_it_has_there(tmp_path: Path) -> None:
    saved, part = Model(), Model().model
    save_model(saved, str(tmp_path / "model.safetensors"))
    bcp.load(tmp_path, {"model": part})
    assert_same(dict(part.state_dict()), dict(saved.model.state_dict()))


def test_key_map_and_globs_work_as_with_any_checkpoint(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    linear = torch.nn.Linear(3, 2, bias=False)
    bcp.load(tmp_path, {"model": linear}, include="a.*", key_map={"a.weight": "weight"})
    assert torch.equal(linear.weight, torch.ones(2, 3))
    bcp.load(tmp_path, {"model": linear}, include="b.*", key_map=[("^b", "model")])
    assert torch.equal(linear.weight, torch.zeros(2, 3))


def test_what_include_asks_for_and_the_file_lacks_is_said_below_the_entrys_name(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(2, 3), "1.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(tmp_path, {"model": model}, include="0.*")
    assert caught.value.kind == "missing_key"
    assert "model.0.bias" in caught.value.message
    assert "model.1.bias" not in caught.value.message
    bcp.load(tmp_path, {"model": model}, include="0.*", exclude="0.bias")
    assert torch.equal(model[0].weight, torch.ones(2, 3))


def test_what_does_not_fit_is_said_with_the_names_of_the_file(tmp_path: Path) -> None:
    save_file({"weights": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(tmp_path, {"model": torch.nn.Linear(3, 2, bias=False)})
    assert caught.value.kind == "missing_key"


@pytest.mark.parametrize("is_of_other_format", [False, True])
def test_names_that_transformers_may_have_given_a_file_are_told(tmp_path: Path, is_of_other_format: Any) -> None:
    """As in those of ViT, LLaVA and Gemma 3."""
    tensors = {"encoder.layer.0.weight": torch.ones(2, 3)}
    if is_of_other_format:
        torch.save(tensors, tmp_path / "x")
    else:
        save_file(tensors, tmp_path / "x")
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(tmp_path / "x", {"model": torch.nn.Linear(3, 2, bias=False)})
    assert ("load such files with it, then save that model" in caught.value.message) != is_of_other_format


def write_indexed(folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    tensors = {f"layers.{index}.weight": torch.randn(5, 3) for index in range(4)}
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    write_index(folder, files)
    return tensors


def write_index(folder: Path, files: dict[str, str]) -> None:
    content = {"metadata": {"total_size": 240}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_an_index_says_which_files_belong_to_a_checkpoint(tmp_path: Path) -> None:
    tensors = write_indexed(tmp_path)
    save_file({"layers.0.weight": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    assert_same(bcp.open(tmp_path).state_dict(), tensors)
    assert_same(bcp.open(tmp_path / "model.safetensors.index.json").state_dict(), tensors)


def test_files_without_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = write_indexed(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same(bcp.open(tmp_path).state_dict(), tensors)


def test_a_snapshot_of_the_hub_cache_is_read_through_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    tensors = {"weight": torch.randn(3, 2)}
    save_file(tensors, blobs / "e3b0c442")
    (snapshot / "model.safetensors").symlink_to("../../blobs/e3b0c442")
    for path in (snapshot, snapshot / "model.safetensors", f"{snapshot}/../{snapshot.name}"):
        assert_same(bcp.open(path).state_dict(), tensors)
    monkeypatch.chdir(snapshot)
    for path in (".", "./", "model.safetensors", f"../{snapshot.name}"):
        assert_same(bcp.open(path).state_dict(), tensors)


def test_a_link_out_of_any_other_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"weight": torch.ones(2)}, tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to("../elsewhere")
    with pytest.raises(bcp.UnsafeCheckpointError) as caught:
        bcp.open(folder)
    assert caught.value.kind == "path_escape"


def raw_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32", **others: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **others}


def sharding(text: str) -> dict[str, Any]:
    return {"__metadata__": {"DCP_SHARDING_INFO": text}}


ONE_NAME_TWICE = (
    b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
)
HOSTILE = {
    "empty": (b"", "truncated"),
    "shorter than a header": (raw_file(b"{" + b" " * 50)[:30], "truncated"),
    "huge header": (struct.pack("<Q", 1 << 40) + b"{}", "limits_exceeded"),
    "no JSON": (raw_file(b"{nonsense}"), "bad_manifest"),
    "overlapping": (raw_file({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)), "bad_manifest"),
    "hole": (raw_file({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, bytes(20)), "bad_manifest"),
    "wrong length": (raw_file({"a": entry(0, 8, [3])}, bytes(8)), "bad_manifest"),
    "unknown dtype": (raw_file({"a": entry(0, 8, [2], dtype="F9")}, bytes(8)), "bad_manifest"),
    "negative": (raw_file({"a": entry(0, 8, [-2])}, bytes(8)), "bad_manifest"),
    "too many elements": (raw_file({"a": entry(0, 8, [1 << 40, 1 << 40])}, bytes(8)), "bad_manifest"),
    "cut short": (raw_file({"a": entry(0, 8, [2])}, bytes(7)), "truncated"),
    "longer than it says": (raw_file({"a": entry(0, 8, [2])}, bytes(9)), "bad_manifest"),
    "a name twice": (raw_file(ONE_NAME_TWICE, bytes(8)), "bad_manifest"),
    "deep": (raw_file(b'{"a":' + b"[" * 100_000), "bad_manifest"),
    "sharded nonsense": (
        raw_file({**sharding("[1]"), "a": entry(0, 8, [2])}, bytes(8)),
        "bad_manifest",
    ),
    "sharded out of range": (
        raw_file({**sharding('{"a":{"saved_offsets":[-4]}}'), "a": entry(0, 8, [2])}, bytes(8)),
        "bad_manifest",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_clear_error(tmp_path: Path, case: str) -> None:
    content, kind = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(tmp_path)
    assert caught.value.kind == kind
    assert str(tmp_path / "model.safetensors") in caught.value.message


INDICES = {
    "leads out": ({"weight_map": {"layers.0.weight": "../secret.safetensors"}}, "path_escape"),
    "absolute": ({"weight_map": {"layers.0.weight": "/etc/passwd"}}, "path_escape"),
    "file that is not there": ({"weight_map": {"layers.0.weight": "other.safetensors"}}, "missing_file"),
    "tensor that is not there": ({"weight_map": {"x": "model-00001-of-00002.safetensors"}}, "bad_manifest"),
    "no weight_map": ({"metadata": {}}, "bad_manifest"),
    "no names": ({"weight_map": {"layers.0.weight": 3}}, "bad_manifest"),
    "no JSON": (b"{", "bad_manifest"),
    "a name twice": (b'{"weight_map": {"a": "x", "a": "y"}}', "bad_manifest"),
    "deep": (b"[" * 100_000, "bad_manifest"),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_hostile_index_is_one_clear_error(tmp_path: Path, case: str) -> None:
    write_indexed(tmp_path)
    content, kind = INDICES[case]
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(tmp_path)
    assert caught.value.kind == kind
    assert caught.value.message.startswith(str(tmp_path))


def test_two_checkpoints_in_one_folder_are_told_apart_by_path(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"weight": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.open(tmp_path)
    assert caught.value.kind == "conflict"
    assert list(bcp.open(tmp_path / "a.safetensors")) == ["weight"]
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"weight": f"{name}.safetensors"}})
        )
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.open(tmp_path)
    assert caught.value.kind == "conflict"
    assert list(bcp.open(tmp_path / "b.safetensors.index.json")) == ["weight"]
