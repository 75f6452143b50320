"""The states of Megatron's own tracker of random numbers, by place in its mesh, on gloo: only its own seeding asks for
CUDA, and the states are made here as it makes them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(300),
]

NAMES = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")
States = dict[str, list[int]]


def _philox(seed: int, offset: int = 0) -> torch.Tensor:
    return torch.tensor([seed, offset]).view(torch.uint8)


def _with_tracker(tp: int, pp: int, base: int) -> Any:
    """Makes the mesh and the tracker's states as `model_parallel_cuda_manual_seed(base + 100 * pp_rank)` does."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    parallel_state.initialize_model_parallel(tp, pp)
    seed = base + 100 * parallel_state.get_pipeline_model_parallel_rank()
    tp_rank, ep_rank = parallel_state.get_tensor_model_parallel_rank(), 0
    megatron_random.initialize_rng_tracker(force_reset=True)
    tracker = megatron_random.get_cuda_rng_tracker()
    etp_rank = parallel_state.get_expert_tensor_parallel_rank()
    seeds = [seed, seed + 2718 + tp_rank, seed + 1024 + 100 * ep_rank + etp_rank]
    tracker.set_states(dict(zip(NAMES, map(_philox, seeds), strict=True)))
    return tracker


def _run(tp: int, pp: int, base: int, call: Any) -> tuple[int, int, States]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    tracker = _with_tracker(tp, pp, base)
    try:
        call()
        states = {name: state.view(torch.int64).tolist() for name, state in tracker.get_states().items()}
        place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
        return *place, states
    finally:
        megatron_random.initialize_rng_tracker(force_reset=True)
        parallel_state.destroy_model_parallel()


def save_tracker(rank: int, world_size: int, path: str, tp: int, pp: int) -> tuple[int, int, States]:
    return _run(tp, pp, 1234, lambda: bcp.save(path, {"rng": bcp.RngState("fold")}, step=1))


def load_tracker(rank: int, world_size: int, path: str, tp: int, pp: int, elastic: Any) -> tuple[int, int, States]:
    return _run(tp, pp, 99_000, lambda: bcp.load(path, {"rng": bcp.RngState(elastic)}))


def by_place(outcomes: list[tuple[int, int, States]]) -> dict[tuple[int, int], States]:
    found: dict[tuple[int, int], States] = {}
    for pp, tp, states in outcomes:
        assert found.setdefault((pp, tp), states) == states, "replicas draw alike"
    return found


@pytest.mark.parametrize("elastic", ["keep", "fold"])
@pytest.mark.parametrize("world_size", [4, 8])
def test_states_of_a_place_come_back_on_any_number_of_replicas(
    workers: WorkerPool, tmp_path: Path, world_size: int, elastic: str
) -> None:
    saved = by_place(workers.run(save_tracker, str(tmp_path), 2, 2, world_size=8))
    loaded = by_place(workers.run(load_tracker, str(tmp_path), 2, 2, elastic, world_size=world_size))
    assert loaded == saved
    assert len({tuple(states["model-parallel-rng"]) for states in loaded.values()}) == 4


def test_states_of_new_places_are_kept_or_folded(workers: WorkerPool, tmp_path: Path) -> None:
    saved = by_place(workers.run(save_tracker, str(tmp_path), 2, 1, world_size=2))
    kept = by_place(workers.run(load_tracker, str(tmp_path), 4, 1, "keep", world_size=4))
    folded = by_place(workers.run(load_tracker, str(tmp_path), 4, 1, "fold", world_size=8))
    for loaded in (kept, folded):
        assert {place: loaded[place] for place in saved} == saved
        assert len({tuple(states["model-parallel-rng"]) for states in loaded.values()}) == 4
        assert len({tuple(states["data-parallel-rng"]) for states in loaded.values()}) == 1
    assert kept[0, 3]["model-parallel-rng"] == [99_000 + 2718 + 3, 0]
    assert folded[0, 3]["model-parallel-rng"] != kept[0, 3]["model-parallel-rng"]


def test_a_process_without_megatrons_tracker_loads_the_rest(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_tracker, str(tmp_path), 2, 1, world_size=2)
    expected = bcp.open(tmp_path, step=1).rank_values("rng")[0]["torch"]
    state = torch.get_rng_state()
    bcp.load(tmp_path, {"rng": bcp.RngState()})
    assert torch.equal(torch.get_rng_state(), expected)
    torch.set_rng_state(state)
