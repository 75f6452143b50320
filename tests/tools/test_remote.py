"""Every command on `s3://`, against a server on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from s3_buckets import counted_bucket, filled_bucket

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of client libraries


@pytest.fixture(scope="module")
def bucket(saved_root):
    """The options for a bucket that holds the checkpoints of `saved_root` under `run`."""
    with filled_bucket(saved_root) as options:
        yield options


def test_ls_and_show(call, bucket, saved_root, tmp_path) -> None:
    listed = call("ls", "s3://bucket/run", "--json", *bucket).json
    assert [item["step"] for item in listed["checkpoints"]] == [5, 1000]
    page = tmp_path / "page.html"
    args = ["--stats", "--files", "--objects", "--tree", "--html", page, "--json"]
    shown = call("show", "s3://bucket/run", *args, *bucket).json
    assert "s3://bucket/run/step_00001000" in page.read_text()
    local = call("show", saved_root, *args).json
    assert shown["path"] == "s3://bucket/run/step_00001000"
    assert {**shown, "path": None} == {**local, "path": None}


def test_ls_of_many_steps_takes_a_read_of_each_and_one_listing(call, saved_root, tmp_path) -> None:
    root = tmp_path / "many"
    for step in range(25):
        shutil.copytree(saved_root / "step_00000005", root / f"step_{step:08d}")
    with counted_bucket(root) as (requests, options):
        listed = call("ls", "s3://bucket/run", "--json", *options).json
    assert [item["step"] for item in listed["checkpoints"]] == list(range(25))
    assert len([line for line in requests if "manifest.bcp" in line]) == 25
    assert len(requests) <= 25 + 4


def test_ls_of_a_whole_bucket_tells_runs_apart(call, tmp_path) -> None:
    for run, step in (("first", 3), ("second", 7)):
        bcp.save(tmp_path / "runs" / run, {"x": torch.zeros(4)}, step=step)
    with filled_bucket(tmp_path / "runs", under="") as options:
        for place in ("s3://bucket", "s3://bucket/"):
            listed = call("ls", place, "--json", *options).json["checkpoints"]
            found = [(item["path"].rsplit("/", 2)[1], item["step"], item["committed"]) for item in listed]
            assert sorted(found) == [("first", 3, True), ("second", 7, True)], place


def test_verify(call, bucket) -> None:
    result = call("verify", "s3://bucket/run", "--json", *bucket).json
    assert result["ok"]
    assert result["num_bytes_checked"] == result["num_bytes"]


def test_diff_of_both_kinds_of_places(call, bucket, saved_root) -> None:
    for paths in (("s3://bucket/run", saved_root), (saved_root, "s3://bucket/run"), ("s3://bucket/run",) * 2):
        assert call("diff", *paths, "--json", *bucket).json["same"]
    ended = call("diff", "s3://bucket/run", saved_root, "--json", "--ignore-dtype", "--include", "large", *bucket)
    assert ended.json["num_tensors"] == 1


def test_timeline(call, bucket, tmp_path: Path) -> None:
    result = call("timeline", "s3://bucket/run", "--trace", tmp_path / "t.json", "--json", *bucket).json
    assert [rank["rank"] for rank in result["ranks"]] == [0]
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["checkpoint"] == result["path"]


def test_keep_pin_and_rm(call, saved_root) -> None:
    with filled_bucket(saved_root) as options:
        root = "s3://bucket/run"
        assert call("pin", root, "--step", 5, *options).out == f"pinned {root}/step_00000005\n"
        kept = call("keep", root, "--latest", 1, "--delete", "--json", *options).json["checkpoints"]
        assert [(item["step"], item["why"]) for item in kept] == [(5, "pinned"), (1000, "newest, Latest(1)")]
        assert call("unpin", f"{root}/step_00000005", *options).code == 0
        dry = call("keep", root, "--latest", 1, "--json", *options).json["checkpoints"]
        assert [item["kept"] for item in dry] == [False, True]
        assert call("rm", root, *options).code == 2
        assert call("rm", root, "--step", 5, *options).code == 0
        assert [item["step"] for item in call("ls", root, "--json", *options).json["checkpoints"]] == [1000]
        assert call("rm", root, "--force", *options).code == 0
        assert call("gc", root, "--json", *options).code == 3


def test_du_watch_and_cat(call, bucket) -> None:
    root = "s3://bucket/run"
    assert [item["step"] for item in call("watch", root, "--once", "--json", *bucket).json["checkpoints"]] == [5, 1000]
    assert len(call("du", root, "--json", *bucket).json["checkpoints"]) == 2
    assert call("cat", root, "large[2:4]", "--json", *bucket).json["values"] == [2.0, 3.0]


def test_endpoint_and_profile_have_options_of_their_own(call, saved_root, tmp_path, monkeypatch) -> None:
    config = tmp_path / "config"
    config.write_text("[profile lab]\nregion = us-east-1\naws_access_key_id = access\naws_secret_access_key = s3cr3t\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with filled_bucket(saved_root) as options:
        url = next(part.removeprefix("endpoint_url=") for part in options if part.startswith("endpoint_url="))
        mine = ["--endpoint-url", url, "--profile", "lab"]
        listed = call("ls", "s3://bucket/run", "--json", *mine)
        assert [item["step"] for item in listed.json["checkpoints"]] == [5, 1000]
        assert call("diff", "s3://bucket/run", saved_root, "--json", "--include", "epoch", *mine).json["same"]
        ended = call("ls", "s3://bucket/run", *options, "--endpoint-url", url)
        assert (ended.code, ended.out) == (2, "")
        assert "--endpoint-url and --storage-option endpoint_url" in ended.err


@pytest.mark.parametrize("command", ["ls", "show", "verify", "timeline", "diff", "du", "watch", "rm", "pin", "unpin"])
def test_what_is_not_there_is_exit_code_3_and_keeps_secrets(call, bucket, command) -> None:
    url = "s3://bucket/nowhere"
    ended = call(command, *([url] * (1 + (command == "diff"))), *(["--once"] * (command == "watch")), *bucket)
    assert (ended.code, ended.err.count("\n")) == (3, 1)
    assert "s3cr3t" not in ended.out + ended.err
