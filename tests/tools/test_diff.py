"""`bcp diff`: what it says differs does, nothing else does, and what cannot differ is not read."""

from __future__ import annotations

import math
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from checkpoint_files import data_file, flip
from packed_checkpoints import compress_checkpoint, contents_of, write_checkpoint

import bytecheckpoint as bcp
from bytecheckpoint.region import Region, grid_regions, whole
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.tools.analysis import tensor_diff


def save(path, state, **kwargs):
    bcp.save(path, state, **kwargs)
    return path


def laid_out(folder, tensors, parts):
    """A checkpoint of these tensors, each cut into parts of these lengths that go round over three files."""
    files = [[], [], []]
    for fqn, tensor in tensors.items():
        part = parts.get(fqn)
        regions = [whole(tuple(tensor.shape))] if part is None else grid_regions(tuple(tensor.shape), part)
        for number, content in enumerate(contents_of(fqn, tensor, regions, "none")):
            files[number % 3].append(content)
    write_checkpoint(folder, [contents for contents in files if contents])
    return folder


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the data files that are read, as they are read."""
    names: list[str] = []
    read_into = LocalStore.read_into

    def read(self, name, byte_offset, buffer, **more):
        if name.endswith(".safetensors"):
            names.append(name)
        return read_into(self, name, byte_offset, buffer, **more)

    monkeypatch.setattr(LocalStore, "read_into", read)
    return names


def test_a_checkpoint_is_the_same_as_itself_without_a_read(call, saved_root, reads) -> None:
    ended = call("diff", saved_root / "step_00000005", saved_root / "step_00001000")
    assert ended.code == 0
    assert "the same: " in ended.out
    result = call("diff", saved_root, saved_root, "--json").json
    assert result["same"]
    assert (result["tensors"], result["objects"], result["only_in_a"], result["only_in_b"]) == ([], [], [], [])
    assert result["num_tensors"] == len(bcp.open(saved_root).keys())
    assert result["read_num_bytes"] == 0
    assert result["same_checksum_num_bytes"] > 4 << 20
    assert reads == []


def test_everything_that_differs_is_told(call, tmp_path) -> None:
    a = {
        "model": {"same": torch.arange(6.0), "w": torch.zeros(3, 4), "shape": torch.zeros(2, 3), "kind": torch.ones(2)},
        "gone": torch.ones(1),
        "lr": 0.1,
        "name": "a",
        "only": 1,
    }
    b = {
        "model": {"same": torch.arange(6.0), "w": torch.zeros(3, 4), "shape": torch.zeros(3, 2)},
        "new": torch.ones(1),
        "lr": 0.2,
        "name": "a",
    }
    b["model"]["kind"] = torch.ones(2, dtype=torch.float64)
    b["model"]["w"][1, 2], b["model"]["w"][2, 0] = -2.0, math.nan
    ended = call("diff", save(tmp_path / "a", a), save(tmp_path / "b", b), "--json")
    assert ended.code == 1
    result = ended.json
    assert not result["same"]
    assert (result["only_in_a"], result["only_in_b"]) == (["gone"], ["new"])
    found = {tensor["fqn"]: tensor for tensor in result["tensors"]}
    assert {fqn: tensor["problems"] for fqn, tensor in found.items()} == {
        "model.w": ["values"],
        "model.shape": ["shape"],
        "model.kind": ["dtype"],
    }
    values = found["model.w"]
    assert (values["num_differing"], values["num_not_finite"], values["num_elements"]) == (2, 1, 12)
    assert (values["max_abs"], values["max_rel"], values["first_index"]) == (2.0, 1.0, [1, 2])
    assert (values["first_a"], values["first_b"]) == ("0.0", "-2.0")
    assert (found["model.kind"]["dtype_a"], found["model.kind"]["dtype_b"]) == ("float32", "float64")
    assert found["model.kind"]["num_differing"] == 0
    assert (found["model.shape"]["shape_a"], found["model.shape"]["shape_b"]) == ([2, 3], [3, 2])
    objects = {item["fqn"]: item for item in result["objects"]}
    assert objects.keys() == {"lr", "only"}
    assert (objects["lr"]["a"], objects["lr"]["b"], objects["lr"]["only_in"]) == (0.1, 0.2, None)
    assert (objects["only"]["only_in"], objects["only"]["a"]) == ("a", 1)
    out = call("diff", tmp_path / "a", tmp_path / "b").out
    assert "DIFFERENT: 3 tensors differ, 1 tensor only in A, 1 tensor only in B, 2 plain values differ" in out
    assert "[1, 2]" in out


LAYOUTS = [
    {},
    {"m": (7, 90), "v": (333,)},
    {"m": (40, 11)},
    {"m": (1, 45), "v": (100,), "t": (2, 3, 1)},
]


@pytest.mark.parametrize(("of_a", "of_b"), list(product(range(4), range(4))))
def test_layouts_do_not_matter(call, tmp_path, of_a, of_b) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "m": torch.randn(40, 90, generator=generator).bfloat16(),
        "v": torch.randn(1000, generator=generator),
        "t": torch.randint(0, 99, (4, 6, 2), generator=generator),
        "s": torch.tensor(3.5),
        "e": torch.empty(0, 3),
    }
    a = laid_out(tmp_path / "a", tensors, LAYOUTS[of_a])
    assert call("diff", a, laid_out(tmp_path / "same", tensors, LAYOUTS[of_b]), "--json").json["same"]
    changed = {fqn: tensor.clone() for fqn, tensor in tensors.items()}
    changed["m"][33, 17] += 8
    changed["m"][20, 89] += 4
    changed["v"][999] = -1.0
    changed["t"][3, 5, 1] += 1
    changed["s"] += 1
    found = call("diff", a, laid_out(tmp_path / "b", changed, LAYOUTS[of_b]), "--json").json
    assert {tensor["fqn"]: (tensor["num_differing"], tensor["first_index"]) for tensor in found["tensors"]} == {
        "m": (2, [20, 89]),
        "v": (1, [999]),
        "t": (1, [3, 5, 1]),
        "s": (1, []),
    }
    by_name = {tensor["fqn"]: tensor["max_abs"] for tensor in found["tensors"]}
    assert by_name["m"] == (changed["m"].double() - tensors["m"].double()).abs().max().item()


def test_small_tiles_in_any_number_of_threads_give_the_same(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tensor_diff, "_TILE_BYTES", 64)
    tensors = {"m": torch.arange(800.0).view(20, 40), "v": torch.arange(99.0)}
    changed = {"m": tensors["m"].clone(), "v": tensors["v"].clone()}
    changed["m"][19, 39] = changed["m"][3, 30] = -1.0
    changed["v"][7] = 0.0
    a, b = laid_out(tmp_path / "a", tensors, {"m": (7, 40)}), laid_out(tmp_path / "b", changed, {"m": (20, 7)})
    results = [call("diff", a, b, "--json", "--threads", threads).json for threads in (1, 5)]
    for result in results:
        firsts = {tensor["fqn"]: tensor["first_index"] for tensor in result["tensors"]}
        assert firsts == {"m": [3, 30], "v": [7]}
        assert [tensor["max_abs"] for tensor in result["tensors"]] == [800.0, 7.0]


def test_only_chunks_whose_checksums_differ_are_read(call, tmp_path, reads) -> None:
    tensor = torch.arange(3000.0).view(3, 1000)
    changed = tensor.clone()
    changed[1, 5] = 0.0
    a, b = (laid_out(tmp_path / name, {"w": t}, {"w": (1, 1000)}) for name, t in (("a", tensor), ("b", changed)))
    result = call("diff", a, b, "--json").json
    assert result["tensors"][0]["first_index"] == [1, 5]
    assert (result["read_num_bytes"], result["same_checksum_num_bytes"]) == (2 * 4000, 2 * 4000)
    assert set(reads) == {"data/packed-00001-0.safetensors"}


def test_neighbours_in_an_extent_that_differ_are_read_and_found_the_same(call, tmp_path) -> None:
    a = save(tmp_path / "a", {"x": torch.zeros(10), "y": torch.zeros(10)})
    b = save(tmp_path / "b", {"x": torch.zeros(10), "y": torch.ones(10)})
    result = call("diff", a, b, "--json").json
    assert [tensor["fqn"] for tensor in result["tensors"]] == ["y"]


def test_compressed_checkpoints_are_compared_by_their_values(call, tmp_path) -> None:
    tensor = torch.zeros(700, 900)
    a = save(tmp_path / "a", {"w": tensor})
    b = shutil.copytree(a, tmp_path / "b")
    compress_checkpoint(b)
    result = call("diff", a, b, "--json").json
    assert result["same"]
    assert result["read_num_bytes"] == 2 * 4 * 700 * 900
    assert call("diff", b, b, "--json").json["read_num_bytes"] == 0


def test_tolerances(call, tmp_path) -> None:
    a = save(tmp_path / "a", {"w": torch.tensor([1.0, 0.0]), "lr": 1.0, "betas": (0.5, 0.25), "n": 1})
    b = save(tmp_path / "b", {"w": torch.tensor([1.125, -0.0]), "lr": 1.125, "betas": (0.5, 0.375), "n": 1})
    assert call("diff", a, b).code == 1
    ended = call("diff", a, b, "--atol", 0.125)
    assert ended.code == 0
    assert "within the tolerance 1 tensor differs by at most 0.125 (relative 0.1111)" in ended.out
    result = call("diff", a, b, "--atol", 0.125, "--json").json
    assert (result["same"], result["atol"], result["rtol"]) == (True, 0.125, 0.0)
    assert [(tensor["fqn"], tensor["problems"]) for tensor in result["tensors"]] == [("w", [])]
    assert call("diff", a, b, "--rtol", 0.12).code == 1
    assert call("diff", a, b, "--rtol", 0.34).code == 0
    zeros = call("diff", a, b, "--atol", 0, "--json").json
    assert zeros["tensors"][0]["num_differing"] == 1


def test_dtypes_can_be_ignored(call, tmp_path) -> None:
    values = torch.tensor([1.0, 0.1])
    a, b = save(tmp_path / "a", {"w": values}), save(tmp_path / "b", {"w": values.bfloat16()})
    (tensor,) = call("diff", a, b, "--json").json["tensors"]
    assert (tensor["problems"], tensor["num_differing"]) == (["dtype", "values"], 1)
    (tensor,) = call("diff", a, b, "--ignore-dtype", "--json").json["tensors"]
    assert tensor["problems"] == ["values"]
    assert call("diff", a, b, "--ignore-dtype", "--rtol", 0.01).code == 0


def test_globs_choose_names(call, tmp_path) -> None:
    a = save(tmp_path / "a", {"model": {"x": torch.zeros(2), "y": torch.zeros(2)}, "epoch": 1})
    b = save(tmp_path / "b", {"model": {"x": torch.zeros(2), "y": torch.ones(2)}, "epoch": 2})
    assert call("diff", a, b, "--include", "model.x").code == 0
    assert call("diff", a, b, "--exclude", "*.y", "--exclude", "epoch").code == 0
    result = call("diff", a, b, "--include", "model.*", "--json").json
    assert ([t["fqn"] for t in result["tensors"]], result["objects"], result["num_objects"]) == (["model.y"], [], 0)


def test_globs_that_take_no_name_do_not_pass_for_the_same(call, tmp_path) -> None:
    a = save(tmp_path / "a", {"model": {"x": torch.zeros(2)}, "epoch": 1})
    b = save(tmp_path / "b", {"model": {"x": torch.ones(2)}, "epoch": 2})
    assert call("convert", a, tmp_path / "hf", "--to", "hf").code == 0
    of_source = ["--to", "hf", "--include", "model.*"]  # names in the export have no `model.`
    for other, globs in ((b, ["--include", "modle.*"]), (b, ["--exclude", "*"]), (tmp_path / "hf", of_source)):
        ended = call("diff", a, other, *globs)
        assert (ended.code, ended.out) == (3, "")
        assert "nothing was compared" in ended.err
    assert call("diff", a, b, "--include", "modle.*", "--json").json["error"]["kind"] == "not_found"


def test_tied_tensors_are_compared_under_each_name(call, tmp_path) -> None:
    tied = torch.ones(3)
    module = torch.nn.Module()
    module.a = module.b = torch.nn.Parameter(tied)
    other = torch.nn.Module()
    other.a, other.b = torch.nn.Parameter(tied.clone()), torch.nn.Parameter(tied * 2)
    a, b = save(tmp_path / "a", {"m": module}), save(tmp_path / "b", {"m": other})
    result = call("diff", a, b, "--json").json
    assert [tensor["fqn"] for tensor in result["tensors"]] == ["m.b"]
    assert (result["only_in_a"], result["only_in_b"]) == ([], [])


def test_values_of_single_ranks_have_the_rank(call, tmp_path) -> None:
    large = torch.zeros(1 << 16)
    a = save(tmp_path / "a", {"rng": bcp.RankLocal({"seed": 1, "state": large})})
    b = save(tmp_path / "b", {"rng": bcp.RankLocal({"seed": 2, "state": large + 1})})
    assert call("diff", a, a, "--json").json["same"]
    result = call("diff", a, b, "--json").json
    assert [(item["fqn"], item["rank"]) for item in result["objects"]] == [("rng.seed", 0), ("rng.state", 0)]
    assert (result["only_in_a"], result["only_in_b"]) == ([], [])
    assert "rng.state@" in result["objects"][1]["a"]


def test_nan_in_plain_data_is_the_same_as_nan(call, tmp_path) -> None:
    a, b = (save(tmp_path / name, {"loss": math.nan, "history": [1.0, math.nan]}) for name in "ab")
    assert call("diff", a, b).code == 0


def test_damage_is_one_line(call, tmp_path, root) -> None:
    other = shutil.copytree(root, tmp_path / "other")
    flip(other / "step_00001000" / "manifest.bcp", 60)
    ended = call("diff", root, other)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    ended = call("diff", root, tmp_path / "nowhere")
    assert (ended.code, ended.err.count("\n")) == (3, 1)


def test_damaged_values_are_refused(call, tmp_path) -> None:
    a, b = (save(tmp_path / name, {"w": torch.full((1 << 18,), float(n))}) for n, name in enumerate("ab"))
    (path,) = (b / "data").iterdir()
    flip(path, path.stat().st_size - 1)
    ended = call("diff", a, b, "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (1, "checksum")
    path.unlink()
    assert (call("diff", a, b, "--json").json["error"]["kind"]) == "missing_file"
    path.write_bytes(b"")
    assert (call("diff", a, b, "--json").json["error"]["kind"]) == "truncated"


def test_a_step_under_both_roots(call, saved_root) -> None:
    result = call("diff", saved_root, saved_root, "--step", 5, "--json").json
    assert (result["a"]["step"], result["b"]["step"]) == (5, 5)
    assert data_file(saved_root, 5).exists()


def test_chunks_that_overlap_or_leave_holes_are_refused(call, tmp_path) -> None:
    tensor = torch.arange(8.0)
    good = laid_out(tmp_path / "good", {"w": tensor}, {})
    halves = [Region((0,), (4,)), Region((2,), (4,))]
    write_checkpoint(tmp_path / "bad", [contents_of("w", tensor, halves, "none")])
    ended = call("diff", good, tmp_path / "bad", "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (1, "coverage")


def test_interrupting_ends_at_once(call, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tensor_diff, "_TILE_BYTES", 64)
    tensors = {"w": torch.arange(4000.0)}
    a, b = laid_out(tmp_path / "a", tensors, {}), laid_out(tmp_path / "b", tensors, {"w": (7,)})
    started: list[int] = []

    def interrupt(*_args):
        started.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(tensor_diff, "find_difference", interrupt)
    ended = call("diff", a, b)
    assert (ended.code, ended.err) == (130, "error: interrupted; no committed checkpoint was changed\n")
    assert len(started) <= 4


def test_the_same_bytes_elsewhere_in_a_file_are_not_read(call, tmp_path, reads) -> None:
    tensors = {"before": torch.zeros(5000), "w": torch.arange(600_000.0), "x": torch.ones(9)}
    a = laid_out(tmp_path / "a", {fqn: tensors[fqn] for fqn in ("before", "w", "x")}, {"w": (300_000,)})
    b = laid_out(tmp_path / "b", {fqn: tensors[fqn] for fqn in ("w", "x")}, {"w": (300_000,)})
    result = call("diff", a, b, "--exclude", "before", "--json").json
    assert result["same"]
    assert (result["read_num_bytes"], reads) == (0, [])
    assert result["same_checksum_num_bytes"] == 4 * 600_009


def test_numbers_in_plain_data_are_compared_within_the_tolerance_too(call, tmp_path) -> None:
    def state(by: float) -> dict[str, object]:
        table = np.array([1.0, 2.0 + by], np.float32)
        return {"loss": 1.0 + by, "list": [1.0 + by, 2], "table": table, "inner": [{"rate": 3.0 + by}], "name": "a"}

    a, b = save(tmp_path / "a", {"run": state(0.0)}), save(tmp_path / "b", {"run": state(0.25)})
    assert call("diff", a, b, "--atol", 0.5).code == 0
    differing = {"run.loss", "run.list", "run.table", "run.inner"}
    for options in ([], ["--atol", 0.125]):
        result = call("diff", a, b, *options, "--json")
        assert (result.code, {item["fqn"] for item in result.json["objects"]}) == (1, differing)
    other = save(tmp_path / "other", {"run": {**state(0.0), "list": [1, 2], "table": np.ones(3, np.float32)}})
    found = call("diff", a, other, "--atol", 9, "--json").json["objects"]
    assert {item["fqn"] for item in found} == {"run.list", "run.table"}  # of another type, of another shape
