"""Ranks whose clocks are a day apart, either way: what is the latest, and what is alive, is told by no rank's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from faults.seams import Seam, before, loads_as, state_of

import bytecheckpoint as bcp
from bytecheckpoint.saving import report
from bytecheckpoint.storage import layout
from bytecheckpoint.tools.main import cli
from distributed.workers import WorkerPool

DAY_S = 86_400.0
ROUNDS = [(0.0, 0.0), (DAY_S, 0.0), (0.0, DAY_S), (-DAY_S, 0.0), (0.0, -DAY_S), (-DAY_S, DAY_S)]
"""What the clocks of the two ranks are off by, in the order of the saves: every rank's goes back, too."""


@contextmanager
def shifted(shift_s: float) -> Iterator[None]:
    """Within the block the clock of this process is off by so much, wherever this library looks at it."""
    real = time.time

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(seconds=shift_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + shift_s)
        patch.setattr(report, "datetime", Shifted)
        yield


def save_under_shifted_clocks(rank: int, world_size: int, path: str) -> list[tuple[list[int], int | None]]:
    seen = []
    for number, shifts in enumerate(ROUNDS):
        step = 10 * (number + 1)
        with shifted(shifts[rank]):
            handle = bcp.save(path, state_of(rank, float(step)), step=step, async_save=number % 2 == 1)
            handle.result(30)
            assert loads_as(path, rank, float(step))
            seen.append((bcp.steps(path), bcp.latest(path)))
    with shifted(ROUNDS[1][rank]):
        options = bcp.SaveOptions(overwrite=True)
        bcp.save(path, state_of(rank, 0.5), step=10, options=options)
        assert loads_as(path, rank, 0.5, step=10)
        assert loads_as(path, rank, 10.0 * len(ROUNDS))
    return seen


def test_the_latest_is_that_of_the_highest_step_whatever_the_clocks_say(workers: WorkerPool, tmp_path: Path) -> None:
    found = workers.run(save_under_shifted_clocks, str(tmp_path), world_size=2)
    steps = [10 * (number + 1) for number in range(len(ROUNDS))]
    assert found == [[(steps[: number + 1], step) for number, step in enumerate(steps)]] * 2
    created = [bcp.open(tmp_path, step=step).info.created_at for step in (30, 20, 40)]
    assert None not in created
    assert created != sorted(created, key=lambda at: at or datetime.now(UTC))  # they do tell of clocks that went back


def collect_beside_a_live_save(rank: int, world_size: int, path: str, shifts: tuple[float, float]) -> list[Any]:
    """Rank 0, just before the commit, finds what others would remove by their own clock."""
    found: list[Any] = []

    def collect() -> None:
        for shift_s in (-DAY_S, 0.0, DAY_S, 3 * DAY_S):
            with shifted(shift_s):
                ended = CliRunner().invoke(cli, ["gc", path, "--delete", "--json"])
            assert ended.exit_code == 0, ended.output
            found.append(ended.output)

    with shifted(shifts[rank]), before(Seam(layout, "commit"), collect):
        bcp.save(path, state_of(rank, 2.0), step=2)
    assert loads_as(path, rank, 2.0)
    return found


@pytest.mark.parametrize("shifts", [(DAY_S, -DAY_S), (-DAY_S, DAY_S)])
def test_a_live_save_is_not_taken_for_dead_by_the_clock_of_whoever_looks(
    workers: WorkerPool, tmp_path: Path, shifts: tuple[float, float]
) -> None:
    bcp.save(tmp_path, state_of(0, 1.0), step=1)
    found, _ = workers.run(collect_beside_a_live_save, str(tmp_path), shifts, world_size=2)
    assert len(found) == 4
    assert all('"why": "young"' in text and '"dead": true' not in text for text in found)
    assert bcp.steps(tmp_path) == [1, 2]
    assert CliRunner().invoke(cli, ["verify", str(tmp_path)]).exit_code == 0
