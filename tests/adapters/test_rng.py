"""Random number generators: a process that is resumed draws what it would have drawn."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.adapters.rank_values.rng_fold import folded, philox_state
from distributed.workers import WorkerPool

HAS_CUDA = torch.cuda.is_available()


def drawn() -> list[float]:
    """Numbers of every generator, one of them normal: numpy keeps the second of each pair."""
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]  # noqa: NPY002
    numbers += [float(torch.rand(())), float(torch.randn(()))]
    return numbers + ([float(torch.rand((), device="cuda"))] if HAS_CUDA else [])


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


@pytest.fixture(autouse=True)
def _own_generators() -> Any:
    state = bcp.RngState().state_dict()
    yield
    bcp.RngState().load_state_dict(state)


@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_drawn_after_a_load_is_what_was_drawn_after_the_save(tmp_path: Path, async_save: bool) -> None:
    seed(5)
    drawn()
    handle = bcp.save(tmp_path, {"rng": bcp.RngState()}, async_save=async_save)
    expected = [drawn() for _ in range(3)]
    handle.result()
    seed(6)
    bcp.load(tmp_path, {"rng": bcp.RngState()})
    assert [drawn() for _ in range(3)] == expected


def test_a_save_draws_nothing(tmp_path: Path) -> None:
    seed(5)
    expected = drawn()
    seed(5)
    bcp.save(tmp_path, {"rng": bcp.RngState(), "x": torch.ones(3)})
    assert drawn() == expected


def test_a_generator_that_is_excluded_draws_on(tmp_path: Path) -> None:
    seed(5)
    bcp.save(tmp_path, {"rng": bcp.RngState()})
    saved = drawn()
    seed(6)
    own = drawn()
    seed(6)
    bcp.load(tmp_path, {"rng": bcp.RngState()}, exclude="rng.numpy*")
    assert drawn() == [*saved[:2], *own[2:4], *saved[4:]]


def test_the_generators_stand_anywhere_in_the_state(tmp_path: Path) -> None:
    seed(5)
    bcp.save(tmp_path, {"loop": {"step": 3, "rng": bcp.RngState()}})
    expected = drawn()
    state = {"loop": {"step": 0, "rng": bcp.RngState()}}
    bcp.load(tmp_path, state)
    assert drawn() == expected
    assert state["loop"]["step"] == 3


def test_devices_that_are_missing_are_left_out_with_a_warning(tmp_path: Path) -> None:
    num_devices = torch.cuda.device_count()
    state = bcp.RngState().state_dict()
    state["cuda"] = {"current": 0, "devices": [torch.zeros(16, dtype=torch.uint8)] * (num_devices + 1)}
    with pytest.warns(UserWarning, match=f"{num_devices + 1} CUDA devices were saved"):
        bcp.RngState().load_state_dict(state)


@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_a_cuda_device_draws_what_it_would_have_drawn() -> None:
    torch.rand((), device="cuda")
    state = bcp.RngState().state_dict()
    expected = torch.rand(5, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bcp.RngState().load_state_dict(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)


def save_own(rank: int, world_size: int, path: str) -> list[float]:
    seed(100 + rank)
    drawn()
    bcp.save(path, {"rng": bcp.RngState()})
    return drawn()


def load_own(rank: int, world_size: int, path: str) -> tuple[list[float], list[float]]:
    """What is drawn after a load, and what would have been drawn without."""
    seed(200 + rank)
    unloaded = drawn()
    seed(200 + rank)
    bcp.load(path, {"rng": bcp.RngState()})
    return drawn(), unloaded


@pytest.mark.parametrize("num_loading", [1, 2, 4])
def test_a_rank_gets_its_own_back_and_one_that_had_none_keeps_what_it_has(
    workers: WorkerPool, tmp_path: Path, num_loading: int
) -> None:
    saved = workers.run(save_own, str(tmp_path), world_size=2)
    loaded = workers.run(load_own, str(tmp_path), world_size=num_loading)
    for rank, (after, unloaded) in enumerate(loaded):
        assert after == (saved[rank] if rank < 2 else unloaded)


def save_folding(rank: int, world_size: int, path: str, step: int | None, elastic: str, seeds: list[int]) -> None:
    seed(seeds[rank])
    bcp.save(path, {"rng": bcp.RngState(elastic)}, step=step)  # type: ignore[arg-type]


def load_folding(rank: int, world_size: int, path: str, resave: str = "", step: int = 0) -> list[float]:
    seed(5)  # the same on all ranks, as many trainers do
    rng = bcp.RngState("fold")
    bcp.load(path, {"rng": rng})
    if resave:
        bcp.save(resave, {"rng": rng}, step=step)
    return drawn()


def has_duplicates(numbers: list[list[float]]) -> bool:
    """Returns True if two ranks have drawn any number that is the same."""
    return any(len(set(column)) < len(column) for column in zip(*numbers, strict=True))


@pytest.mark.parametrize("elastic", ["keep", "fold"])
@pytest.mark.parametrize("step", [3, None])
def test_ranks_that_had_none_get_a_stream_of_their_own(
    workers: WorkerPool, tmp_path: Path, elastic: str, step: int | None
) -> None:
    workers.run(save_folding, str(tmp_path), step, elastic, [11, 12], world_size=2)
    own = workers.run(load_folding, str(tmp_path), world_size=2)
    more = workers.run(load_folding, str(tmp_path), world_size=6)
    assert more[:2] == own
    assert not has_duplicates(more)
    assert workers.run(load_folding, str(tmp_path), world_size=6) == more, "a stream is one of the checkpoint"


def test_folded_streams_stay_apart_over_further_saves_and_loads(workers: WorkerPool, tmp_path: Path) -> None:
    seen: list[list[float]] = []
    workers.run(save_folding, str(tmp_path / "0"), 3, "fold", [11, 12], world_size=2)
    for number, size in enumerate([4, 1, 3, 2, 6]):
        resave = str(tmp_path / str(number + 1))
        numbers = workers.run(load_folding, str(tmp_path / str(number)), resave, number + 4, world_size=size)
        assert not has_duplicates(numbers)
        seen += [each for each in numbers if each not in seen]
    assert not has_duplicates(seen)
    assert len(seen) == 4 + 2 + 4, "ranks 1 and 2 of the third, and 2 to 5 of the fifth, are new"
    first, *later = (bcp.open(tmp_path / str(number)).rank_values("rng") for number in range(6))
    assert {state["root"] for states in later for state in states.values()} == {first[0]["root"]}


def test_another_step_folds_into_other_streams(workers: WorkerPool, tmp_path: Path) -> None:
    for step in (3, 4):
        workers.run(save_folding, str(tmp_path / str(step)), step, "fold", [11], world_size=1)
    loaded = [workers.run(load_folding, str(tmp_path / str(step)), world_size=2) for step in (3, 4)]
    assert loaded[0][0] == loaded[1][0]
    assert not has_duplicates([loaded[0][1], loaded[1][1]])


def test_no_two_of_many_ranks_are_folded_into_the_same_stream() -> None:
    """Seeds of torch's generator on the host have 32 bits: of 100,000 of them two are the same."""
    states = [folded(b"root", "step 1", f"rank {rank}") for rank in range(300)]
    for name in ("python", "numpy", "torch"):
        words = [bytes(state["torch"][24:32].numpy()) if name == "torch" else repr(state[name]) for state in states]
        assert len(set(words)) == 300


def test_streams_are_folded_on_the_host_whatever_the_default_device_is() -> None:
    expected = folded(b"root", "step 1", "rank 5")["torch"]
    with torch.device("meta"):
        state, of_device = folded(b"root", "step 1", "rank 5")["torch"], philox_state(2**70 + 3)
    assert torch.equal(state, expected)
    assert of_device.tolist() == [3, *[0] * 15]


def test_the_words_of_a_folded_state_are_what_torch_draws() -> None:
    """The state of torch's generator is written by hand: numpy's Mersenne twister of the same words says the same."""
    state = folded(b"root", "step 1", "rank 5")["torch"]
    words = np.frombuffer(state[24 : 24 + 624 * 8].numpy().tobytes(), dtype="<u8").astype(np.uint32)
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    generator = torch.Generator()
    generator.set_state(state)
    numbers = torch.empty(2_000, dtype=torch.int64).random_(0, 2**24, generator=generator)
    assert numbers.tolist() == [int(word) % 2**24 for word in twister.random_raw(2_000)]
    assert len(set(numbers.tolist())) > 1_900


def save_alike(rank: int, world_size: int, path: str) -> list[float]:
    seed(100)
    bcp.save(path, {"rng": bcp.RngState(at={})}, step=1)
    return drawn()


def load_alike(rank: int, world_size: int, path: str, elastic: str) -> list[float]:
    seed(rank)
    bcp.load(path, {"rng": bcp.RngState(elastic, at={})})  # type: ignore[arg-type]
    return drawn()


@pytest.mark.parametrize("elastic", ["keep", "fold"])
def test_ranks_that_differ_over_no_dimension_draw_alike_on_any_number(
    workers: WorkerPool, tmp_path: Path, elastic: str
) -> None:
    saved = workers.run(save_alike, str(tmp_path), world_size=2)
    assert workers.run(load_alike, str(tmp_path), elastic, world_size=3) == [saved[0]] * 3


def save_at(rank: int, world_size: int, path: str, num_tensor: int) -> list[float]:
    seed(100 + rank % num_tensor)
    drawn()
    bcp.save(path, {"rng": bcp.RngState(at={"tp": rank % num_tensor})}, step=1)
    return drawn()


def load_at(rank: int, world_size: int, path: str, num_tensor: int, elastic: str) -> list[float]:
    seed(5)
    bcp.load(path, {"rng": bcp.RngState(elastic, at={"tp": rank % num_tensor})})  # type: ignore[arg-type]
    return drawn()


def test_ranks_at_the_same_place_of_a_mesh_draw_alike_on_any_number_of_replicas(
    workers: WorkerPool, tmp_path: Path
) -> None:
    saved = workers.run(save_at, str(tmp_path), 2, world_size=4)
    assert saved[:2] == saved[2:]
    for world_size in (2, 6):
        loaded = workers.run(load_at, str(tmp_path), 2, "keep", world_size=world_size)
        assert loaded == saved[:2] * (world_size // 2)


def test_a_larger_mesh_folds_by_place(workers: WorkerPool, tmp_path: Path) -> None:
    saved = workers.run(save_at, str(tmp_path), 2, world_size=2)
    loaded = workers.run(load_at, str(tmp_path), 3, "fold", world_size=6)
    assert loaded[:3] == loaded[3:]
    assert loaded[:2] == saved
    assert not has_duplicates(loaded[:3])


def test_what_was_saved_without_a_place_is_found_by_its_rank(workers: WorkerPool, tmp_path: Path) -> None:
    saved = workers.run(save_own, str(tmp_path), world_size=2)
    assert workers.run(load_at, str(tmp_path), 1, "fold", world_size=2) == saved


def test_a_fold_keeps_what_is_excluded(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_folding, str(tmp_path), 3, "fold", [11], world_size=1)
    outcomes = workers.run(load_folding_without_torch, str(tmp_path), world_size=2)
    assert outcomes[0][1:] == outcomes[1][1:]
    assert outcomes[0][0] != outcomes[1][0]


def load_folding_without_torch(rank: int, world_size: int, path: str) -> list[float]:
    seed(5)
    bcp.load(path, {"rng": bcp.RngState("fold")}, exclude="rng.torch")
    return [random.random(), float(torch.rand(()))]


@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_a_fold_seeds_a_cuda_device() -> None:
    numbers = []
    for place in ("rank 1", "rank 2", "rank 1"):
        bcp.RngState().load_state_dict(folded(b"root", "step 1", place))
        numbers.append(torch.rand(5, device="cuda").tolist())
    assert numbers[0] == numbers[2]
    assert not set(numbers[0]) & set(numbers[1])


def test_random_numbers_are_restored_again_where_a_loader_has_drawn(tmp_path: Path) -> None:
    seed(5)
    own = np.random.default_rng(1)
    bcp.save(tmp_path, {"rng": bcp.RngState(), "own": bcp.RankLocal({"a": [own]})})
    expected = drawn(), own.random()
    seed(6)
    other = np.random.default_rng(2)
    report = bcp.load(tmp_path, {"rng": bcp.RngState(), "own": bcp.RankLocal({"a": [other]})})
    for _ in range(2):
        drawn(), other.random(3)
        report.restore_rng()
        assert (drawn(), other.random()) == expected


def test_a_load_without_generators_has_none_to_restore(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"x": torch.ones(2)})
    report = bcp.load(tmp_path, {"x": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"the state of this load had no random number generators"):
        report.restore_rng()


def load_and_restore(rank: int, world_size: int, path: str) -> bool:
    seed(200 + rank)
    report = bcp.load(path, {"rng": bcp.RngState()})
    first = drawn()
    report.restore_rng()
    return drawn() == first


def test_a_rank_that_keeps_what_it_has_restores_nothing(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_own, str(tmp_path), world_size=1)
    assert workers.run(load_and_restore, str(tmp_path), world_size=2) == [True, False]
