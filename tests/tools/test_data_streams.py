"""The state of data loaders in the commands: what `show --data` and `diff` say, and that others take it as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from stream_loaders import StreamLoader, state_of
from training import same_value

import bytecheckpoint as bcp
from bytecheckpoint.adapters.data.stream_wire import MARK
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.manifest import Manifest, encode_manifest
from bytecheckpoint.tools.analysis.data_streams import DataDifference
from bytecheckpoint.tools.render.data_text import print_data_differences
from bytecheckpoint.tools.render.terminal import Screen

NAMES = ["c4-0", "c4-1", "web-0"]
SHARED = {"seed": 4}


def streams_at(step: int) -> dict[str, Any]:
    """The state of three streams of two sources after so many steps, one with a token buffer."""
    found = {name: state_of(name, 10 * step + number) for number, name in enumerate(NAMES)}
    found |= {"web-0": state_of("web-0", 10 * step + 2, with_buffer=True)}
    return {name: {**state, "source": name.split("-")[0]} for name, state in found.items()}


def data_state(streams: dict[str, Any], shared: Any = SHARED) -> bcp.DataLoaderState:
    return bcp.DataLoaderState(StreamLoader(streams, shared), rank=0, size=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 3; not to be changed."""
    root = tmp_path_factory.mktemp("data") / "run"
    for step in (1, 3):
        state = {"model": {"w": torch.ones(3)}, "data": data_state(streams_at(step)), "rank": bcp.RankLocal(step)}
        bcp.save(root, state, step=step)
    return root


def test_show_prints_positions_by_source_and_by_stream(call, run) -> None:
    lines = [" ".join(line.split()) for line in call("show", run, "--data", "--step", 3).out.splitlines()]
    assert "data: StreamLoader, 3 streams saved by 1 data-parallel rank, elastic exact, 393 samples taken" in lines
    assert "c4 2 1 30 to 31 261" in lines
    assert "web 1 1 32 132" in lines
    assert "c4-1 c4 0 1 31 131" in lines
    assert "tensor dtype shape" not in "\n".join(lines)


def test_show_gives_the_same_as_json(call, run) -> None:
    (record,) = call("show", run, "--data", "--json").json["data"]
    assert record["fqn"] == "data"
    assert (record["size"], record["samples"], record["shared"]) == (1, 393, SHARED)
    web = {"id": "web-0", "source": "web", "owner": 0, "epoch": 1, "position": 32, "samples": 132}
    assert record["streams"][2] == web
    assert record["sources"][0]["positions"] == [30, 31]
    assert call("show", run, "--json").json["data"] is None


def test_states_that_do_not_count_are_shown_all_the_same(call, tmp_path) -> None:
    odd = {"a": None, "b": {"epoch": "x", "position": 1.5, "samples": True, "source": 3}, "c": [1]}
    state = {"odd": data_state(odd), "cursor": data_state({}, {"samples": 77})}
    bcp.save(tmp_path, state)
    cursor, other = call("show", tmp_path, "--data", "--json").json["data"]
    assert (cursor["samples"], cursor["streams"], other["samples"]) == (77, [], None)
    assert other["streams"][1] == dict.fromkeys(("source", "epoch", "position", "samples")) | {"id": "b", "owner": 0}
    out = call("show", tmp_path, "--data").out
    assert "one position for all ranks: {'samples': 77}" in out
    assert "77 samples taken" in out


def test_a_checkpoint_without_a_loader_says_so(call, saved_root) -> None:
    assert "no state of a data loader" in call("show", saved_root, "--data").out


class RankLoader:
    """A loader with one state, and without streams."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_states_of_ranks_are_counted(call, workers, tmp_path) -> None:
    workers.run(save_states_by, str(tmp_path), world_size=2)
    assert "2 rank states saved by 2 data-parallel ranks" in call("show", tmp_path, "--data").out


def save_states_by(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"data": bcp.DataLoaderState(RankLoader(), rank=rank, size=world_size, elastic="same")})


def test_rows_of_streams_are_limited(call, run) -> None:
    assert "... and 2 more streams: --limit 0 shows all" in call("show", run, "--data", "--limit", 1).out


def test_diff_says_how_many_samples_lie_between(call, run) -> None:
    a, b = run / "step_00000001", run / "step_00000003"
    assert "data: 60 samples lie between A and B: B is ahead of A" in call("diff", a, b).out
    assert "data: 60 samples lie between A and B: A is ahead of B" in call("diff", b, a).out
    (found,) = call("diff", a, b, "--json").json["data"]
    expected = {"fqn": "data", "samples": [333, 393], "num_samples_between": 60, "num_streams": 3}
    assert found == {**expected, "num_only_in_a": 0, "num_only_in_b": 0}
    same = call("diff", a, a)
    assert "data: 0 samples lie between A and B\n" in same.out


def test_one_sample_lies_between(capsys) -> None:
    print_data_differences(Screen(), [DataDifference("data", (5, 4), -1, 1, 0, 0)])
    assert capsys.readouterr().out == "  data: 1 sample lies between A and B: A is ahead of B\n"


def test_diff_counts_the_streams_of_both(call, run, tmp_path) -> None:
    streams = {**streams_at(3), "new": state_of("new", 5)}
    del streams["c4-0"]
    bcp.save(tmp_path, {"model": {"w": torch.ones(3)}, "data": data_state(streams)})
    (found,) = call("diff", run / "step_00000001", tmp_path, "--json").json["data"]
    assert (found["num_samples_between"], found["num_only_in_a"], found["num_only_in_b"]) == (40, 1, 1)
    bcp.save(tmp_path / "other", {"data": data_state({"c4-0": {"epoch": 1}})})
    assert "data: samples are not counted" in call("diff", run, tmp_path / "other").out


def test_diff_of_loaders_without_a_common_stream_counts_nothing(call, tmp_path) -> None:
    for name in ("a", "b"):
        bcp.save(tmp_path / name, {"data": data_state({name: state_of(name)})})
    out = call("diff", tmp_path / "a", tmp_path / "b").out
    assert "data: samples are not counted, 1 stream only in A, 1 stream only in B" in out


@pytest.mark.parametrize("key", ["consumed_train_samples", "global_next_index"])
def test_diff_counts_one_position_for_all_ranks(call, tmp_path, key: str) -> None:
    for count in (24, 96):
        bcp.save(tmp_path / str(count), {"data": data_state({}, {key: count, "consumed_valid_samples": 8})})
    assert "data: 72 samples lie between A and B: B is ahead" in call("diff", tmp_path / "24", tmp_path / "96").out


def test_another_number_of_ranks_is_no_difference(call, workers, tmp_path) -> None:
    for size in (1, 2):
        workers.run(save_by, str(tmp_path / str(size)), world_size=size)
    assert "the same" in call("diff", tmp_path / "1", tmp_path / "2").out


def save_by(rank: int, world_size: int, path: str) -> None:
    streams = {name: state for number, (name, state) in enumerate(streams_at(1).items()) if number % world_size == rank}
    loader = StreamLoader(streams, SHARED)
    bcp.save(path, {"data": bcp.DataLoaderState(loader, rank=rank, size=world_size)})


def test_other_commands_take_it_for_plain_data(call, run, tmp_path) -> None:
    assert call("verify", run, "--step", 3).code == 0
    assert f"data.{MARK}" in call("show", run, "--objects").out
    for step in (1, 3):
        tree = bcp.load_tree(run, step)
        assert same_value(tree["data"]["streams"], streams_at(step))
        assert same_value(tree["data"]["shared"], SHARED)
    assert bcp.open(run).objects["data"]["streams"]["c4-0"]["position"] == 30
    assert bcp.open(run).rank_values("rank") == {0: 3}
    assert torch.equal(
        bcp.open(run)["data.streams.web-0.buffer.tail"][:2], streams_at(3)["web-0"]["buffer"]["tail"][:2]
    )
    call("convert", run, tmp_path / "model.pt", "--to", "torch", "--step", 3)
    converted = torch.load(tmp_path / "model.pt", weights_only=True)
    assert same_value(converted["data"]["streams"], streams_at(3))


@pytest.mark.parametrize("options", [[], ["--exclude", "model*"], ["--rename", "^model=net"], ["--link"]])
def test_a_converted_checkpoint_has_it(call, run, tmp_path, options) -> None:
    call("convert", run, tmp_path / "new", "--to", "bcp", "--step", 3, *options)
    loader = StreamLoader()
    following = bcp.LoadOptions(follow_links=True)
    bcp.load(tmp_path / "new", {"data": bcp.DataLoaderState(loader, rank=0, size=1)}, options=following)
    assert same_value(loader.streams, streams_at(3))


@pytest.mark.parametrize("part", ["streams.c4-0.*", "streams.*.position", "streams.web-0.buffer.*", "shared.*"])
def test_a_checkpoint_with_a_part_of_it_is_refused(call, run, tmp_path, part: str) -> None:
    call("convert", run, tmp_path / "new", "--to", "bcp", "--exclude", f"data.{part}")
    with pytest.raises(bcp.CheckpointMismatchError, match="a part of its state was left out when"):
        bcp.load(tmp_path / "new", {"data": bcp.DataLoaderState(StreamLoader(), rank=0, size=1)})


HOSTILE: dict[str, Any] = {
    "a mark alone": {MARK: 1},
    "a mark in a list": [MARK, 1],
    "another version": {MARK: 2, "loader": "x"},
    "streams in a list": {MARK: 1, "streams": [1]},
    "owners of no stream": {
        MARK: 1,
        "loader": "x",
        "elastic": "exact",
        "keyed_by": "stream",
        "size": 1,
        "shared": None,
        "streams": {"a": 1},
        "owners": 3,
    },
    "a size below one": {
        MARK: 1,
        "loader": "x",
        "elastic": "exact",
        "keyed_by": "stream",
        "size": -1,
        "shared": None,
        "streams": {"a": 1},
        "owners": [],
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_state_is_refused(call, tmp_path, case) -> None:
    data = msgspec.msgpack.encode(HOSTILE[case])
    manifest = Manifest(save_id="abc", step=None, files=[], tensors={}, objects={"data": data})
    (tmp_path / "manifest.bcp").write_bytes(encode_manifest(manifest))
    loader = StreamLoader()
    with pytest.raises(bcp.CheckpointMismatchError):
        bcp.load(tmp_path, {"data": bcp.DataLoaderState(loader, rank=0, size=1)})
    assert loader.num_loads == 0
    assert call("show", tmp_path, "--data").code == 0


@pytest.mark.parametrize(
    ("owners", "samples"),
    [(np.array(["x"] * 12), 3), (np.arange(12, dtype=np.int32), 1 << 14_283)],
    ids=["names", "long"],
)
def test_numbers_that_nobody_saved_end_no_command(call, tmp_path, owners, samples) -> None:
    stored = {
        MARK: 1,
        "loader": "x",
        "elastic": "exact",
        "keyed_by": "stream",
        "size": 1,
        "shared": None,
        "streams": {f"{n:02}": msgspec.Raw(encode_plain({"samples": samples}, "")) for n in range(12)},
        "owners": msgspec.Raw(encode_plain(owners, "")),
    }
    manifest = Manifest(
        save_id="abc", step=None, files=[], tensors={}, objects={"data": msgspec.msgpack.encode(stored)}
    )
    (tmp_path / "manifest.bcp").write_bytes(encode_manifest(manifest))
    assert call("show", tmp_path, "--data").code == 0
    assert call("diff", tmp_path, tmp_path).code == 0
