"""`bcp convert` where something goes wrong: a target is there whole or not at all, memory stays bounded, and damage is
one line.
"""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import flip
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint.storage.backends import direct_io, local_store
from distributed.workers import WorkerPool

TARGETS = ("bcp", "hf", "dcp", "torch")
STATE = {f"layers.{number}.weight": torch.full((300, 300), float(number)) for number in range(5)}
SHARDS = ("--max-shard-size", "1MB")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A checkpoint of 1.8 MB; not to be changed."""
    path = tmp_path_factory.mktemp("source") / "run"
    bcp.save(path, {"model": STATE, "epoch": 3})
    return path


def options_of(to: str) -> list[str]:
    return ["--to", to, *(SHARDS if to in {"hf", "bcp"} else ())]


def state_at(path: Path) -> dict[str, torch.Tensor] | None:
    """None where there is no checkpoint."""
    try:
        found = bcp.open(path)
    except bcp.CheckpointNotFoundError:
        return None
    return {fqn.removeprefix("model."): found[fqn][...] for fqn in found.keys()}


def assert_whole(found: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor]) -> None:
    assert found is not None
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
@pytest.mark.parametrize("to", TARGETS)
def test_a_conversion_that_is_killed_at_any_step_leaves_all_or_nothing(source, tmp_path, to) -> None:
    script = Path(__file__).parent / "killed_conversions.py"
    command = [sys.executable, str(script), str(source), str(tmp_path), *options_of(to)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    last, code = map(int, ended.stdout.split()[-2:])
    assert code == 0
    assert last >= 6  # each step before it was a kill
    found = [state_at(tmp_path / str(number)) for number in range(last + 1)]
    assert found[0] is None
    assert_whole(found[last], STATE)
    for each in found:
        assert each is None or each.keys() == STATE.keys()
        assert each is None or all(torch.equal(each[name], STATE[name]) for name in STATE)
    retried = tmp_path / str(last // 2)
    if found[last // 2] is None:  # what is left of a dead one is in the way of none that is told to replace it
        assert bcp_convert(source, retried, to, "--overwrite") == 0
        assert_whole(state_at(retried), STATE)


@pytest.mark.long
@pytest.mark.parametrize("to", ["bcp", "hf", "dcp"])
def test_replacing_that_is_killed_at_any_step_leaves_the_old_or_the_new(source, tmp_path, to) -> None:
    old = {"layers.0.weight": torch.ones(400, 400), "head.weight": torch.zeros(400, 400)}
    bcp.save(tmp_path / "old", {"model": old})
    assert bcp_convert(tmp_path / "old", tmp_path / "0", to) == 0
    for number in range(1, 60):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    script = Path(__file__).parent / "killed_conversions.py"
    command = [sys.executable, str(script), str(source), str(tmp_path), *options_of(to), "--overwrite"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    last, code = map(int, ended.stdout.split()[-2:])
    assert (code, last < 60) == (0, True)
    seen = set()
    for number in range(last + 1):
        found = state_at(tmp_path / str(number))
        assert found is not None
        expected = STATE if found.keys() == STATE.keys() else old
        assert_whole(found, expected)
        seen.add(len(expected))
    assert seen == {2, 5}
    assert len(list((tmp_path / str(last)).rglob("*.*"))) == {"bcp": 4, "hf": 4, "dcp": 2}[to]


def bcp_convert(source: Path, target: Path, to: str, *more: str) -> int:
    command = [sys.executable, "-m", "bytecheckpoint.tools", "convert", str(source), str(target), *options_of(to)]
    return subprocess.run([*command, *more], check=False, capture_output=True).returncode


@pytest.mark.parametrize("to", TARGETS)
def test_a_disk_that_gets_full_leaves_nothing(call, source, tmp_path, monkeypatch, to) -> None:
    num_calls = 0

    def write_some(*args: object) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return kept(*args)

    kept = direct_io.write_some
    monkeypatch.setattr(direct_io, "write_some", write_some)
    monkeypatch.setattr(direct_io, "write_fully", lambda fd, content, at: write_all(fd, content, at, write_some))
    ended = call("convert", source, tmp_path / "target", *options_of(to), "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (4, "no_space")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def write_all(fd, content, at, write_some) -> None:
    done = 0
    while done < content.nbytes:
        done += write_some(fd, content[done:], at + done)


@pytest.mark.parametrize("to", TARGETS)
def test_too_little_space_is_said_before_anything_is_written(call, source, tmp_path, monkeypatch, to) -> None:
    monkeypatch.setattr(local_store, "free_bytes", lambda _: 1_000_000)
    ended = call("convert", source, tmp_path / "target", *options_of(to))
    assert ended.code == 4
    assert " bytes, and 1000000 are free there; nothing was written" in ended.err
    assert not (tmp_path / "target").exists()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell the peak of memory")
@pytest.mark.parametrize("to", ["hf", "torch"])
def test_memory_stays_bounded(tmp_path, to) -> None:
    """700 MB with --memory 64MiB: what the process holds beyond its start stays within that and 300 MB."""
    num_rows = 700
    entries = {f"w{at}": {"dtype": "F32", "shape": [num_rows, 125, 500], "data_offsets": [at, at + 1]} for at in (0, 1)}
    num_bytes = num_rows * 125 * 500 * 4
    for at, entry in enumerate(entries.values()):
        entry["data_offsets"] = [at * num_bytes, (at + 1) * num_bytes]
    header = json.dumps(entries).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:  # zeros that take no space
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * num_bytes)
    code = """
import sys
from pathlib import Path
import bytecheckpoint.conversion.convert
from bytecheckpoint.tools.main import cli
def memory_bytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")
before = memory_bytes("VmRSS")
try:
    cli.main(sys.argv[1:])
finally:
    print(memory_bytes("VmHWM") - before)
"""
    arguments = ["convert", tmp_path / "model.safetensors", tmp_path / "target", "--to", to, "--memory", "64MiB"]
    if to == "hf":
        arguments += ["--dtype", "bfloat16"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert 2 * num_bytes == 350_000_000
    assert int(ended.stdout.split()[-1]) < (64 << 20) + 150_000_000
    shutil.rmtree(tmp_path / "target", ignore_errors=True)


@pytest.mark.parametrize("to", TARGETS)
def test_damage_in_the_source_is_one_line_and_no_target(call, source, tmp_path, to) -> None:
    shutil.copytree(source, tmp_path / "run")
    (data,) = (tmp_path / "run" / "data").iterdir()
    flip(data, data.stat().st_size - 100)
    ended = call("convert", tmp_path / "run", tmp_path / "target", *options_of(to))
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "checksum" in ended.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and (tmp_path / "run") not in path.parents]
    data.write_bytes(data.read_bytes()[:-1])
    ended = call("convert", tmp_path / "run", tmp_path / "target", *options_of(to), "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (1, "truncated")


def test_a_source_of_parts_that_did_not_all_arrive_is_no_checkpoint(call, tmp_path) -> None:
    """As an interrupted download or conversion leaves it, without the index that is written last."""
    for number in (1, 3):
        save_file({f"w{number}": torch.ones(2)}, tmp_path / f"model-{number:05d}-of-00003.safetensors")
    ended = call("convert", tmp_path, tmp_path / "target", "--to", "bcp", "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (3, "not_committed")
    save_file({"w2": torch.ones(2)}, tmp_path / "model-00002-of-00003.safetensors")
    assert call("convert", tmp_path, tmp_path / "target", "--to", "bcp").code == 0


@pytest.mark.parametrize("path", ["nowhere", "s3:/bucket/run", ""])
def test_a_source_that_is_none_is_one_line(call, tmp_path, path) -> None:
    ended = call("convert", path and (tmp_path / path if path == "nowhere" else path), tmp_path / "t", "--to", "hf")
    assert ended.code in {3, 4}
    assert ended.err.count("\n") == 1


def convert_together(rank: int, world_size: int, arguments: list[str]) -> int:
    """On each rank, as the command does it under torchrun."""
    from bytecheckpoint.conversion.convert import ConvertLimits, ConvertRequest, convert
    from bytecheckpoint.distributed.ranks import Subject, join_ranks
    from bytecheckpoint.loading.open_checkpoint import LoadTarget
    from bytecheckpoint.loading.select import SelectionRequest

    source, target, to, *dtype = arguments
    ranks = join_ranks(None, 60, about=Subject(target, None, is_save=True))
    written = []

    def progress(num_bytes: int):
        from contextlib import nullcontext

        return nullcontext(written.append)

    limits = ConvertLimits(64 << 20, 1 << 20)
    asked = LoadTarget(source, "latest", {})
    request = ConvertRequest(
        source=asked,
        target=target,
        target_options={},
        selection=SelectionRequest(to=to, dtype=dtype[0] if dtype else None),
        limits=limits,
        overwrite=False,
        is_link=False,
        follow_links=False,
    )
    convert(request, ranks, progress=progress)
    return sum(written)


@pytest.mark.parametrize("to", TARGETS)
def test_ranks_share_the_work(workers: WorkerPool, source, tmp_path, to) -> None:
    target = tmp_path / "target"
    written = workers.run(convert_together, [str(source), str(target), to], world_size=2)
    assert_whole(state_at(target), STATE)
    if to != "torch":  # one file
        assert min(written) > sum(written) / 4


def test_a_failure_on_one_rank_fails_on_all_and_leaves_nothing(workers: WorkerPool, source, tmp_path) -> None:
    shutil.copytree(source, tmp_path / "run")
    (data,) = (tmp_path / "run" / "data").iterdir()
    flip(data, data.stat().st_size - 100)
    with pytest.raises(Exception, match="rank 0") as caught:
        workers.run(convert_together, [str(tmp_path / "run"), str(tmp_path / "target"), "hf"], world_size=2)
    errors = caught.value.errors
    assert {type(error) for error in errors.values()} == {bcp.CheckpointCorruptError}
    assert len(errors) == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and (tmp_path / "run") not in path.parents]


def convert_with_a_rank_that_fails_once_it_has_written(rank: int, world_size: int, arguments: list[str]) -> None:
    from bytecheckpoint.distributed.key_value_ranks import GroupRanks

    def fail(self, payload: bytes) -> list[bytes]:
        raise MemoryError

    gather = GroupRanks.gather
    if rank:
        GroupRanks.gather = fail
    try:
        convert_together(rank, world_size, arguments)
    finally:
        GroupRanks.gather = gather


@pytest.mark.parametrize("to", TARGETS)
def test_no_target_is_there_before_every_rank_has_written(workers: WorkerPool, source, tmp_path, to) -> None:
    arguments = [str(source), str(tmp_path / "target"), to]
    with pytest.raises(Exception, match="rank 1"):
        workers.run(convert_with_a_rank_that_fails_once_it_has_written, arguments, world_size=2)
    assert state_at(tmp_path / "target") is None


def convert_with_a_store_that_is_lost_after_the_commit(rank: int, world_size: int, arguments: list[str]) -> None:
    from bytecheckpoint.conversion import convert
    from bytecheckpoint.distributed.key_value_ranks import GroupRanks

    def lost(self, payload: bytes) -> bytes:
        raise bcp.CheckpointError("the store is lost", kind="rank_missing")

    def commit_last(*args: object, **options: object) -> None:
        commit(*args, **options)
        GroupRanks.broadcast = lost

    commit, broadcast = convert._commit, GroupRanks.broadcast
    convert._commit = commit_last
    try:
        convert_together(rank, world_size, arguments)
    finally:
        convert._commit, GroupRanks.broadcast = commit, broadcast


@pytest.mark.parametrize("to", ["bcp", "torch"])
def test_an_error_after_the_commit_says_that_the_target_is_there(workers: WorkerPool, source, tmp_path, to) -> None:
    arguments = [str(source), str(tmp_path / "target"), to]
    with pytest.raises(Exception, match="The target is there, whole"):
        workers.run(convert_with_a_store_that_is_lost_after_the_commit, arguments, world_size=2)
    assert_whole(state_at(tmp_path / "target"), STATE)


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_number_that_would_become_infinite_on_one_rank_fails_on_all_and_leaves_nothing(
    workers: WorkerPool, tmp_path, to
) -> None:
    state = {f"w{number}": torch.full((300, 300), 10.0**number) for number in range(6)}  # 1e5 is beyond float16
    bcp.save(tmp_path / "run", state)
    target = tmp_path / "target"
    with pytest.raises(Exception, match="rank") as caught:
        workers.run(convert_together, [str(tmp_path / "run"), str(target), to, "float16"], world_size=2)
    errors = caught.value.errors
    assert {(type(error), error.kind) for error in errors.values()} == {(bcp.CheckpointMismatchError, "dtype")}
    assert len(errors) == 2
    assert all("'w5' has the element 100000.0" in str(error) for error in errors.values())
    assert not [path for path in target.rglob("*") if path.is_file()]


class Touch:
    """Pickled, it is an order to make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("to", TARGETS)
def test_a_pickle_that_would_run_code_is_one_line(call, tmp_path, to) -> None:
    torch.save({"w": torch.ones(2), "x": Touch(tmp_path / "touched")}, tmp_path / "a.pt")
    ended = call("convert", tmp_path / "a.pt", tmp_path / "target", "--to", to)
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "its pickle names" in ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt"}


@pytest.mark.parametrize("name", ["manifest.bcp", ".metadata", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"\xff" * 4096])
def test_what_is_no_checkpoint_is_one_line(call, tmp_path, name, content) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(content)
    for more in ((), ("--link",)):
        ended = call("convert", tmp_path / "run", tmp_path / "target", "--to", "bcp", *more)
        assert (ended.code, ended.err.count("\n")) == (1, 1)
        assert not (tmp_path / "target").exists()
