"""Training of a GPT model of megatron-core, with dropout and shuffled samples, by the calls of Megatron-LM's loop:
killed, stopped, and resumed on the same and on other ranks.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rank_programs import Ended, RankProcesses, run_ranks

import bytecheckpoint as bcp
from frameworks.going_on import line_of
from frameworks.real_megatron import common

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(600),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "megatron_install.py"
PROGRAM = Path(__file__).parent / "train_gpt.py"
DOUBLES = {"PYTHONPATH": str(Path(__file__).parent / "doubles")}
MAX_LINES = 80
TRACKER = "latest_checkpointed_iteration.txt"


def arguments(out: Path, iterations: int, *others: object) -> list[object]:
    return [PROGRAM, "--save", out, "--load", out, "--train-iters", iterations, "--async-save", *others]


def run(out: Path, iterations: int, *others: object, world_size: int = 2) -> Sequence[Ended]:
    given = arguments(out, iterations, *others)
    return run_ranks(EXAMPLE, given, world_size=world_size, timeout_s=400, environment=DOUBLES)


def start(out: Path, *others: object) -> RankProcesses:
    return RankProcesses(EXAMPLE, arguments(out, 100_000, *others), world_size=2, environment=DOUBLES)


def losses_of(ended: Ended) -> dict[int, str]:
    """As they were printed, to the last bit, by iteration."""
    return {
        int(number): loss for number, loss in re.findall(r"^iteration (\d+): loss (\S+)$", ended.output, re.MULTILINE)
    }


def wait_for_tracker(out: Path, ranks: RankProcesses) -> None:
    while not (out / TRACKER).exists():
        assert [process.poll() for process in ranks.processes] == [None, None]
        time.sleep(0.05)


def differences(left: Path, right: Path) -> list[str]:
    one, other = bcp.open(left), bcp.open(right)
    names = sorted(name for name in one if name.startswith(("model.", "optimizer.")))
    assert names == sorted(name for name in other if name.startswith(("model.", "optimizer.")))
    return [name for name in names if not torch.equal(common(name, one[name][...]), common(name, other[name][...]))]


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    with start(tmp_path / "killed") as ranks:
        wait_for_tracker(tmp_path / "killed", ranks)
        ranks.kill()
        assert [ended.exit_code for ended in ranks.wait()] == [-signal.SIGKILL] * 2
    saved = int((tmp_path / "killed" / TRACKER).read_text())
    resumed = run(tmp_path / "killed", saved + 3)
    uninterrupted = run(tmp_path / "whole", saved + 3)
    for one, other in zip(resumed, uninterrupted, strict=True):
        wanted = losses_of(other)
        assert losses_of(one) == {number: wanted[number] for number in range(saved + 1, saved + 4)}
        assert f"ended at {saved + 3} with {1000.0 * (saved + 3)}" in one.output
    name = f"iter_{saved + 3:07d}"
    assert differences(tmp_path / "killed" / name, tmp_path / "whole" / name) == []


def test_a_stopped_run_goes_on_with_another_tensor_parallelism_and_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with start(first, "--save-retain-interval", 1000) as ranks:
        wait_for_tracker(first, ranks)
        ranks.processes[0].send_signal(signal.SIGTERM)
        ended = ranks.wait()
    assert [each.exit_code for each in ended] == [0, 0]
    saved = int((first / TRACKER).read_text())
    assert f"ended at {saved} " in ended[0].output
    assert [path.name for path in sorted(first.iterdir())] == [f"iter_{saved:07d}", TRACKER]

    split = ["--tensor-model-parallel-size", 2, "--save", second, "--save-interval", 1_000_000]
    run(first, saved, *split)  # nothing is left to train, and what was loaded is saved
    assert differences(first / f"iter_{saved:07d}", second / f"iter_{saved:07d}") == []
    on_two = run(first, saved + 1, *split)
    given = line_of(first / f"iter_{saved:07d}", "Megatron-LM").split()
    on_one = run(first, saved + 1, *given, "--save", tmp_path / "third", world_size=1)
    assert [list(losses_of(each)) for each in (*on_two, *on_one)] == [[saved + 1]] * 3


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= MAX_LINES
