"""Plans that several ranks keep together: a hit is one small exchange, whatever differs on any rank is planned anew by
all of them, and every checkpoint holds exactly the state that was saved.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from faults.seams import SAVE_PHASES, Seam, Seen, before, raising, seen
from sample_tensors import LAYOUTS, SHAPE, random_bits, same_bits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.saving import global_plan as global_plan_module
from bytecheckpoint.saving import prepare
from bytecheckpoint.saving.global_plan import AgreedPlan, LocalSavePlan
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.plans.rank_plan import PlanCache
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=30)
SMALL_FILES = bcp.SaveOptions(timeout_s=30, max_file_bytes=1 << 20)

HIT_EXCHANGES = ["reduce_scatter"]
MISS_EXCHANGES = HIT_EXCHANGES * 2
"""Ranks that know a plan offer it first, and send what they hold when not all know the same."""


@dataclass
class Watched:
    """What planning did on this rank."""

    exchanges: list[str] = field(default_factory=list)
    num_bytes: int = 0
    """That this rank sent."""
    planned: list[str] = field(default_factory=list)


class WatchedRanks:
    """Records what is sent."""

    def __init__(self, ranks: Ranks, watched: Watched) -> None:
        self._ranks, self._watched = ranks, watched
        self.rank, self.global_ranks, self.num_ranks = ranks.rank, ranks.global_ranks, ranks.num_ranks

    def reduce_scatter(self, payload: bytes, reduce: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        def watched_reduce(payloads: list[bytes]) -> Sequence[bytes]:
            orders = reduce(payloads)
            self._watched.num_bytes += sum(map(len, orders))
            return orders

        self._watched.exchanges.append("reduce_scatter")
        self._watched.num_bytes += len(payload)
        return self._ranks.reduce_scatter(payload, watched_reduce)


@contextmanager
def watched_planning() -> Iterator[Watched]:
    watched = Watched()
    exchange_plans = prepare.exchange_plans

    def watched_exchange(ranks: Ranks, local_plan: LocalSavePlan) -> AgreedPlan:
        return exchange_plans(WatchedRanks(ranks, watched), local_plan)

    with ExitStack() as stack:
        for name in ("plan_save", "plan_files"):
            stack.enter_context(before(Seam(global_plan_module, name), partial(watched.planned.append, name)))
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(prepare, "exchange_plans", watched_exchange)
        yield watched


@dataclass(frozen=True)
class Spec:
    """A tensor of the state: its true value, and who holds what of it."""

    shape: tuple[int, ...] = (8, 6)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    lies: str = "replicated"
    """`replicated`; `shard0`, `shard1`, `turned`, `both`, `hybrid` on a mesh; or `on 1`, that rank alone has it."""
    tied_to: str = ""
    tied_on: tuple[int, ...] = ()
    """Ranks on which it is the same tensor as that other one; on the others it is a copy."""

    @property
    def truth(self) -> torch.Tensor:
        return random_bits(self.dtype, self.shape, self.seed)


Specs = Mapping[str, Spec]


class Here(NamedTuple):
    """A rank, and the meshes that its tensors lie on."""

    rank: int
    line: DeviceMesh
    turned: DeviceMesh
    """The same ranks the other way round."""
    square: DeviceMesh

    def build(self, specs: Specs) -> dict[str, Any]:
        """What this rank holds of the state: a module, because those know ties."""
        module = torch.nn.Module()
        for name, spec in specs.items():
            if spec.tied_to and self.rank in spec.tied_on:
                module.register_buffer(name, module.get_buffer(spec.tied_to))
            elif not spec.lies.startswith("on ") or int(spec.lies[3:]) == self.rank:
                module.register_buffer(name, self._local(spec))
        return {"net": module}

    def _local(self, spec: Spec) -> torch.Tensor:
        if spec.lies in ("shard0", "shard1"):
            return distribute_tensor(spec.truth, self.line, [Shard(int(spec.lies[-1]))], src_data_rank=None)
        if spec.lies == "turned":
            return distribute_tensor(spec.truth, self.turned, [Shard(0)], src_data_rank=None)
        if spec.lies == "both":
            return distribute_tensor(spec.truth, self.square, [Shard(0), Shard(1)], src_data_rank=None)
        if spec.lies == "hybrid":
            return distribute_tensor(spec.truth, self.square, [Replicate(), Shard(0)], src_data_rank=None)
        return spec.truth


def arrive(rank: int, world_size: int) -> Here:
    """Every rank, with nothing kept of what other tests saved."""
    process_state().plans = PlanCache()
    return with_meshes(rank, world_size)


def with_meshes(rank: int, world_size: int) -> Here:
    turned = DeviceMesh("cpu", list(reversed(range(world_size))))
    square = init_device_mesh("cpu", (2, world_size // 2))
    return Here(rank, init_device_mesh("cpu", (world_size,)), turned, square)


def wrong(path: str, specs: Specs) -> list[str]:
    """FQNs whose values, or whose presence, are not as they were saved."""
    stored = bcp.open(path).state_dict("net.")
    return sorted(
        {fqn for fqn in set(stored) & set(specs) if not same_bits(stored[fqn], specs[fqn].truth)}
        | (set(stored) ^ set(specs))
    )


SPECS: Specs = {
    "small": Spec(seed=1),
    "large": Spec(seed=2, shape=(1100, 501)),
    "rows": Spec(seed=3, lies="shard0"),
    "columns": Spec(seed=4, lies="shard1", dtype=torch.bfloat16),
    "block": Spec(seed=5, lies="both"),
    "first": Spec(seed=6, lies="on 0"),
    "second": Spec(seed=7, lies="on 1"),
}


def changed(**specs: Spec) -> Specs:
    return {**SPECS, **specs}


def with_seeds_from(specs: Specs, seed: int) -> Specs:
    return {name: replace(spec, seed=seed + spec.seed) for name, spec in specs.items()}


class Result(NamedTuple):
    """One save, as one rank saw it."""

    watched: Watched
    wrong: list[str]


def save_and_check(path: str, here: Here, specs: Specs, **arguments: Any) -> Result:
    with watched_planning() as watched:
        bcp.save(path, {**here.build(specs), **arguments.pop("more", {})}, **{"options": OPTIONS, **arguments}).result()
    return Result(watched, wrong(path, specs) if here.rank == 0 else [])


def save_the_same_again(rank: int, world_size: int, root: str) -> list[Result]:
    here = arrive(rank, world_size)
    saves: list[tuple[str, dict[str, Any]]] = [
        ("a", {}),
        ("b", {"metadata": {"note": "x"}}),
        ("b", {"options": bcp.SaveOptions(timeout_s=31, overwrite=True, writer_threads=1)}),
        ("c", {"more": {"plain": {"lr": 0.5}}}),
        ("d", {"async_save": True}),
        ("e", {"more": {"rng": bcp.RankLocal(rank)}}),
    ]
    return [
        save_and_check(f"{root}/{path}", here, with_seeds_from(SPECS, number), **arguments)
        for number, (path, arguments) in enumerate(saves)
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_again_is_one_small_exchange(workers: WorkerPool, tmp_path: Path, world_size: int) -> None:
    outcomes = workers.run(save_the_same_again, str(tmp_path), world_size=world_size)
    for rank, results in enumerate(outcomes):
        assert [result.wrong for result in results] == [[]] * len(results)
        assert results[0].watched.planned == (["plan_save", "plan_files"] if rank == 0 else ["plan_files"])
        for result in results:
            assert result.watched.exchanges == HIT_EXCHANGES
        for result in results[1:]:
            assert result.watched.planned == []
            assert result.watched.num_bytes < 200 + (100 * world_size if rank == 0 else 0)


def save_many_tensors(rank: int, world_size: int, path: str) -> list[int]:
    process_state().plans = PlanCache()
    state = {f"layer{number}.weight": torch.full((3,), float(number)) for number in range(1000)}
    sent = []
    for step in range(3):
        with watched_planning() as watched:
            bcp.save(path, state, step=step, options=OPTIONS)
        sent.append(watched.num_bytes)
    return sent


def test_what_a_hit_sends_does_not_grow_with_the_state(workers: WorkerPool, tmp_path: Path) -> None:
    for rank, (miss, *hits) in enumerate(workers.run(save_many_tensors, str(tmp_path), world_size=2)):
        assert miss > 10_000
        assert max(hits) < (400 if rank == 0 else 200)


class Case(NamedTuple):
    """Something that a plan depends on, changed."""

    specs: Specs = SPECS
    options: Mapping[int, bcp.SaveOptions] = {}
    """By rank; OPTIONS for the others."""


_LARGE, _ROWS, _SMALL = SPECS["large"], SPECS["rows"], SPECS["small"]
CASES = {
    "key on all": Case({**{name: spec for name, spec in SPECS.items() if name != "small"}, "other": _SMALL}),
    "key on rank 1": Case({**{n: s for n, s in SPECS.items() if n != "second"}, "other": SPECS["second"]}),
    "key on rank 0": Case({**{n: s for n, s in SPECS.items() if n != "first"}, "other": SPECS["first"]}),
    "one more on rank 1": Case(changed(third=Spec(seed=8, lies="on 1"))),
    "other rank": Case(changed(second=replace(SPECS["second"], lies="on 0"))),
    "dtype on all": Case(changed(small=replace(_SMALL, dtype=torch.int32))),
    "dtype on rank 1": Case(changed(second=replace(SPECS["second"], dtype=torch.float16))),
    "shape": Case(changed(small=replace(_SMALL, shape=(6, 8)))),
    "region": Case(changed(rows=replace(_ROWS, lies="shard1"), columns=replace(SPECS["columns"], lies="shard0"))),
    "placement": Case(changed(rows=replace(_ROWS, lies="replicated"))),
    "turned": Case(changed(rows=replace(_ROWS, lies="turned"))),
    "mesh": Case(changed(rows=replace(_ROWS, lies="both"), block=replace(SPECS["block"], lies="shard1"))),
    "replicated and sharded": Case(changed(rows=replace(_ROWS, lies="hybrid"))),
    "split or not": Case(changed(large=replace(_LARGE, shape=(11, 5)))),
    "tied on all": Case(changed(twin=replace(_SMALL, tied_to="small", tied_on=(0, 1, 2, 3)))),
    "tied on rank 1": Case(changed(twin=replace(_SMALL, tied_to="small", tied_on=(1,)))),
    "tied on rank 0": Case(changed(twin=replace(_SMALL, tied_to="small", tied_on=(0,)))),
    "not tied": Case(changed(twin=_SMALL)),
    "tied by another name": Case(changed(pair=replace(_SMALL, tied_to="small", tied_on=(0, 1, 2, 3)))),
    "file size on all": Case(options=dict.fromkeys(range(4), SMALL_FILES)),
    "file size on rank 1": Case(options={1: SMALL_FILES}),
    "file size on rank 0": Case(options={0: SMALL_FILES}),
}


def save_first_changed_first(rank: int, world_size: int, root: str, cases: list[Case]) -> list[list[Result]]:
    here = arrive(rank, world_size)
    histories = []
    for number, case in enumerate(cases):
        process_state().plans = PlanCache()
        history = []
        for turn in range(3):
            specs, options = (SPECS, OPTIONS) if turn != 1 else (case.specs, case.options.get(rank, OPTIONS))
            specs = with_seeds_from(specs, 10 * turn)
            history.append(save_and_check(f"{root}/{number}-{turn}", here, specs, options=options))
        histories.append(history)
    return histories


@pytest.mark.parametrize("world_size", [2, 4])
def test_whatever_a_plan_depends_on_is_planned_anew_by_all(
    workers: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    outcomes = workers.run(
        save_first_changed_first, str(tmp_path), list(CASES.values()), world_size=world_size, timeout_s=120
    )
    for number, name in enumerate(CASES):
        by_rank = [histories[number] for histories in outcomes]
        assert [result.wrong for result in by_rank[0]] == [[]] * 3, name
        for turn, results in enumerate(zip(*by_rank, strict=True)):
            # A rank keeps one plan for what it holds. Where others changed and it did not, the first is gone.
            is_known = turn == 2 and not any(result.watched.planned for result in results)
            assert is_known or turn < 2 or "on rank" in name or name == "other rank", name
            planned = [] if is_known else ["plan_files"]
            assert [result.watched.planned for result in results[1:]] == [planned] * (world_size - 1), (name, turn)
            assert results[0].watched.planned == ([] if is_known else ["plan_save", "plan_files"]), (name, turn)


def save_in_groups(rank: int, world_size: int, root: str) -> list[Result]:
    """Groups of other members, sizes and orders, with the same plain state on each rank."""
    here = arrive(rank, world_size)
    specs = {"large": SPECS["large"], "small": SPECS["small"]}
    members = [[0, 1, 2, 3], [0, 1], [2, 3], [0, 1, 2], [1, 2], [0, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # newer releases of torch
        members.append([3, 1, 0, 2])
        groups.append(dist.new_group(members[-1], sort_ranks=False))
    results = []
    for turn in range(2):
        for number, group in enumerate(groups):
            if rank in members[number]:
                path, now = f"{root}/{turn}-{number}", with_seeds_from(specs, 10 * turn + number)
                result = save_and_check(path, here, now, process_group=group)
                results.append(result._replace(wrong=wrong(path, now)))
    return results


def test_every_group_of_ranks_has_plans_of_its_own(workers: WorkerPool, tmp_path: Path) -> None:
    for results in workers.run(save_in_groups, str(tmp_path), world_size=4):
        half = len(results) // 2
        assert [result.wrong for result in results] == [[]] * len(results)
        assert all("plan_files" in result.watched.planned for result in results[:half])
        assert [result.watched.planned for result in results[half:]] == [[]] * half


def save_once(rank: int, world_size: int, path: str, is_first: bool, turned: int) -> Result:
    here = with_meshes(rank, world_size)
    if is_first:
        process_state().plans = PlanCache()
    specs = {name: spec for name, spec in SPECS.items() if spec.lies[:2] != "on"}
    return save_and_check(path, here, with_seeds_from(specs, turned))


def test_a_plan_outlives_its_process_group_and_not_its_world_size(workers: WorkerPool, tmp_path: Path) -> None:
    for number, world_size in enumerate((4, 2, 4, 2)):
        results = workers.run(save_once, str(tmp_path / str(number)), number == 0, number, world_size=world_size)
        assert results[0].wrong == []
        is_known = [not result.watched.planned for result in results]
        assert is_known == [number > 1] * world_size


def lose_caches(rank: int, world_size: int, root: str, losers: list[list[int]]) -> list[Result]:
    here = arrive(rank, world_size)
    results = [save_and_check(f"{root}/first", here, SPECS)]
    for number, ranks in enumerate(losers):
        if rank in ranks:
            process_state().plans = PlanCache()
        results += [
            save_and_check(f"{root}/{number}-{turn}", here, with_seeds_from(SPECS, 10 * number + turn))
            for turn in range(2)
        ]
    return results


def test_all_plan_anew_where_any_has_lost_its_plans(workers: WorkerPool, tmp_path: Path) -> None:
    losers = [[1], [0], [3], [0, 1], [1, 2, 3]]
    for rank, results in enumerate(workers.run(lose_caches, str(tmp_path), losers, world_size=4)):
        assert [result.wrong for result in results] == [[]] * len(results)
        for lost, known in zip(results[1::2], results[2::2], strict=True):
            assert lost.watched.exchanges == MISS_EXCHANGES
            assert lost.watched.planned == (["plan_save", "plan_files"] if rank == 0 else ["plan_files"])
            assert (known.watched.exchanges, known.watched.planned) == (HIT_EXCHANGES, [])


def copy_of(plans: PlanCache) -> PlanCache:
    copy = PlanCache()
    for fingerprint, plan in plans._plans.items():
        copy.add(fingerprint, plan)
    return copy


def mix_generations(rank: int, world_size: int, root: str, stale: int) -> list[Result]:
    """One rank knows the plan that all knew before the last."""
    here = arrive(rank, world_size)
    results = [save_and_check(f"{root}/first", here, SPECS)]
    before_loss = copy_of(process_state().plans)
    if rank == world_size - 1 - stale:
        process_state().plans = PlanCache()
    results.append(save_and_check(f"{root}/second", here, with_seeds_from(SPECS, 10)))
    if rank == stale:
        process_state().plans = before_loss
    return results + [save_and_check(f"{root}/third{n}", here, with_seeds_from(SPECS, 20 + n)) for n in range(2)]


@pytest.mark.parametrize("stale", [0, 1])
def test_ranks_that_know_different_plans_for_the_same_plan_anew(
    workers: WorkerPool, tmp_path: Path, stale: int
) -> None:
    for results in workers.run(mix_generations, str(tmp_path), stale, world_size=2):
        assert [result.wrong for result in results] == [[]] * 4
        assert [bool(result.watched.planned) for result in results] == [True, True, True, False]
        assert results[2].watched.exchanges == MISS_EXCHANGES


class Heard(NamedTuple):
    """A save of replicas."""

    messages: list[str]
    planned: list[str]
    stored: list[Any]


def told_in(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Without what a collection of garbage tells of other tests' files and sockets."""
    return [str(warning.message) for warning in caught if not issubclass(warning.category, ResourceWarning)]


def save_replicas(rank: int, world_size: int, root: str, values: list[dict[int, float]]) -> list[Heard]:
    """Saves replicas that have, on the ranks that are named, other values."""
    process_state().plans = PlanCache()
    heard = []
    for number, by_rank in enumerate(values):
        scalar = torch.tensor(by_rank.get(rank, 1.0))
        state = {"a": scalar, "b": torch.ones(4), "own": {f"rank{rank}": torch.ones(3)}}
        with warnings.catch_warnings(record=True) as caught, watched_planning() as watched:
            warnings.simplefilter("always")
            bcp.save(f"{root}/{number}", state, options=OPTIONS)
        stored = float(bcp.open(f"{root}/{number}")["a"][...])
        heard.append(Heard(told_in(caught), watched.planned, [stored]))
    return heard


def test_replicas_that_come_to_differ_are_told_once_and_the_lowest_rank_reduces(
    workers: WorkerPool, tmp_path: Path
) -> None:
    values = [{}, {}, {1: 2.0}, {1: 3.0}, {2: 4.0}, {}, {0: 5.0}, {}]
    outcomes = workers.run(save_replicas, str(tmp_path), values, world_size=3)
    assert [heard.stored for heard in outcomes[0]] == [[1.0]] * 6 + [[5.0], [1.0]]
    assert [len(heard.messages) for heard in outcomes[0]] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert "1 tensors" in outcomes[0][2].messages[0]
    assert ": a." in outcomes[0][2].messages[0]
    assert [bool(heard.planned) for heard in outcomes[0]] == [True, False, True, False, False, False, False, False]
    assert all(not heard.messages for heard in outcomes[1] + outcomes[2])


def save_in_layouts(rank: int, world_size: int, root: str) -> list[Heard]:
    """The same replicas on all ranks, each with memory of its own, which changes from save to save."""
    process_state().plans = PlanCache()
    heard = []
    for number in range(len(LAYOUTS)):
        layout = list(LAYOUTS.values())[(number + rank) % len(LAYOUTS)]
        contents = {f"t{seed}": random_bits(torch.float32, SHAPE, seed + number) for seed in range(5)}
        with warnings.catch_warnings(record=True) as caught, watched_planning() as watched:
            warnings.simplefilter("always")
            state = {name: layout(content) for name, content in contents.items()}
            bcp.save(f"{root}/{number}", state, options=OPTIONS)
        stored = bcp.open(f"{root}/{number}").state_dict()
        equal = [name for name, content in contents.items() if same_bits(stored[name], content)]
        heard.append(Heard(told_in(caught), watched.planned, equal))
    return heard


def test_replicas_that_only_lie_differently_do_not_differ(workers: WorkerPool, tmp_path: Path) -> None:
    for saves in workers.run(save_in_layouts, str(tmp_path), world_size=3):
        assert all(heard.stored == [f"t{seed}" for seed in range(5)] for heard in saves)
        assert all(not heard.messages for heard in saves)
        assert [bool(heard.planned) for heard in saves] == [True] + [False] * (len(saves) - 1)


def save_after_warm_up(rank: int, world_size: int, path: str) -> list[str]:
    process_state().plans = PlanCache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bcp.warm_up({"a": torch.tensor(float(rank))}, options=OPTIONS)
        bcp.save(path, {"a": torch.tensor(float(rank))}, options=OPTIONS)
        bcp.save(f"{path}-again", {"a": torch.tensor(float(rank))}, options=OPTIONS)
    return told_in(caught)


def test_replicas_that_differ_are_told_once_after_a_warm_up_too(workers: WorkerPool, tmp_path: Path) -> None:
    messages = workers.run(save_after_warm_up, str(tmp_path / "a"), world_size=2)
    assert [len(of_rank) for of_rank in messages] == [1, 0]


PHASES = {**SAVE_PHASES, "laying out": Seam(global_plan_module, "plan_files")}


def fail_and_go_on(
    rank: int, world_size: int, root: str, failing: int, was_planned: bool
) -> list[tuple[Seen | None, list[Result]]]:
    here = arrive(rank, world_size)
    results = []
    for number, (phase, function) in enumerate(PHASES.items()):
        process_state().plans = PlanCache()
        if was_planned:
            save_and_check(f"{root}/{number}-before", here, SPECS)
        specs = changed(more=Spec(seed=9)) if phase == "laying out" else SPECS
        fault = before(function, raising(OSError("planted"))) if rank == failing else nullcontext()
        with fault:
            error = seen(lambda: bcp.save(f"{root}/{number}-failed", here.build(specs), options=OPTIONS))  # noqa: B023
        after = [save_and_check(f"{root}/{number}-{n}", here, with_seeds_from(specs, 10 + n)) for n in range(2)]
        after.append(save_and_check(f"{root}/{number}-other", here, changed(other=Spec(seed=31))))
        results.append((error, after))
    return results


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("was_planned", [False, True])
def test_a_save_that_fails_on_one_rank_leaves_the_next_ones_right(
    workers: WorkerPool, tmp_path: Path, failing: int, was_planned: bool
) -> None:
    for outcome in workers.run(fail_and_go_on, str(tmp_path), failing, was_planned, world_size=2):
        for phase, (error, results) in zip(PHASES, outcome, strict=True):
            assert error is not None, phase
            assert "planted" in error.message, phase
            assert [result.wrong for result in results] == [[]] * len(results), phase
            assert results[1].watched.planned == [], phase


Change = Callable[[dict[str, Spec], str, random.Random, int], None]


def _set(specs: dict[str, Spec], name: str, chance: random.Random, world_size: int) -> None:
    lies = ["replicated", "shard0", "shard1", "both", "hybrid", *(f"on {rank}" for rank in range(world_size))]
    shape = (chance.choice([1, 3, 8, 600]), chance.choice([1, 5, 901]))
    dtype = chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
    specs[name] = Spec(shape, dtype, chance.randrange(1 << 30), chance.choice(lies))


def _fill(specs: dict[str, Spec], name: str, chance: random.Random, world_size: int) -> None:
    for other, spec in list(specs.items()):
        if name in (other, spec.tied_to):
            specs[other] = replace(spec, seed=specs[name].seed + 1)


def _move(specs: dict[str, Spec], name: str, chance: random.Random, world_size: int) -> None:
    moved = Spec(lies=chance.choice(["replicated", "shard0", "shard1", "turned", "both", "hybrid"]))
    specs[name] = replace(specs[name], lies=moved.lies, tied_to="", tied_on=())


def _drop(specs: dict[str, Spec], name: str, chance: random.Random, world_size: int) -> None:
    del specs[name]


def _tie(specs: dict[str, Spec], name: str, chance: random.Random, world_size: int) -> None:
    ranks = tuple(rank for rank in range(world_size) if chance.random() < 0.7)
    if specs[name].lies == "replicated":
        specs["tied"] = replace(specs[name], tied_to=name, tied_on=ranks)


CHANGES: list[Change] = [_set, _set, _fill, _fill, _fill, _move, _drop, _tie]


def mutate(specs: Specs, chance: random.Random, world_size: int) -> Specs:
    """One change, the same on all ranks that have the same seed. What is tied to another goes when that changes."""
    new = dict(specs)
    name = chance.choice(["a", "b", "c", "d"])
    change = chance.choice(CHANGES) if name in new else _set
    change(new, name, chance, world_size)
    tied = new.get("tied")
    if tied is not None and replace(tied, tied_to="", tied_on=()) != new.get(tied.tied_to):
        del new["tied"]
    return new


def save_at_random(rank: int, world_size: int, root: str, seed: int, num_steps: int) -> list[tuple[int, list[str]]]:
    """Saves a state that chance changes, goes back to earlier ones, loses caches. Returns what was not right."""
    here = arrive(rank, world_size)
    chance = random.Random(seed)
    history: list[Specs] = [{"a": Spec()}]
    faults = []
    for number in range(num_steps):
        specs = chance.choice(history[-5:])
        for _ in range(chance.choice([0, 1, 1, 2])):
            specs = mutate(specs, chance, world_size)
        history.append(specs)
        options = [chance.choice([OPTIONS, OPTIONS, SMALL_FILES]) for _ in range(world_size)][rank]
        if chance.random() < 0.1 and chance.randrange(world_size) == rank:
            process_state().plans = PlanCache()
        is_async = chance.random() < 0.3
        result = save_and_check(f"{root}/{number}", here, specs, options=options, async_save=is_async)
        faults += [(number, result.wrong)] if result.wrong else []
    return faults


@pytest.mark.parametrize(("world_size", "seed"), [(2, 1), (2, 2), (4, 3)])
def test_no_history_of_saves_makes_a_checkpoint_wrong(
    workers: WorkerPool, tmp_path: Path, world_size: int, seed: int
) -> None:
    outcomes = workers.run(save_at_random, str(tmp_path), seed, 30, world_size=world_size, timeout_s=120)
    assert outcomes == [[]] * world_size
