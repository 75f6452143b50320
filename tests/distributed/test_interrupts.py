"""A rank that is interrupted in a save or load, as by Ctrl-C in a notebook, and whose process lives on: the other ranks
learn of it at once, and the next call works.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from faults.seams import LOAD_PHASES, SAVE_PHASES, before, loads_as, raising, state_of

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

TIMEOUT_S = 300.0
SOON_S = 30.0
"""A busy machine takes so long at worst; without the message it is the timeout."""


def interrupt_each(rank: int, world_size: int, path: str, interrupted: int) -> list[str]:
    """In each phase one rank is interrupted, and waits for the others. What this rank raised each time."""
    raised = []
    bcp.save(path, state_of(rank, 1.0))
    phases = [*((True, seam) for seam in SAVE_PHASES.values()), *((False, seam) for seam in LOAD_PHASES.values())]
    for number, (is_save, seam) in enumerate(phases):
        began = time.monotonic()
        try:
            with before(seam, raising(KeyboardInterrupt())) if rank == interrupted else nullcontext():
                if is_save:
                    bcp.save(f"{path}-{number}", state_of(rank, 2.0), options=bcp.SaveOptions(timeout_s=TIMEOUT_S))
                else:
                    options = bcp.LoadOptions(timeout_s=TIMEOUT_S, exchange="off")
                    bcp.load(path, state_of(rank, 0.0), options=options)
        except bcp.CheckpointError as error:
            raised.append(f"{type(error).__name__} {error.kind} {error.ranks}")
        except KeyboardInterrupt:
            raised.append("KeyboardInterrupt")
        assert time.monotonic() - began < SOON_S
        dist.barrier()
        assert not Path(f"{path}-{number}", "manifest.bcp").exists()
    assert loads_as(path, rank, 1.0)
    return raised


@pytest.mark.parametrize("interrupted", [0, 1])
def test_the_others_learn_at_once_of_a_rank_that_is_interrupted_and_lives_on(
    workers: WorkerPool, tmp_path: Path, interrupted: int
) -> None:
    outcomes = workers.run(interrupt_each, str(tmp_path / "a"), interrupted, world_size=3)
    of_saves, of_loads = (f"{cls} rank_failed ({interrupted},)" for cls in ("CheckpointSaveError", "CheckpointError"))
    expected = [of_saves] * len(SAVE_PHASES) + [of_loads] * len(LOAD_PHASES)
    for rank, raised in enumerate(outcomes):
        assert raised == (["KeyboardInterrupt"] * len(expected) if rank == interrupted else expected)
