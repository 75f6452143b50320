"""Folders that torch.distributed.checkpoint wrote in one process; those of many are in tests/distributed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import Touch, assert_same
from plain_leaves import plain_leaves
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: dict[str, Any], path: Path) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.randn(5, 3), "bias": torch.zeros(3, dtype=torch.bfloat16)},
        "nested": {"list": [torch.ones(2), 3, {"deep": torch.tensor(1.5)}], "name": "x", "tuple": (1, 2)},
        "rng": torch.get_rng_state(),
        "step": 7,
        "empty": {},
        "pair": (torch.arange(3), "in an object"),
    }


def test_tensors_and_plain_data_are_read_in_place(tmp_path: Path) -> None:
    expected = state()
    checkpoint = bcp.open(save(expected, tmp_path / "dcp"))
    found = checkpoint.state_dict()
    assert torch.equal(found["model.weight"], expected["model"]["weight"])
    assert torch.equal(found["model.bias"], expected["model"]["bias"])
    assert torch.equal(found["nested.list.2.deep"], torch.tensor(1.5))
    assert torch.equal(found["pair.0"], torch.arange(3))
    assert torch.equal(found["rng"], expected["rng"])
    assert checkpoint.info.format == "torch.distributed.checkpoint"
    objects = plain_leaves(checkpoint)
    assert (objects["step"], objects["nested.name"], objects["nested.list.1"]) == (7, "x", 3)
    assert (objects["nested.tuple"], objects["pair.1"]) == ((1, 2), "in an object")


def test_a_dict_that_was_saved_whole_keeps_its_numbers_as_keys(tmp_path: Path) -> None:
    """It came back as a list."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    names = {0: "cat", 1: "dog"}
    dcp.save({"w": torch.ones(2), "names": names}, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert bcp.load_tree(tmp_path)["names"] == names


def test_a_state_is_filled_from_it(tmp_path: Path) -> None:
    expected = state()
    save(expected, tmp_path / "dcp")
    loaded: dict[str, Any] = {
        "model": {"weight": torch.zeros(5, 3), "bias": torch.ones(3, dtype=torch.bfloat16)},
        "nested": {"list": [torch.zeros(2), 0, {"deep": torch.tensor(0.0)}], "name": "", "tuple": (0, 0)},
        "step": 0,
    }
    bcp.load(tmp_path / "dcp", loaded)
    assert loaded["step"] == 7
    assert loaded["nested"]["list"][1] == 3
    assert loaded["nested"]["tuple"] == (1, 2)
    assert_same(loaded["model"], expected["model"])


def test_a_transposed_parameter_is_right(tmp_path: Path) -> None:
    weight = torch.arange(35).reshape(5, 7).t()
    assert torch.equal(bcp.open(save({"w": weight}, tmp_path / "dcp"))["w"][:], weight)


def test_extra_state_goes_back_into_its_module(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    saved, loaded = torch.nn.Sequential(Counting(2, 2)), torch.nn.Sequential(Counting(2, 2))
    saved[0].count = 5
    save({"model": saved.state_dict()}, tmp_path / "dcp")
    bcp.load(tmp_path / "dcp", {"model": loaded})
    assert loaded[0].count == 5
    torch.save(saved.state_dict(), tmp_path / "bare.pt")
    loaded[0].count = 0
    bcp.load(tmp_path / "bare.pt", {"model": loaded})
    assert loaded[0].count == 5


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = metadata_of(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def info_of(metadata: Any, fqn: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


def escape(metadata: Any) -> None:
    info_of(metadata, "w").relative_path = "../../etc/passwd"


def rename(metadata: Any) -> None:
    info_of(metadata, "w").relative_path = "gone.distcp"


def move(metadata: Any) -> None:
    info_of(metadata, "w").offset += 8


def move_far(metadata: Any) -> None:
    info_of(metadata, "w").offset = 1 << 50


def negative(metadata: Any) -> None:
    info_of(metadata, "w").offset = -5


def other_shape(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size([9, 9])


def impossible_shape(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = (1 << 70, 0)
    metadata.state_dict_metadata["w"].chunks = []


def deep_path(metadata: Any) -> None:
    metadata.planner_data["w"] = ("w", *[0] * 50_000)
    other_dtype(metadata)


def other_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int8


def swap(metadata: Any) -> None:
    first, second = info_of(metadata, "w"), info_of(metadata, "v")
    first.offset, second.offset, first.length, second.length = second.offset, first.offset, second.length, first.length


def without_places(metadata: Any) -> None:
    metadata.storage_data = {}


def extension(metadata: Any) -> None:
    info_of(metadata, "w").transform_descriptors = ["zstd"]


DAMAGE = {
    escape: "path_escape",
    rename: "missing_file",
    move: "bad_manifest",
    move_far: "truncated",
    negative: "bad_manifest",
    other_shape: "bad_manifest",
    impossible_shape: "bad_manifest",
    deep_path: "bad_manifest",
    other_dtype: "bad_manifest",
    swap: "bad_manifest",
    without_places: "bad_manifest",
    extension: "unsupported_version",
}


@pytest.mark.parametrize("change", DAMAGE, ids=lambda change: change.__name__)
def test_metadata_that_does_not_fit_its_files_is_one_clear_error(tmp_path: Path, change: Callable[[Any], None]) -> None:
    folder = save({"w": torch.randn(4, 2), "v": torch.randn(3)}, tmp_path / "dcp")
    rewrite(folder, change)
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(folder)
    assert caught.value.kind == DAMAGE[change]
    assert caught.value.message.startswith(str(folder / ".metadata" if change is escape else folder))


def test_metadata_that_names_anything_else_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = save({"w": torch.randn(4, 2)}, tmp_path / "dcp")
    marker = tmp_path / "marker"
    rewrite(folder, lambda metadata: setattr(metadata, "planner_data", Touch(marker)))
    with pytest.raises(bcp.UnsafeCheckpointError) as caught:
        bcp.open(folder)
    assert caught.value.kind == "pickle_refused"
    assert not marker.exists()


def test_the_metadata_of_older_releases_of_torch_is_read(tmp_path: Path) -> None:
    """They had no descriptors, no version and no description of the storage, and another class for properties."""
    expected = {"w": torch.randn(4, 2), "b": torch.ones(3, dtype=torch.bfloat16)}
    folder = save({**expected, "n": 3}, tmp_path / "dcp")

    def age(metadata: Any) -> None:
        for name in ("storage_meta", "version"):
            vars(metadata).pop(name, None)
        for info in metadata.storage_data.values():
            vars(info).pop("transform_descriptors", None)
        for index in metadata.storage_data:
            vars(index).pop("index", None)
        for name in expected:
            description = metadata.state_dict_metadata[name]
            description.properties = OldProperties(**vars(description.properties))

    rewrite(folder, age)
    checkpoint = bcp.open(folder)
    assert_same(checkpoint.state_dict(), expected)
    assert plain_leaves(checkpoint)["n"] == 3


def test_an_object_of_a_class_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    folder = save({"w": torch.randn(4, 2), "x": Touch(tmp_path / "marker")}, tmp_path / "dcp")
    with pytest.raises(bcp.UnsafeCheckpointError):
        bcp.open(folder)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_files_that_are_cut_are_one_clear_error(tmp_path: Path, name: str) -> None:
    folder = save({"w": torch.randn(40, 2), "n": {"a": 1}}, tmp_path / "dcp")
    content = (folder / name).read_bytes()
    for length in [0, 1, 50, len(content) // 2, len(content) - 1]:
        (folder / name).write_bytes(content[:length])
        with pytest.raises(bcp.CheckpointError) as caught:
            bcp.open(folder)
        assert caught.value.kind in {"truncated", "bad_manifest"}
    (folder / name).unlink()
    with pytest.raises(bcp.CheckpointError):
        bcp.open(folder)
