"""Plans that are kept from one save to the next, in one process: what is the same is not planned again, what is not is,
and every checkpoint holds exactly the state that was saved, whatever was saved before it.
"""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from faults.seams import COORDINATOR_PHASES, SAVE_PHASES, Seam, before, raising, seen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_tensors import bits_of, random_bits, same_bits
from training import Tied, mlp, train

import bytecheckpoint as bcp
from bytecheckpoint.adapters.shards import dtype_name
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.saving import commit
from bytecheckpoint.saving import global_plan as global_plan_module
from bytecheckpoint.saving.global_plan import AgreedPlan
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.plans.rank_plan import PlanCache, RankPlan

MAX_PLANS = 8
OVERWRITING = bcp.SaveOptions(overwrite=True)

State = dict[str, Any]


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> PlanCache:
    """The cache, empty: no test sees what another has saved."""
    empty = PlanCache()
    monkeypatch.setattr(process_state(), "plans", empty)
    return empty


@contextmanager
def counted(*seams: Seam) -> Iterator[list[str]]:
    """Which of these functions, by their last names, were called within the block, and how often."""
    calls: list[str] = []
    with ExitStack() as stack:
        for seam in seams:
            stack.enter_context(before(seam, partial(calls.append, seam.name)))
        yield calls


def planning() -> Any:
    """Counts what is done for a new plan and never for a known one."""
    return counted(Seam(global_plan_module, "plan_save"), Seam(global_plan_module, "plan_files"))


MISS, HIT = ["plan_save", "plan_files"], []


def tensors_of(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a state of dicts, lists and modules, by FQN."""
    if isinstance(value, torch.nn.Module):
        value = dict(value.state_dict())
    if isinstance(value, torch.Tensor):
        yield prefix, value.detach()
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_of(item, f"{prefix}.{key}" if prefix else str(key))


def differences(path: Path, state: State) -> list[str]:
    """FQNs that are not in the checkpoint as they are in the state, in both directions."""
    stored, expected = bcp.open(path).state_dict(), dict(tensors_of(state))
    odd = set(stored) ^ set(expected)
    return sorted(odd | {fqn for fqn in set(stored) & set(expected) if not same_bits(stored[fqn], expected[fqn])})


def save_and_check(path: Path, state: State, **arguments: Any) -> list[str]:
    """What was planned for a save whose checkpoint is right."""
    with planning() as planned:
        bcp.save(path, state, **arguments).result()
    assert differences(path, state) == []
    return planned


def small_state(seed: int = 0) -> State:
    return {
        "a": random_bits(torch.float32, (5, 7), seed),
        "part": {"b": random_bits(torch.bfloat16, (12,), seed + 1), "count": torch.tensor(seed)},
        "plain": {"lr": 0.1, "seed": seed},
    }


class Same(NamedTuple):
    """What a second save may differ in and still need no other plan."""

    state: Callable[[State], State] = lambda state: state
    arguments: dict[str, Any] = {}  # noqa: RUF012  never changed


def in_other_memory(state: State) -> State:
    return {**state, "a": random_bits(torch.float32, (7, 5), 9).t()}


def with_a_gradient(state: State) -> State:
    return {**state, "a": torch.nn.Parameter(torch.zeros(5, 7))}


SAME = {
    "nothing": Same(),
    "values": Same(lambda _: small_state(5)),
    "memory": Same(in_other_memory),
    "gradients": Same(with_a_gradient),
    "plain values": Same(lambda state: {**state, "plain": {"lr": 7.5, "seed": 3}}),
    "other plain data": Same(lambda state: {**state, "plain": {"text": "x", "list": [1, 2, None]}}),
    "more plain data": Same(lambda state: {**state, "more": "x"}),
    "a small tensor in rank-local data": Same(lambda state: {**state, "rng": bcp.RankLocal(torch.zeros(3))}),
    "metadata": Same(arguments={"metadata": {"note": "x"}}),
    "step": Same(arguments={"step": 7}),
    "role": Same(arguments={"role": "critic"}),
    "async": Same(arguments={"async_save": True}),
    "lazy": Same(arguments={"async_save": True, "options": bcp.SaveOptions(snapshot="lazy")}),
    "overwrite": Same(arguments={"options": OVERWRITING}),
    "staging": Same(arguments={"async_save": True, "options": bcp.SaveOptions(staging_bytes=32 << 20)}),
    "threads and time": Same(arguments={"options": bcp.SaveOptions(writer_threads=1, timeout_s=5)}),
}


@pytest.mark.parametrize("same", SAME.values(), ids=SAME)
def test_what_no_plan_depends_on_may_change(tmp_path: Path, same: Same) -> None:
    state = small_state()
    assert save_and_check(tmp_path / "first", state) == MISS
    state = same.state(state)
    path = tmp_path / "second"
    with planning() as planned:
        info = bcp.save(path, state, **same.arguments).result()
    assert planned == HIT
    if "more" not in state and "rng" not in state:
        assert differences(Path(info.path), {name: value for name, value in state.items() if name != "plain"}) == []
    checkpoint = bcp.open(info.path)
    assert checkpoint.objects["plain"].items() >= state["plain"].items()
    assert checkpoint.info.metadata == same.arguments.get("metadata", {})
    assert checkpoint.info.step == same.arguments.get("step")


def test_a_save_over_a_checkpoint_needs_no_other_plan(tmp_path: Path) -> None:
    assert save_and_check(tmp_path, small_state(0)) == MISS
    for seed in (1, 2):
        assert save_and_check(tmp_path, small_state(seed), options=OVERWRITING) == HIT
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_training_on_with_another_lr_needs_no_other_plan(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, [optimizer], 1)
    for number in range(4):
        with planning() as planned:
            bcp.save(tmp_path, {"model": model, "optimizer": optimizer}, step=number)
        assert planned == (HIT if number else MISS)
        target = mlp(seed=1)
        loaded = torch.optim.AdamW(target.parameters())
        bcp.load(tmp_path, {"model": target, "optimizer": loaded}, step=number)
        assert loaded.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        mine, theirs = dict(tensors_of(optimizer.state_dict())), dict(tensors_of(loaded.state_dict()))
        assert mine.keys() == theirs.keys()
        assert all(same_bits(mine[fqn], theirs[fqn]) for fqn in mine)
        optimizer.param_groups[0]["lr"] *= 0.5
        train(model, [optimizer], 2, seed=number)


def rename(state: State) -> None:
    state["renamed"] = state.pop("a")


def halve(state: State) -> None:
    state["model"].body.weight.data = state["model"].body.weight.data.half()


def same_bytes_of_another_dtype(state: State) -> None:
    state["a"] = state["a"].view(torch.int32)


def same_elements_in_another_shape(state: State) -> None:
    state["a"] = state["a"].reshape(7, 5)


def swap(state: State) -> None:
    state["a"], state["b"] = state["b"], state["a"]


def untie(state: State) -> None:
    state["model"].head.weight = torch.nn.Parameter(state["model"].head.weight.detach() + 1)


def tie_to_another(state: State) -> None:
    state["model"].head.weight = state["model"].spare.weight


def drop_what_is_tied(state: State) -> None:
    del state["model"].head


def tie_one_more(state: State) -> None:
    state["model"].twin = state["model"].body


def drop(state: State) -> None:
    del state["b"]


def add(state: State) -> None:
    state["more"] = torch.arange(3)


def empty(state: State) -> None:
    state["b"] = torch.zeros(0, 3)


def nest(state: State) -> None:
    state["nest"] = {"a": state.pop("a")}


CHANGES = [rename, halve, same_bytes_of_another_dtype, same_elements_in_another_shape, swap, untie]
CHANGES += [tie_to_another, drop_what_is_tied, tie_one_more, drop, add, empty, nest]


def changeable_state() -> State:
    torch.manual_seed(0)
    model = Tied()
    model.spare = torch.nn.Embedding(6, 4)
    return {"model": model, "a": random_bits(torch.float32, (5, 7)), "b": random_bits(torch.int16, (4,))}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_plan_depends_on_makes_another_plan_and_the_first_stays(
    tmp_path: Path, change: Callable[[State], None]
) -> None:
    first, changed = changeable_state(), changeable_state()
    change(changed)
    for number, state in enumerate((first, changed, first, changed)):
        assert save_and_check(tmp_path / str(number), state) == (MISS if number < 2 else HIT)


def test_every_limit_of_file_sizes_has_its_own_plan(tmp_path: Path) -> None:
    state = {f"t{index}": random_bits(torch.float32, (200, 900), index) for index in range(5)}
    for number, max_file_bytes in enumerate((1 << 20, 2 << 20, 8 << 30) * 2):
        path = tmp_path / str(number)
        options = bcp.SaveOptions(max_file_bytes=max_file_bytes)
        assert save_and_check(path, state, options=options) == (MISS if number < 3 else HIT)
        assert len(list((path / "data").iterdir())) == (5, 3, 1)[number % 3]


def test_every_codec_has_its_own_plan_and_what_is_compressed_may_change_its_length(tmp_path: Path) -> None:
    for number, codec in enumerate(("none", "zstd", {"zeros": "zstd"}) * 3):
        filled = torch.zeros(70_000) if number < 6 else random_bits(torch.float32, (70_000,), number)
        state = {"zeros": filled, "random": random_bits(torch.bfloat16, (9, 5000), number)}
        path, options = tmp_path / str(number), bcp.SaveOptions(codec=codec)
        assert save_and_check(path, state, options=options) == (MISS if number < 3 else HIT)


def test_after_a_hit_the_manifest_has_the_same_chunks_and_names_its_own_files(tmp_path: Path) -> None:
    for number in range(2):
        options = bcp.SaveOptions(max_file_bytes=1 << 20)
        state = {f"t{index}": random_bits(torch.float32, (300, 900), index + number) for index in range(3)}
        save_and_check(tmp_path / str(number), state, options=options)
    first, second = (bcp.open(tmp_path / str(number)).manifest for number in range(2))
    assert second.tensors == first.tensors
    assert [file.byte_length for file in second.files] == [file.byte_length for file in first.files]
    assert {file.name.partition("-")[0] for file in second.files} == {f"data/{second.save_id}"}
    assert first.save_id != second.save_id


def test_a_hit_reports_its_files_and_no_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[bytes] = []
    encode_report = commit.encode_report

    def kept(agreed: AgreedPlan, written: Sequence[DataFile]) -> bytes:
        reports.append(encode_report(agreed, written))
        return reports[-1]

    monkeypatch.setattr(commit, "encode_report", kept)
    for number in range(3):
        bcp.save(tmp_path, {f"t{index}": torch.ones(3) for index in range(500)}, step=number)
    lengths = [len(report) for report in reports]
    assert lengths[0] > 500
    assert lengths[1] == lengths[2] < 300


def test_a_hit_describes_no_tensor_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    bcp.save(tmp_path, state, step=0)

    def refuse(*_: object) -> None:
        raise AssertionError("an offer")

    monkeypatch.setattr(global_plan_module, "WriteItem", refuse)
    bcp.save(tmp_path, state, step=1)
    with pytest.raises(bcp.CheckpointError, match="an offer"):
        bcp.save(tmp_path, state | {"c": torch.ones(1)}, step=2)


@pytest.mark.parametrize("num_states", [MAX_PLANS, MAX_PLANS + 3])
def test_states_that_take_turns_are_saved_right_whether_their_plans_are_kept_or_not(
    tmp_path: Path, num_states: int
) -> None:
    states = [{f"t{number}": random_bits(torch.float32, (number + 1,), number)} for number in range(num_states)]
    for turn in range(3):
        for number, state in enumerate(states):
            planned = save_and_check(tmp_path / f"{turn}-{number}", state)
            assert planned == (HIT if turn and num_states <= MAX_PLANS else MISS)


def test_the_plan_that_was_used_longest_ago_goes_first() -> None:
    cache = PlanCache()
    plans = [
        RankPlan(
            plan_id=str(n), files=[], compared=[], differing_replicas=[], in_pipeline_stages=[], num_items=0, parts=[]
        )
        for n in range(MAX_PLANS + 1)
    ]
    for number, plan in enumerate(plans[:MAX_PLANS]):
        cache.add(bytes([number]), plan)
    assert cache.find(bytes([0])) is plans[0]
    cache.add(bytes([MAX_PLANS]), plans[MAX_PLANS])
    assert cache.find(bytes([1])) is None
    assert [cache.find(bytes([number])) for number in (0, 2, MAX_PLANS)] == [plans[0], plans[2], plans[MAX_PLANS]]


@pytest.mark.parametrize("phase", sorted({*SAVE_PHASES, *COORDINATOR_PHASES}))
@pytest.mark.parametrize("was_planned", [False, True])
def test_a_save_that_fails_leaves_the_next_one_right(tmp_path: Path, phase: str, was_planned: bool) -> None:
    if was_planned:
        save_and_check(tmp_path / "before", small_state(1))
    with before((SAVE_PHASES | COORDINATOR_PHASES)[phase], raising(OSError("planted"))):
        error = seen(lambda: bcp.save(tmp_path / "failed", small_state(2)))
    assert error is not None
    assert "planted" in error.message
    for number in range(2):
        save_and_check(tmp_path / f"after{number}", small_state(3 + number))
        save_and_check(tmp_path / f"other{number}", {**small_state(5), "more": torch.ones(3)})


def test_an_asynchronous_save_that_fails_leaves_the_next_one_right(tmp_path: Path) -> None:
    with before(SAVE_PHASES["writing"], raising(OSError("planted"))):
        handle = bcp.save(tmp_path / "failed", small_state(0), async_save=True)
        assert "planted" in str(handle.exception(20))
    assert save_and_check(tmp_path / "first", small_state(1), async_save=True) == HIT
    assert save_and_check(tmp_path / "second", small_state(2), async_save=True) == HIT


def test_warm_up_plans_for_the_save_that_follows(tmp_path: Path) -> None:
    with planning() as planned:
        bcp.warm_up({"model": Tied()})
        bcp.warm_up({"model": Tied()})
    assert planned == MISS
    for number in range(2):
        assert save_and_check(tmp_path / str(number), {"model": Tied()}, async_save=True) == HIT


def test_the_cache_keeps_no_tensor_and_no_module_alive(tmp_path: Path, plans: PlanCache) -> None:
    model = Tied()
    state = {"model": model, "own": torch.ones(300), "view": torch.ones(6, 4).t()}
    for number, is_async in enumerate((False, False, True, True)):
        bcp.save(tmp_path / str(number), state, async_save=is_async).result()
    assert plans._plans
    references = [weakref.ref(value) for value in (model, *model.parameters(), state["own"], state["view"])]
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in (state["own"], state["view"])]
    del model, state
    give_up = time.monotonic() + 20
    while any(reference() is not None for reference in references + memory) and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.01)  # the thread that has ended a save may still be in its last function
    assert [reference() for reference in references + memory] == [None] * len(references + memory)


def test_the_cache_holds_a_known_number_of_plans(tmp_path: Path, plans: PlanCache) -> None:
    for number in range(MAX_PLANS * 3):
        bcp.save(tmp_path / str(number), {f"t{number}": torch.ones(2)})
    assert len(plans._plans) == MAX_PLANS


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.uint8]
NAMES = ["a", "b", "c.d", "c_d", "é", "__metadata__"]


def mutate(state: State, random_source: random.Random) -> None:
    """One change of a kind and a place that chance decides, of values, of what a plan depends on, or of both."""
    name = random_source.choice(NAMES)
    kind = random_source.choice(["set", "set", "drop", "tie", "transpose", "fill", "fill", "fill", "reshape"])
    tensor = state.get(name)
    if kind == "set" or tensor is None:
        shape = tuple(random_source.choice([0, 1, 2, 3, 700]) for _ in range(random_source.randrange(3)))
        state[name] = random_bits(random_source.choice(DTYPES), shape, random_source.randrange(1 << 30))
    elif kind == "drop":
        del state[name]
    elif kind == "tie":
        state[random_source.choice(NAMES)] = tensor
    elif kind == "transpose":
        state[name] = tensor.t() if tensor.ndim == 2 else tensor
    elif kind == "reshape":
        state[name] = tensor.reshape(-1)
    else:
        state[name] = random_bits(tensor.dtype, tuple(tensor.shape), random_source.randrange(1 << 30))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), num_files=st.sampled_from([1, 2]))
def test_no_history_of_saves_makes_a_checkpoint_wrong(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_files: int
) -> None:
    random_source = random.Random(seed)
    options = [bcp.SaveOptions(), bcp.SaveOptions(max_file_bytes=1 << 20)][:num_files]
    history: list[State] = [{}]
    folder = tmp_path_factory.mktemp("history")
    for number in range(15):
        state = dict(random_source.choice(history[-4:]))
        for _ in range(random_source.randrange(3)):
            mutate(state, random_source)
        if not state:  # refused, as an empty state always is
            continue
        history.append(state)
        path = folder / str(number)
        option, is_async = random_source.choice(options), random_source.random() < 0.3
        bcp.save(path, state, options=option, async_save=is_async).result()
        stored = bcp.open(path).state_dict()
        expected = {fqn: (dtype_name(tensor.dtype), bits_of(tensor)) for fqn, tensor in state.items()}
        assert {fqn: (dtype_name(tensor.dtype), bits_of(tensor)) for fqn, tensor in stored.items()} == expected, number
        assert {fqn: tensor.shape for fqn, tensor in stored.items()} == {f: t.shape for f, t in state.items()}
