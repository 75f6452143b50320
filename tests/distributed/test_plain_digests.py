"""Plain data that ranks have in common goes to the coordinator as digests, once a plan is known; whatever changes on
which rank, the checkpoint has the values of this save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.plain_digests import PlainData, digested, digests_of, restored
from bytecheckpoint.distributed import key_value_ranks
from bytecheckpoint.saving.in_flight import process_state
from distributed.workers import WorkerPool

NUM_LAYERS = 155


def dict_state(rank: int, step: int, *, is_pipeline: bool) -> dict[str, Any]:
    """620 tensors as nested dicts, as state_dict() makes them; in a pipeline each rank has layers of its own."""
    first = rank * NUM_LAYERS if is_pipeline else 0
    names = [f"layers.{number}.weight" for number in range(first, first + NUM_LAYERS)]
    moments = {name: {each: torch.full((3,), float(step)) for each in ("exp_avg", "exp_avg_sq")} for name in names}
    return {
        "model": {name: torch.full((3,), float(step)) for name in names},
        "optimizer": {"state": moments, "param_groups": [{"lr": 1.0 / step, "params": names}] if rank == 0 else []}
        if not is_pipeline
        else {"state": moments},
        "steps": {name: torch.tensor(float(step)) for name in names},
        "progress": {"step": step, "seen": [step] * 100},
    }


def save_often(rank: int, world_size: int, root: str, is_pipeline: bool) -> tuple[list[int], list[bool]]:
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        put_message = key_value_ranks.put_message

        def put_counted(store: Any, key: str, message: bytes) -> list[str]:
            sent[-1] += len(message)
            return put_message(store, key, message)

        patch.setattr(key_value_ranks, "put_message", put_counted)
        for step in range(1, 5):
            sent.append(0)
            state = dict_state(0 if not is_pipeline else rank, step, is_pipeline=is_pipeline)
            bcp.save(root, state, step=step)
    loaded = []
    for step in range(1, 5):
        state = dict_state(0 if not is_pipeline else rank, 9, is_pipeline=is_pipeline)
        bcp.load(root, state, step=step)
        loaded.append(state["progress"] == {"step": step, "seen": [step] * 100})
        loaded.append(state["model"][f"layers.{rank * NUM_LAYERS if is_pipeline else 7}.weight"].tolist() == [step] * 3)
    return sent, loaded


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_a_known_plan_sends_no_tree_of_names(workers: WorkerPool, tmp_path: Path, is_pipeline: bool) -> None:
    results = workers.run(save_often, str(tmp_path), is_pipeline, world_size=3)
    for rank, (sent, loaded) in enumerate(results):
        assert all(loaded)
        if rank:
            assert sent[0] > 10_000
            assert max(sent[1:]) < 2_000


def save_changed(rank: int, world_size: int, root: str, changing: int) -> list[Any]:
    """Each rank has an entry of its own, which one of them changes in its second save."""
    seen = []
    for step in range(3):
        value = "x" * 100 + (str(step) if rank == changing else "")
        state = {f"own{rank}": {"text": value, "w": torch.ones(2)}, "all": {"text": "y" * 50 + str(step)}}
        bcp.save(root, state, step=step)
        loaded: dict[str, Any] = {f"own{rank}": {"text": "", "w": torch.zeros(2)}, "all": {"text": ""}}
        bcp.load(root, loaded, step=step)
        seen.append((loaded[f"own{rank}"]["text"] == value, loaded["all"]["text"] == "y" * 50 + str(step)))
    return seen


@pytest.mark.parametrize("changing", [0, 1])
def test_data_that_only_one_rank_has_changed_is_sent_again(workers: WorkerPool, tmp_path: Path, changing: int) -> None:
    assert workers.run(save_changed, str(tmp_path), changing, world_size=2) == [[(True, True)] * 3] * 2


def test_a_conflict_behind_digests_is_still_one(workers: WorkerPool, tmp_path: Path) -> None:
    errors = workers.run(save_conflict, str(tmp_path), world_size=2)
    assert errors == ["conflict"] * 2


def save_conflict(rank: int, world_size: int, root: str) -> str:
    bcp.save(root, {"a": {"text": "x" * 100, "w": torch.ones(2)}}, step=0)
    try:
        bcp.save(root, {"a": {"text": "x" * 100 + str(rank), "w": torch.ones(2)}}, step=1)
    except bcp.CheckpointMismatchError as error:
        return error.kind
    return ""


def test_short_values_and_those_of_single_ranks_are_sent_whole() -> None:
    plain = {"short": ("shared", b"x"), "long": ("shared", b"x" * 99), "own": ("rank", b"y" * 99)}
    sent, fqns = digested(plain)  # type: ignore[arg-type]
    assert fqns == ["long"]
    assert list(sent) == list(plain)
    assert {fqn: value for fqn, value in sent.items() if fqn != "long"} == {
        fqn: value for fqn, value in plain.items() if fqn != "long"
    }
    assert len(sent["long"][1]) == 16
    none_known = restored([({}, []), (sent, fqns), (sent, fqns)], {})
    assert none_known.plain is None
    assert none_known.asked == [[], ["long"], []]
    found = restored([(plain, []), (sent, fqns)], {})  # type: ignore[list-item]
    assert found.plain == [plain, plain]
    assert restored([({}, []), (sent, fqns)], found.values).plain == [{}, plain]


def test_a_value_that_was_asked_for_is_sent_when_it_has_changed() -> None:
    plain: PlainData = {"of_stage": ("shared", b"x" * 99), "of_all": ("shared", b"y" * 99)}
    changed, fqns = digested(plain, {"of_stage": b"another digest", "gone": b""})
    assert (changed["of_stage"], fqns) == (plain["of_stage"], ["of_all"])
    _, fqns = digested(plain, digests_of(plain))
    assert fqns == ["of_stage", "of_all"]


def save_after_conflict(rank: int, world_size: int, root: str) -> tuple[str, list[list[str]]]:
    """Returns the kind of the conflict, and by save what this rank sends whole."""
    kind = ""
    sent: list[list[str]] = []
    for step in range(4):
        text = f"{step}" * 100 + (str(rank) if step == 1 else "")
        try:
            bcp.save(root, {"after_conflict": {"text": text, "w": torch.ones(2)}}, step=step)
        except bcp.CheckpointMismatchError as error:
            kind = error.kind
        plans = process_state().plans._plans.values()
        sent.append([fqn for plan in plans for fqn in plan.sent_whole if fqn == "after_conflict"])
    return kind, sent


def test_a_conflict_leaves_no_rank_asked_for_what_all_have(workers: WorkerPool, tmp_path: Path) -> None:
    results = workers.run(save_after_conflict, str(tmp_path), world_size=3)
    assert results == [("conflict", [[]] * 4)] * 3


def save_of_stages(rank: int, world_size: int, root: str) -> list[tuple[int, bool]]:
    """Returns, by save, how often the ranks exchanged plans, and whether the checkpoint has the values of that save:
    some change in each, and one was there in the last save but one.
    """
    results = []
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        exchange = key_value_ranks.GroupRanks.reduce_scatter
        patch.setattr(
            key_value_ranks.GroupRanks,
            "reduce_scatter",
            lambda ranks, *arguments: (calls.append(1), exchange(ranks, *arguments))[1],
        )
        for step in range(6):
            calls.clear()
            texts = {"steps": f"{step} of {rank} ".ljust(50), "parity": f"{step % 2} of {rank} ".ljust(50)}
            bcp.save(root, {"all": {**texts_of(rank, texts), "w": torch.ones(2)}}, step=step)
            num_exchanges = len(calls)
            loaded = {"all": {**dict.fromkeys(texts_of(rank, texts), ""), "w": torch.zeros(2)}}
            bcp.load(root, loaded, step=step)
            results.append((num_exchanges, {**loaded["all"], "w": None} == {**texts_of(rank, texts), "w": None}))
    return results


def texts_of(rank: int, texts: dict[str, str]) -> dict[str, str]:
    return {f"{name}{rank}": text for name, text in texts.items()}


def test_changing_data_of_single_ranks_takes_one_exchange_once_it_was_asked_for(
    workers: WorkerPool, tmp_path: Path
) -> None:
    results = workers.run(save_of_stages, str(tmp_path), world_size=3)
    for of_rank in results:
        assert all(is_right for _, is_right in of_rank)
        counts = [count for count, _ in of_rank]
        assert counts[1] == counts[2] + 1
        assert len(set(counts[2:])) == 1
