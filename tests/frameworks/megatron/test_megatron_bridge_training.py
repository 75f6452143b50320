"""Training by the calls of Megatron-Bridge's loop, with its checkpoint manager ours: killed, stopped, and resumed."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest
from rank_programs import RankProcesses, run_ranks

from frameworks.going_on import line_of
from frameworks.megatron.test_megatron_training import TRACKER, differences, losses_of, wait_for_tracker

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(600),
]

PROGRAM = Path(__file__).parent / "train_bridge.py"
PATHS = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parent / 'doubles'}"}


def run(out: Path, iterations: int, *others: object, world_size: int = 2) -> dict[int, str]:
    """The losses by iteration, on all ranks the same iterations."""
    given = ["--save", out, "--train-iters", iterations, "--async-save", *others]
    ended = run_ranks(PROGRAM, given, world_size=world_size, timeout_s=400, environment=PATHS)
    losses = [losses_of(each) for each in ended]
    assert all(list(each) == list(losses[0]) for each in losses)
    assert all(f"ended at {iterations} with {1000.0 * iterations}" in each.output for each in ended)
    return losses[0]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of runs that all ranks were killed in, and that one rank was stopped in, by the signal."""
    folders = {}
    for number in (signal.SIGKILL, signal.SIGTERM):
        out = folders[number] = tmp_path_factory.mktemp(number.name)
        given = ["--save", out, "--train-iters", 100_000, "--async-save"]
        with RankProcesses(PROGRAM, given, world_size=2, environment=PATHS) as ranks:
            wait_for_tracker(out, ranks)
            if number == signal.SIGKILL:
                ranks.kill()
            else:
                ranks.processes[0].send_signal(number)
            expected = -signal.SIGKILL if number == signal.SIGKILL else 0
            assert [ended.exit_code for ended in ranks.wait()] == [expected] * 2
    return folders


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    interrupted: dict[int, Path], tmp_path: Path, number: signal.Signals
) -> None:
    out = interrupted[number]
    saved = int((out / TRACKER).read_text())
    if number == signal.SIGTERM:  # the step at which it came is saved
        assert max(path.name for path in out.glob("iter_*")) == f"iter_{saved:07d}"
    line = line_of(out / f"iter_{saved:07d}", "Megatron-Bridge")
    assert line == f"checkpoint.load={out} checkpoint.ckpt_step={saved}"
    resumed, whole = run(out, saved + 3), run(tmp_path, saved + 3)
    assert resumed == {number: whole[number] for number in range(saved + 1, saved + 4)}
    name = f"iter_{saved + 3:07d}"
    assert differences(out / name, tmp_path / name) == []
    assert len(list(out.glob("iter_*"))) == 2  # most_recent_k


def test_a_stopped_run_goes_on_with_another_tensor_parallelism(interrupted: dict[int, Path]) -> None:
    out = interrupted[signal.SIGTERM]
    saved = int((out / TRACKER).read_text())
    assert list(run(out, saved + 1, "--tensor-model-parallel-size", 2)) == [saved + 1]
