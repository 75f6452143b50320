"""What `bcp convert` refuses to write over or to lose, and what it tells of what a target cannot hold."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats.foreign_files import assert_same
from safetensors.torch import load_file, save_file

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"w": torch.arange(8, dtype=torch.float32)}
FILES = {"bcp": "manifest.bcp", "hf": "model.safetensors", "dcp": ".metadata"}


def files_in(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("to", FILES)
def test_nothing_is_written_beside_steps(call, tmp_path, to) -> None:
    """A manifest there would hide them all."""
    save_file(STATE, tmp_path / "a.safetensors")
    bcp.save(tmp_path / "run", STATE, step=5)
    before = files_in(tmp_path / "run")
    for options in ((), ("--overwrite",)):
        ended = call("convert", tmp_path / "a.safetensors", tmp_path / "run", "--to", to, "--json", *options)
        assert (ended.code, ended.json["error"]["kind"]) == (2, "exists")
        assert "holds steps, as step_00000005" in ended.json["error"]["message"]
    assert files_in(tmp_path / "run") == before


def test_nothing_is_written_as_a_step_below_a_checkpoint(call, tmp_path) -> None:
    bcp.save(tmp_path / "run", {"x": torch.ones(2)})
    ended = call("convert", tmp_path / "run", tmp_path / "run" / "step_00000001", "--to", "bcp")
    assert ended.code == 2
    assert "would be a step below it, which would hide it; nothing was written" in ended.err


def test_a_file_of_torch_needs_a_name(call, tmp_path) -> None:
    bcp.save(tmp_path / "run", {"x": torch.ones(2)})
    ended = call("convert", tmp_path / "run", f"{tmp_path}/out/", "--to", "torch")
    assert ended.code == 2
    assert "names no file" in ended.err


def test_a_link_to_files_that_lie_outside_of_its_folder_is_refused_with_where_to_write_it(call, tmp_path) -> None:
    """As in the cache of Hugging Face, whose snapshots are links to blobs beside them."""
    snapshot, blobs = tmp_path / "model" / "snapshots" / "a1", tmp_path / "model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"x": torch.ones(2)}, blobs / "b")
    (snapshot / "model.safetensors").symlink_to("../../blobs/b")
    ended = call("convert", snapshot, snapshot, "--to", "bcp", "--link")
    assert ended.code == 1
    assert f"{snapshot} cannot be a link to these files: the name 'model.safetensors' was refused" in ended.err
    assert "Write the link into the folder that really holds the files" in ended.err


def test_a_link_belongs_into_the_folder_of_its_step(call, tmp_path) -> None:
    bcp.save(tmp_path / "run", STATE, step=5)
    ended = call("convert", tmp_path / "run", tmp_path / "run", "--to", "bcp", "--link")
    assert ended.code == 2
    assert f"or the folder of a step, as {tmp_path}/run/step_00000005" in ended.err
    bcp.save(tmp_path / "run", {"w": STATE["w"] + 1}, step=6)
    assert torch.equal(bcp.open(tmp_path / "run")["w"][...], STATE["w"] + 1)


def test_a_link_beside_the_steps_of_another_framework_is_refused_too(call, tmp_path) -> None:
    root = tmp_path / "megatron"
    step = root / "iter_0000005"
    step.mkdir(parents=True)
    save_file(STATE, step / "model.safetensors")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    assert call("convert", root, root, "--to", "bcp", "--link").code == 2
    assert call("convert", root, step, "--to", "bcp", "--link").code == 0
    assert torch.equal(bcp.open(root)["w"][...], STATE["w"])


def test_overwriting_takes_only_what_belongs_to_the_old_one(call, tmp_path) -> None:
    bcp.save(tmp_path / "a", {f"w{at}": torch.full((300_000,), float(at)) for at in range(3)})
    target = tmp_path / "hf"
    assert call("convert", tmp_path / "a", target, "--to", "hf", "--max-shard-size", "1MB").code == 0
    others = ("model-ema.safetensors", "model-lora.safetensors", "adapter_model.safetensors")
    for name in others:
        save_file(STATE, target / name)
    (target / "model-00001-of-00003.safetensors").rename(target / "model-first.safetensors")
    index = target / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of-00003", "model-first"))
    assert call("convert", tmp_path / "a", target, "--to", "hf", "--overwrite").code == 0
    assert {path.name for path in target.iterdir()} == {"model.safetensors", *others}
    for name in others:
        assert_same(load_file(target / name), STATE)


def test_other_weights_in_a_folder_do_not_make_it_a_checkpoint_that_stands(call, tmp_path) -> None:
    (tmp_path / "hf").mkdir()
    save_file(STATE, tmp_path / "hf" / "model-ema.safetensors")
    assert call("convert", tmp_path / "hf" / "model-ema.safetensors", tmp_path / "hf", "--to", "hf").code == 0
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["model-ema.safetensors", "model.safetensors"]


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
def test_a_source_is_never_written_over(call, tmp_path, to) -> None:
    bcp.save(tmp_path / "a", STATE)
    target = tmp_path / "target"
    assert call("convert", tmp_path / "a", target, "--to", to).code == 0
    assert call("convert", target, tmp_path / "link", "--to", "bcp", "--link").code == 0
    (tmp_path / "again").symlink_to(target)
    before = target.read_bytes() if to == "torch" else files_in(target)
    for source in (target, tmp_path / "link", tmp_path / "again"):
        ended = call("convert", source, target, "--to", to, "--overwrite", "--follow-links")
        assert (ended.code, "is a file of the source" in ended.err) == (2, True), ended.err
    assert (target.read_bytes() if to == "torch" else files_in(target)) == before


@pytest.mark.parametrize(
    ("stored", "dtype", "value", "is_refused"),
    [
        (torch.float32, "float16", 1e6, True),
        (torch.float32, "float16", -7e4, True),
        (torch.float32, "float16", 65504.0, False),
        (torch.bfloat16, "float16", 1e30, True),
        (torch.float64, "float32", 1e300, True),
        (torch.float32, "bfloat16", 3.4e38, True),
        (torch.float32, "bfloat16", 3.3e38, False),
        (torch.float32, "float16", float("-inf"), False),
        (torch.float32, "float16", float("nan"), False),
    ],
)
@pytest.mark.parametrize("to", ["bcp", "hf", "dcp", "torch"])
def test_a_finite_number_never_becomes_infinite(call, tmp_path, to, stored, dtype, value, is_refused) -> None:
    big = torch.zeros(300_000, dtype=stored)
    big[:2] = torch.tensor([float("inf"), float("nan")], dtype=stored)
    big[299_999] = value
    save_file({"a": torch.ones(4, dtype=stored), "big": big}, tmp_path / "a.safetensors")
    ended = call("convert", tmp_path / "a.safetensors", tmp_path / "b", "--to", to, "--dtype", dtype, "--json")
    assert ended.code == (1 if is_refused else 0)
    if is_refused:
        error = ended.json["error"]
        assert error["kind"] == "dtype"
        assert f"'big' has the element {float(big[299_999])!r}, number 299999, and {dtype} ends at" in error["message"]
        assert not (tmp_path / "b").is_file()
        assert not files_in(tmp_path / "b")
    else:
        found = bcp.open(tmp_path / "b")["big"][...]
        torch.testing.assert_close(found, big.to(getattr(torch, dtype)), equal_nan=True, rtol=0, atol=0)


def test_containers_that_torch_does_not_write_are_told(call, tmp_path) -> None:
    extra = {"empty": {}, "deep": {"a": {"b": {}}}, "kept": [], "in_list": [torch.ones(1), {}], "number": 1}
    bcp.save(tmp_path / "a", {"extra": extra, "nothing": {}})
    left_out = call("convert", tmp_path / "a", tmp_path / "b", "--to", "dcp", "--json").json["left_out"]
    assert [item["name"] for item in left_out] == ["extra.empty", "extra.deep", "extra.in_list.1", "nothing"]
    assert {item["why"] for item in left_out} == {"empty, which torch.distributed.checkpoint does not write"}
    assert "left out: nothing (empty" in call("convert", tmp_path / "a", tmp_path / "c", "--to", "dcp").out


def test_arrays_of_foreign_byte_order_become_tensors(call, tmp_path) -> None:
    odd = {
        "big": np.arange(6, dtype=">i4").reshape(2, 3),
        "halves": np.array([1.5, 2], dtype=">f2"),
        "few": np.arange(0),
    }
    bcp.save(tmp_path / "a", {"odd": odd, **STATE})
    assert call("convert", tmp_path / "a", tmp_path / "b", "--to", "torch").code == 0
    found = torch.load(tmp_path / "b", weights_only=True)["odd"]
    assert torch.equal(found["big"], torch.arange(6, dtype=torch.int32).reshape(2, 3))
    assert torch.equal(found["halves"], torch.tensor([1.5, 2], dtype=torch.float16))
    assert found["few"].shape == (0,)


def save_of_each(rank: int, _world_size: int, path: str) -> None:
    noise = bcp.RankLocal({"seed": torch.full((40_000,), float(rank)), "number": rank})
    bcp.save(path, {"model": STATE, "noise": noise})


def load_of_each(rank: int, _world_size: int, path: str) -> None:
    local = bcp.RankLocal({"seed": torch.zeros(40_000), "number": -1})
    bcp.load(path, {"noise": local})
    assert local.value["number"] == rank
    assert torch.equal(local.value["seed"], torch.full((40_000,), float(rank)))


@pytest.fixture(scope="module")
def of_two_ranks(workers: WorkerPool, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "run"
    workers.run(save_of_each, str(path), world_size=2)
    return path


@pytest.mark.parametrize("link", [(), ("--link",)])
@pytest.mark.parametrize(
    "options",
    [
        ("--rename", "^noise=sound"),
        ("--rename", "^model=net"),
        ("--include", "noise*"),
        ("--include", "noise", "--include", "noise.*"),
        ("--exclude", "model.*"),
    ],
)
def test_what_each_rank_had_refers_to_its_tensors_by_their_new_names(
    call, workers: WorkerPool, of_two_ranks, tmp_path, options, link
) -> None:
    target = tmp_path / "target"
    assert call("convert", of_two_ranks, target, "--to", "bcp", *options, *link).code == 0
    values = bcp.open(target, options=bcp.LoadOptions(follow_links=True)).rank_values("noise")
    for rank in (0, 1):
        assert values[rank]["number"] == rank
        assert torch.equal(values[rank]["seed"], torch.full((40_000,), float(rank)))
    if not link:
        workers.run(load_of_each, str(target), world_size=2)


def test_a_value_of_ranks_of_which_no_tensor_is_chosen_refers_to_none(call, of_two_ranks, tmp_path) -> None:
    target = tmp_path / "target"
    assert call("convert", of_two_ranks, target, "--to", "bcp", "--exclude", "noise.seed").code == 0
    found = bcp.open(target)
    assert set(found.keys()) == {"model.w"}
    assert found.rank_values("noise") == {0: {"number": 0}, 1: {"number": 1}}
    assert call("convert", of_two_ranks, tmp_path / "b", "--to", "bcp", "--exclude", "noise*").code == 0
    with pytest.raises(bcp.CheckpointNotFoundError):
        bcp.open(tmp_path / "b").rank_values("noise")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_dcp_folder_has_is_not_said_to_be_left_out(call, tmp_path) -> None:
    """Torch writes the key of a dict as text, also that of a rank."""
    state = {
        "who": bcp.RankLocal({"rank": 0, "empty": {}}),
        "rng": bcp.RngState(),
        "by_number": {0: {"a": 1}, 7: [{3: torch.ones(2)}, {}], 8: {}},
    }
    bcp.save(tmp_path / "run", state)
    result = call("convert", tmp_path / "run", tmp_path / "dcp", "--to", "dcp", "--json").json
    assert sorted(item["name"] for item in result["left_out"]) == ["by_number.7.1", "by_number.8", "who.0.empty"]
    written = set(dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata)
    assert {"who.0.rank", "by_number.0.a", "by_number.7.0.3"} <= written
    assert any(name.startswith("rng.0.") for name in written)


def test_two_values_of_one_name_in_dcp_are_refused_with_what_to_do(call, tmp_path) -> None:
    torch.save({**STATE, "by_number": {1: "x", "1": "y"}}, tmp_path / "c.pt")
    ended = call("convert", tmp_path / "c.pt", tmp_path / "dcp", "--to", "dcp")
    assert ended.code == 2
    assert "duplicated flatten key by_number.1; nothing was written: leave them out with exclude" in ended.err
    assert not (tmp_path / "dcp").exists()
    assert call("convert", tmp_path / "c.pt", tmp_path / "dcp", "--to", "dcp", "--exclude", "by_number.*").code == 0


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_a_target_that_is_neither_file_nor_folder_is_not_replaced(call, tmp_path, options) -> None:
    """`bcp convert run /dev/null --to torch --overwrite` of root put a file in the place of the device."""
    bcp.save(tmp_path / "c", STATE)
    os.mkfifo(tmp_path / "pipe.pt")
    ended = call("convert", tmp_path / "c", tmp_path / "pipe.pt", "--to", "torch", *options)
    assert ended.code == 2
    assert "pipe.pt is there already, and neither a file nor a folder; nothing was written" in ended.err
    assert (tmp_path / "pipe.pt").is_fifo()


def test_a_file_name_that_is_too_long_is_an_error_of_the_storage(call, tmp_path) -> None:
    bcp.save(tmp_path / "run", {"x": torch.ones(2)})
    ended = call("convert", tmp_path / "run", tmp_path / ("x" * 300), "--to", "torch")
    assert ended.code == 4
    assert f"error: cannot write {tmp_path}/xxx" in ended.err


def test_a_file_with_a_time_in_its_name_is_refused_with_what_to_do(call, tmp_path) -> None:
    """It was called a name that could lead out of the folder, not to be trusted."""
    path = tmp_path / "model_10:30:00.pt"
    torch.save(STATE, path)
    target = ["convert", tmp_path / "link.pt", tmp_path / "a:b.pt", "--to", "torch"]
    (tmp_path / "link.pt").symlink_to(path.name)
    for args in (["show", path], target):
        ended = call(*args)
        assert ended.code == 1
        assert f"{args[-1] if args[0] == 'show' else tmp_path / 'a:b.pt'}: files with ':' or a backslash" in ended.err
        assert "rename the file" in ended.err
    assert call("show", tmp_path / "link.pt").code == 0


def test_a_link_that_is_not_followed_is_told_for_step_none_too(call, tmp_path) -> None:
    """A root that is a checkpoint and has steps below it, as earlier versions left some: the step was given."""
    bcp.save(tmp_path / "source", STATE)
    root = tmp_path / "root"
    assert call("convert", tmp_path / "source", root, "--to", "bcp", "--link").code == 0
    bcp.save(root / "step_00000001", STATE)
    ended = call("convert", root, tmp_path / "out", "--to", "hf", "--step", "none")
    assert ended.code == 2
    assert "is a link to" in ended.err


@pytest.fixture
def stepped(tmp_path) -> Path:
    """A checkpoint of a model and an optimizer that has stepped."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    bcp.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    return tmp_path / "saved"


@pytest.mark.parametrize("target", ["bcp", "torch", "dcp"])
@pytest.mark.parametrize("choice", [("--exclude", "*.exp_avg"), ("--include", "model.*", "--include", "*.exp_avg_sq")])
def test_a_part_of_a_parameters_optimizer_state_is_refused(call, stepped, tmp_path, target, choice) -> None:
    ended = call("convert", stepped, tmp_path / "new", "--to", target, *choice)
    assert ended.code != 0
    assert "choose all or nothing of a parameter's state" in ended.err
    assert not (tmp_path / "new").exists()
    whole = ("--exclude", "optimizer.state.weight.*")
    assert call("convert", stepped, tmp_path / "new", "--to", target, *whole).code == 0


def test_a_comparison_with_an_export_takes_any_tensors(call, stepped, tmp_path) -> None:
    assert call("convert", stepped, tmp_path / "new", "--to", "dcp").code == 0
    ended = call("diff", stepped, tmp_path / "new", "--to", "dcp", "--exclude", "*.exp_avg", "--exclude", "nothing")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("options", [("--to", "bcp"), ("--to", "bcp", "--link"), ("--to", "torch")])
@pytest.mark.parametrize("glob", ["optimizer", "*timizer"])
def test_the_name_of_an_entry_takes_nothing_of_what_is_below_it(call, stepped, tmp_path, options, glob) -> None:
    for choice in (("--exclude", glob), ("--include", "model.*", "--include", glob)):
        ended = call("convert", stepped, tmp_path / "new", *options, *choice)
        assert ended.code != 0
        assert f"has names below 'optimizer': '{glob}.*' matches them; nothing was written" in ended.err
        assert not (tmp_path / "new").exists()


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["head"](model["body"](torch.ones(2))).sum().backward()
    optimizer.step()
    bcp.save(tmp_path / "trained", {"model": model, "optimizer": optimizer})
    return tmp_path / "trained"


@pytest.mark.parametrize("options", [("--to", "bcp"), ("--to", "dcp"), ("--to", "bcp", "--link")])
def test_the_optimizer_state_of_excluded_weights_is_left_out(call, tmp_path, trained, options) -> None:
    ended = call("convert", trained, tmp_path / "new", *options, "--exclude", "model.head.*", "--json")
    assert [item["num_tensors"] for item in ended.json["left_out"]] == [2, 6]
    assert ended.json["num_tensors"] == 8


@pytest.mark.parametrize("to", ["bcp", "hf"])
@pytest.mark.parametrize(
    ("option", "rule"), [("--exclude", "modle.*"), ("--include", "modle.*"), ("--rename", r"^modle\.=m.")]
)
def test_a_rule_that_matches_nothing_is_refused(call, tmp_path, trained, option, rule, to) -> None:
    ended = call("convert", trained, tmp_path / "new", "--to", to, "--include", "model.*", option, rule)
    assert ended.code == 2
    assert "matches nothing in the checkpoint (near: model); nothing was written" in ended.err
    assert not (tmp_path / "new").exists()


def test_the_optimizer_state_of_a_module_of_any_name_is_left_out_with_it(call, tmp_path) -> None:
    model, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *critic.parameters()])
    critic(model(torch.ones(2))).sum().backward()
    optimizer.step()
    for name in ("model", "actor"):
        bcp.save(tmp_path / name, {name: model, "critic": critic, "optimizer": optimizer})
        for excluded in (name, "critic"):
            options = ("--exclude", f"{excluded}.*", "--overwrite", "--json")
            ended = call("convert", tmp_path / name, tmp_path / "new", "--to", "bcp", *options)
            assert [item["num_tensors"] for item in ended.json["left_out"]] == [2, 6]


def test_the_optimizer_state_of_a_tied_weight_stays_while_one_of_its_names_does(call, tmp_path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model["b"](model["a"](torch.ones(2))).sum().backward()
    optimizer.step()
    bcp.save(tmp_path / "tied", {"model": model, "optimizer": optimizer, "other": torch.ones(1)})
    for glob, num_tensors in ("model.a.*", 5), ("model.b.*", 5), ("model.*", 1):
        options = ("--exclude", glob, "--overwrite", "--json")
        ended = call("convert", tmp_path / "tied", tmp_path / "new", "--to", "bcp", *options)
        assert ended.json["num_tensors"] == num_tensors
