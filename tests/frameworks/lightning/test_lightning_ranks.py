"""Lightning's Trainer on several ranks, saving with this library: killed, stopped, failed, and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_programs import Ended, RankProcesses, run_ranks

import bytecheckpoint as bcp
from frameworks.lightning.lightning_runs import NUM_SAMPLES, STEPS_PER_EPOCH, Regression, committed, train_loader

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("program.py")
FABRIC_PROGRAM = PROGRAM.with_name("fabric_program.py")
SHARDED = ["fsdp", "model_parallel"]


def train(folder: Path, *, world_size: int = 2, exit_codes: list[int] | None = None, **options: Any) -> list[Any]:
    """Returns what each rank printed."""
    options["folder"] = str(folder)
    folder.mkdir(exist_ok=True)
    ended = run_ranks(PROGRAM, [json.dumps(options)], world_size=world_size, exit_codes=exit_codes, timeout_s=400)
    return list(map(printed, ended))


def printed(ended: Ended) -> Any:
    lines = [line for line in ended.output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def train_killed(folder: Path, step: int, **options: Any) -> None:
    """Trains until rank 1 is killed, and then kills rank 0."""
    act = {"step": step, "what": "kill", "ranks": [1]}
    folder.mkdir()
    with RankProcesses(PROGRAM, [json.dumps({"folder": str(folder), "act": act, **options})], world_size=2) as ranks:
        assert ranks.processes[1].wait(400) == -signal.SIGKILL
        ranks.processes[0].kill()
        ranks.wait()


def open_paths(run: Any) -> None:
    for path in run["paths"]:
        assert len(bcp.open(path)) > 0, path


@pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
def test_a_killed_run_goes_on_bit_for_bit_in_the_middle_of_an_epoch(tmp_path: Path, strategy: str) -> None:
    whole = train(tmp_path / "whole", strategy=strategy)
    train_killed(tmp_path / "killed", 17, strategy=strategy)
    newest = tmp_path / "killed" / "last.ckpt"
    resumed = train(tmp_path / "killed", strategy=strategy, ckpt_path="last", tests=str(newest))
    for of_whole, of_resumed in zip(whole, resumed, strict=True):
        first = min(map(int, of_resumed["losses"]))
        assert first in {12, 15}
        assert first % STEPS_PER_EPOCH != 0
        assert of_resumed["losses"] == {k: loss for k, loss in of_whole["losses"].items() if int(k) >= first}
        assert of_resumed["rows"] == of_whole["rows"][-len(of_resumed["rows"]) :]
        open_paths(of_resumed)
        assert of_resumed["test_loss"] == pytest.approx(loss_alone(newest), rel=1e-5)
    ends = [bcp.open(tmp_path / name / "last.ckpt").state_dict() for name in ("whole", "killed")]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    assert "optimizer" in {name.split(".")[0] for name in ends[0]}


def loss_alone(path: Path) -> float:
    """The mean over all batches of both ranks, of a plain module."""
    module = Regression()
    bcp.load(path, {"model": module})
    module.eval()
    with torch.no_grad():
        losses = [module._loss(batch).item() for rank in range(2) for batch in train_loader(rank, 2)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("strategy", "world_size"), [("ddp", 1), ("ddp", 4), ("fsdp", 4), ("model_parallel", 1)])
def test_another_number_of_ranks_reads_each_sample_once(tmp_path: Path, strategy: str, world_size: int) -> None:
    before = train(tmp_path, steps=4, saves={"every_n_train_steps": 4}, strategy=strategy)
    after = train(tmp_path, world_size=world_size, ckpt_path="last", steps=STEPS_PER_EPOCH, strategy=strategy)
    rows = [row for run in before + after for row in run["rows"]]
    assert len(rows) == len(set(rows)) == NUM_SAMPLES
    assert {min(map(int, run["losses"])) for run in after} == {4}


def test_sharded_checkpoints_load_without_lightning(tmp_path: Path) -> None:
    train(tmp_path, strategy="fsdp", steps=3)
    module = Regression()
    optimizer = module.configure_optimizers()[0][0]
    report = bcp.load(tmp_path / "last.ckpt", {"model": module, "optimizer": optimizer})
    assert not report.missing
    assert not report.unexpected
    assert float(optimizer.state[module.net[0].weight]["step"]) == 3.0


def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    saves = {"save_on_exception": True, "every_n_train_steps": 1000}
    act = {"step": 6, "what": "signal", "ranks": [1]}
    stopped = train(tmp_path / "a", act=act, saves=saves, exit_codes=[0, 0], steps=1000)
    last = {max(map(int, run["losses"])) for run in stopped}
    assert len(last) == 1
    (step,) = last
    assert committed(tmp_path / "a")["last.ckpt"] == step + 1
    whole = train(tmp_path / "b", steps=step + 6)
    resumed = train(tmp_path / "a", steps=step + 6, ckpt_path="last")
    for of_whole, of_resumed in zip(whole, resumed, strict=True):
        assert of_resumed["losses"] == {k: loss for k, loss in of_whole["losses"].items() if int(k) > step}


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_exception_saves_on_all_ranks_or_on_none(tmp_path: Path, everywhere: bool) -> None:
    act = {"step": 4, "what": "fail", "ranks": [0, 1] if everywhere else [1]}
    saves = {"save_on_exception": True, "every_n_train_steps": 1000}
    of_strategy = {"exception_timeout_s": 60.0 if everywhere else 3.0}  # the time in which all ranks have to meet
    options = {"act": act, "saves": saves, "strategy_options": of_strategy}
    with RankProcesses(PROGRAM, [json.dumps({"folder": str(tmp_path), **options})], world_size=2) as ranks:
        ended = ranks.wait(300)
    assert [end.exit_code for end in ended] == [1, 1]
    assert "ValueError: a bad batch" in ended[1].errors
    if everywhere:
        assert committed(tmp_path)["last.ckpt"] == 4
    else:
        assert "No checkpoint was saved" in ended[1].errors
        assert committed(tmp_path) == {}
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_copy_that_fails_on_rank_0_fails_on_all_ranks(tmp_path: Path) -> None:
    """The second checkpoint of a step is a copy that rank 0 makes alone."""
    options = {"folder": str(tmp_path), "refuse_copies": [0]}
    with RankProcesses(PROGRAM, [json.dumps(options)], world_size=2) as ranks:
        ended = ranks.wait(300)
    assert [end.exit_code for end in ended] == [1, 1]
    for end in ended:
        assert "CheckpointError: " in end.errors
        assert "the disk is full" in end.errors
    assert committed(tmp_path) == {"epoch=0-step=3.ckpt": 3}


def test_best_checkpoints_stay_and_others_go(tmp_path: Path) -> None:
    runs = train(tmp_path, saves={"save_top_k": 1, "every_n_train_steps": 4})
    assert committed(tmp_path) == {"epoch=2-step=20.ckpt": 20, "last.ckpt": 20}
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == sorted(committed(tmp_path))
    for run in runs:
        open_paths(run)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loop_of_fabric_goes_on_bit_for_bit_on_ranks(tmp_path: Path, strategy: str) -> None:
    def run(world_size: int, *, loads: bool) -> list[Any]:
        arguments = [json.dumps({"folder": str(tmp_path), "strategy": strategy, "loads": loads})]
        return list(map(printed, run_ranks(FABRIC_PROGRAM, arguments, world_size=world_size, timeout_s=400)))

    whole = run(2, loads=False)
    resumed = run(2, loads=True)
    assert resumed == [{step: loss for step, loss in losses.items() if int(step) >= 3} for losses in whole]
    (alone,) = run(1, loads=True)
    assert alone["3"] == resumed[0]["3"]
