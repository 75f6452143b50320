"""The commands on folders that the ranks of other programs have filled, on disk and on `s3://`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from s3_buckets import filled_bucket
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and of client libraries

PROJECTION, NORM = torch.arange(24.0).reshape(4, 6), torch.ones(6)
STATE = {"layers.0.linear_proj.weight": PROJECTION, "layers.0.norm.weight": NORM}
FORMATS = {
    "megatron": "megatron",
    "folders": "torch.distributed.checkpoint folders",
    "ranks": "torch.save of ranks",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder of each format; not to be changed."""
    root = tmp_path_factory.mktemp("folders")
    for rank in range(2):
        at = root / "megatron" / f"mp_rank_0{rank}"
        at.mkdir(parents=True)
        part = STATE | {"layers.0.linear_proj.weight": PROJECTION[:, 3 * rank : 3 * rank + 3].contiguous()}
        saved = {"model": part, "args": Namespace(tensor_model_parallel_size=2), "checkpoint_version": 3.0}
        torch.save({**saved, "iteration": 9}, at / "model_optim_rng.pt")
        (root / "ranks").mkdir(exist_ok=True)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        cut = DTensor.from_local(PROJECTION.chunk(2)[rank].clone(), mesh, [Shard(0)], run_check=False)
        part = {"layers.0.linear_proj.weight": cut, "layers.0.norm.weight": NORM}
        torch.save({"model": part}, root / "ranks" / f"rank_{rank}.pt")
        dist.destroy_process_group()
    dcp.save({"model": STATE}, checkpoint_id=root / "folders" / "pytorch_model_fsdp_0", no_dist=True)
    torch.save({"model": STATE}, root / "whole.pt")
    return root


@pytest.fixture(scope="module")
def bucket(folders):
    """The options for a bucket that holds them under `run`."""
    with filled_bucket(folders) as options:
        yield options


@pytest.mark.parametrize("name", FORMATS)
def test_what_they_hold_is_shown_and_compared(call, folders, name) -> None:
    shown = call("show", folders / name, "--json").json
    assert [tensor["fqn"] for tensor in shown["tensors"]] == [f"model.{fqn}" for fqn in STATE]
    assert [tensor["shape"] for tensor in shown["tensors"]] == [[4, 6], [6]]
    assert call("diff", folders / name, folders / "whole.pt", "--include", "model.*", "--json").json["same"]
    assert call("verify", folders / name).code == 5
    (item,) = call("ls", folders / name, "--json").json["checkpoints"][:1]
    assert item["format"] == FORMATS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_a_bucket_holds_the_same(call, folders, bucket, name) -> None:
    paths = f"s3://bucket/run/{name}", folders / name
    assert call("diff", *paths, "--json", *bucket).json["same"]
    assert call("verify", paths[0], *bucket).code == 5
    shown = call("show", paths[0], "--json", *bucket).json
    assert shown["path"] == paths[0]


@pytest.mark.parametrize(
    ("names", "sign"),
    [
        (["pytorch_model_fsdp_0"], "pytorch_model_fsdp_0"),
        (["optimizer_0"], "optimizer_0"),
        (["model"], ".metadata in the folder model"),
        (["optimizer"], ".metadata in the folder optimizer"),
        (["model", "optimizer"], ".metadata in the folders model and optimizer"),
    ],
    ids=str,
)
def test_the_origin_of_folders_is_told_by_those_that_are_there(call, tmp_path, names, sign) -> None:
    for name in names:
        dcp.save({name: {"w": torch.ones(2)}}, checkpoint_id=tmp_path / name, no_dist=True)
    assert call("doctor", "--checkpoint", tmp_path, "--json").json["told_by"] == sign


@pytest.mark.parametrize("name", ["megatron", "ranks"])
def test_a_missing_rank_is_an_exit_code_and_one_line(call, folders, tmp_path, name) -> None:
    kept = next(path for path in sorted((folders / name).rglob("*.pt")) if "0" in path.parent.name + path.name)
    copy = tmp_path / kept.relative_to(folders)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(kept.read_bytes())
    ended = call("show", tmp_path / name)
    assert (ended.code, len(ended.err.splitlines())) == (3, 1)
    assert call("show", tmp_path / name, "--json").json["error"]["kind"] == "missing_file"
    listed = call("ls", tmp_path, "--json")
    assert listed.code == 1
    assert "restore the files of all ranks" in listed.json["checkpoints"][0]["problem"]
    assert call("ls", tmp_path / name).code == 1
