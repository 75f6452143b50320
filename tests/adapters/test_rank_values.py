"""Values of single ranks in a load: generators that go on, and values that are merged for another number of ranks."""

from __future__ import annotations

import math
import random
import re
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import bytecheckpoint as bcp
from bytecheckpoint.adapters.rank_values.merge_values import merge
from bytecheckpoint.loading.read import Source
from bytecheckpoint.tools.main import cli
from distributed.workers import WorkerPool

LARGE = 20_000
"""Elements of a tensor that lies in a data file, not in the manifest."""


def generators(seed: int) -> dict[str, Any]:
    bits = {"pcg": np.random.PCG64, "dxsm": np.random.PCG64DXSM, "philox": np.random.Philox, "sfc": np.random.SFC64}
    return {
        "torch": torch.Generator().manual_seed(seed),
        "nested": {name: np.random.Generator(kind(seed)) for name, kind in bits.items()},
        "list": [np.random.MT19937(seed), (random.Random(seed), 7)],
        "old": np.random.RandomState(seed),
    }


def drawn(held: dict[str, Any]) -> list[float]:
    numbers = [float(torch.randn((), generator=held["torch"]))]
    numbers += [float(each.normal()) for each in held["nested"].values()] + [float(held["old"].randn())]
    return [*numbers, float(held["list"][0].random_raw()), held["list"][1][0].gauss(0, 1)]


def test_generators_anywhere_in_a_value_go_on_in_place(tmp_path: Path) -> None:
    source, target = generators(1), generators(2)
    drawn(source)
    bcp.save(tmp_path, {"own": bcp.RankLocal(source)})
    expected = [drawn(source) for _ in range(3)]
    holder = bcp.RankLocal(target)
    held = {name: target[name] for name in ("torch", "old")}
    bcp.load(tmp_path, {"own": holder})
    assert [drawn(holder.value) for _ in range(3)] == expected
    assert all(holder.value[name] is each for name, each in held.items())
    assert holder.value["list"][1][1] == 7


@pytest.mark.parametrize("kind", [torch.Generator, np.random.default_rng, random.Random])
def test_a_generator_is_the_value(tmp_path: Path, kind: Any) -> None:
    source, target = kind(), kind()
    bcp.save(tmp_path, {"own": bcp.RankLocal(source)})
    holder = bcp.RankLocal(target)
    bcp.load(tmp_path, {"own": holder})
    assert holder.value is target

    def draw(generator: Any) -> float:
        return float(torch.rand((), generator=generator)) if kind is torch.Generator else generator.random()

    assert [draw(target) for _ in range(3)] == [draw(source) for _ in range(3)]


def test_a_generator_may_stand_in_an_ordered_dict(tmp_path: Path) -> None:
    source, target = random.Random(1), random.Random(2)
    bcp.save(tmp_path, {"own": bcp.RankLocal(OrderedDict(b=source, a=1))})
    holder = bcp.RankLocal(OrderedDict(b=target, a=2))
    bcp.load(tmp_path, {"own": holder})
    assert holder.value == OrderedDict(b=target, a=1)
    assert target.random() == source.random()


def test_a_state_that_was_saved_by_hand_sets_a_generator(tmp_path: Path) -> None:
    """Earlier versions took no generators."""
    source, target = torch.Generator().manual_seed(3), torch.Generator()
    bcp.save(tmp_path, {"own": bcp.RankLocal({"g": source.get_state()})})
    bcp.load(tmp_path, {"own": bcp.RankLocal({"g": target})})
    assert torch.rand((), generator=target) == torch.rand((), generator=source)
    holder = bcp.RankLocal(None)
    bcp.save(tmp_path, {"own": bcp.RankLocal({"g": target})}, options=bcp.SaveOptions(overwrite=True))
    bcp.load(tmp_path, {"own": holder})
    assert torch.equal(holder.value["g"], target.get_state())


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (np.random.Generator(np.random.PCG64(1)), np.random.Generator(np.random.Philox(1))),
        (torch.zeros(16, dtype=torch.uint8), torch.Generator()),
        (torch.zeros(LARGE * 4), torch.Generator()),
        (torch.Generator(), np.random.default_rng(1)),
        ("text", random.Random(1)),
        ({"a": 1}, np.random.RandomState(1)),
    ],
    ids=["kind", "length", "a large tensor", "another library", "text", "a dict"],
)
def test_what_is_no_state_of_a_generator_is_refused_before_anything_changes(
    tmp_path: Path, saved: Any, target: Any
) -> None:
    bcp.save(tmp_path, {"own": bcp.RankLocal({"g": saved}), "x": torch.ones(3)})
    x = torch.zeros(3)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"own\.g: what was saved is not the state of a ") as error:
        bcp.load(tmp_path, {"own": bcp.RankLocal({"g": target}), "x": x})
    assert error.value.kind == "conflict"
    assert not x.any()


def test_a_generator_that_was_not_saved_is_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"own": bcp.RankLocal({"a": random.Random(1)})})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"own\.b: not in the checkpoint"):
        bcp.load(tmp_path, {"own": bcp.RankLocal({"a": random.Random(2), "b": random.Random(3)})})


@pytest.mark.parametrize("saved", [{"a": 1}, {"a": 1, "g": "text"}, {"a": 1, "g": [random.Random(1)]}])
def test_a_generator_without_a_state_that_fits_stays_in_a_load_of_what_fits(tmp_path: Path, saved: Any) -> None:
    bcp.save(tmp_path, {"own": bcp.RankLocal(saved)})
    generator = torch.Generator().manual_seed(3)
    holder = bcp.RankLocal({"a": 0, "g": generator})
    report = bcp.load(tmp_path, {"own": holder}, strict=False)
    assert (report.missing + report.mismatched)[0].startswith("own.g")
    assert holder.value == {"a": 1, "g": generator}
    assert torch.rand((), generator=generator) == torch.rand((), generator=torch.Generator().manual_seed(3))


def test_a_generator_in_a_dict_does_not_fit_a_list(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"own": bcp.RankLocal([random.Random(1)])})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"own\.a: not in the checkpoint"):
        bcp.load(tmp_path, {"own": bcp.RankLocal({"a": random.Random(2)})})


def test_a_generator_that_is_excluded_draws_on(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"own": bcp.RankLocal({"a": np.random.default_rng(1), "b": np.random.default_rng(2)})})
    held = {"a": np.random.default_rng(3), "b": np.random.default_rng(4)}
    bcp.load(tmp_path, {"own": bcp.RankLocal(held)}, exclude="own.a*")
    assert held["a"].random() == np.random.default_rng(3).random()
    assert held["b"].random() == np.random.default_rng(2).random()
    with pytest.raises(bcp.CheckpointMismatchError, match=r"own\.a: include and exclude leave out a part"):
        bcp.load(tmp_path, {"own": bcp.RankLocal(held)}, exclude="own.a.state.inc")


def counters(rank: int, *, size: int = 3) -> dict[str, Any]:
    """Values whose sum and whose largest are known: 10, 11, 12, ..."""
    number = 10 + rank
    return {
        "int": number,
        "float": number / 2,
        "inline": torch.full((size,), number, dtype=torch.int32),
        "large": torch.full((LARGE,), float(number)),
        "array": np.full((2, 2), number, dtype=np.uint16),
        "scalar": np.float32(number),
        "list": [number, (number, "name")],
        "by_source": Counter({"all": number, f"only {rank}": number}),
        "half": torch.full((1,), number, dtype=torch.bfloat16),
        "none": None,
    }


def values_of(value: dict[str, Any]) -> list[Any]:
    """All numbers but those of `by_source`, as Python's, and the types that have changed."""
    tensors = [value["inline"], value["large"], value["array"], value["half"]]
    kinds = [(str(each.dtype), tuple(each.shape)) for each in tensors]
    numbers = [value["int"], value["float"] * 2, float(value["scalar"]), value["list"][0], value["list"][1][0]]
    numbers += [float(each.reshape(-1)[0]) for each in tensors]
    assert all(bool((each == each.reshape(-1)[0]).all()) for each in tensors)
    assert value["none"] is None
    assert value["list"][1][1] == "name"
    return [sorted(set(numbers)), kinds, type(value["scalar"]).__name__, type(value["by_source"]).__name__]


def save_counters(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"n": bcp.RankLocal(counters(rank)), "x": torch.ones(2)})


def load_counters(rank: int, world_size: int, path: str, merge: Any) -> tuple[list[Any], dict[str, int], list[str]]:
    holder = bcp.RankLocal(counters(50), merge=merge)
    report = bcp.load(path, {"n": holder, "x": torch.zeros(2)})
    return values_of(holder.value), dict(holder.value["by_source"]), list(report.unexpected)


KINDS = [
    [("torch.int32", (3,)), ("torch.float32", (LARGE,)), ("uint16", (2, 2)), ("torch.bfloat16", (1,))],
    "float32",
    "Counter",
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_sum_over_ranks_stays_on_another_number_of_ranks(
    workers: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    workers.run(save_counters, str(tmp_path), world_size=3)
    loaded = workers.run(load_counters, str(tmp_path), "sum", world_size=world_size)
    assert loaded[0] == ([[33.0], *KINDS], {"all": 33, "only 0": 10, "only 1": 11, "only 2": 12}, [])
    zero = dict.fromkeys(["all", "only 0", "only 1", "only 2"], 0)
    assert loaded[1:] == [([[0.0], *KINDS], zero, [])] * (world_size - 1)


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_rank_gets_the_largest_on_another_number_of_ranks(
    workers: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    workers.run(save_counters, str(tmp_path), world_size=3)
    loaded = workers.run(load_counters, str(tmp_path), "max", world_size=world_size)
    assert loaded == [([[12.0], *KINDS], {"all": 12, "only 0": 10, "only 1": 11, "only 2": 12}, [])] * world_size


@pytest.mark.parametrize("merge", ["sum", "max"])
def test_on_as_many_ranks_each_gets_its_own(workers: WorkerPool, tmp_path: Path, merge: str) -> None:
    workers.run(save_counters, str(tmp_path), world_size=3)
    loaded = workers.run(load_counters, str(tmp_path), merge, world_size=3)
    expected = [([[10.0 + rank], *KINDS], {"all": 10 + rank, f"only {rank}": 10 + rank}, []) for rank in range(3)]
    assert loaded == expected


def load_beside_rank_0(rank: int, world_size: int, path: str, merge: Any) -> tuple[Any, ...]:
    holder: bcp.RankLocal = bcp.RankLocal("mine", merge=merge)
    state = {"x": torch.zeros(2)} | ({"n": holder} if rank else {})
    refused = ""
    try:
        bcp.load(path, state)
    except bcp.CheckpointMismatchError as error:
        refused = f"{error.kind} {error} {state['x'].tolist()}"
    report = bcp.load(path, state, strict=False)
    return refused, holder.value == "mine", report.mismatched, state["x"].tolist()


def test_a_sum_that_rank_0_does_not_take_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    """The other ranks were given zero."""
    workers.run(save_counters, str(tmp_path), world_size=2)
    for refused, *loaded in workers.run(load_beside_rank_0, str(tmp_path), "sum", world_size=3):
        assert re.search(r"^conflict .*n: rank 0 gets the sum .* \[0\.0, 0\.0\]$", refused, re.DOTALL)
        assert loaded == [True, [refused.split("  conflict: ")[1].rpartition(" [")[0]], [1.0, 1.0]]
    largest = workers.run(load_beside_rank_0, str(tmp_path), "max", world_size=3)
    assert largest == [("", rank == 0, [], [1.0, 1.0]) for rank in range(3)]


def test_a_converted_checkpoint_knows_how_many_ranks_saved_it(workers: WorkerPool, tmp_path: Path) -> None:
    """Its manifest says how many ranks converted it."""
    workers.run(save_counters, str(tmp_path / "a"), world_size=3)
    ended = CliRunner().invoke(cli, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "bcp"])
    assert ended.exit_code == 0, ended.output
    assert workers.run(load_counters, str(tmp_path / "b"), "sum", world_size=1)[0][0] == [[33.0], *KINDS]


class Metric:
    """An object whose state is a sum, as metrics are."""

    def __init__(self, seen: int) -> None:
        self.seen = torch.tensor(seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def save_metric(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"metric": bcp.RankLocal(Metric(2**rank), merge="sum")})


def load_metric(rank: int, world_size: int, path: str) -> int:
    metric = Metric(-1)
    bcp.load(path, {"metric": bcp.RankLocal(metric, merge="sum")})
    return int(metric.seen)


def test_the_state_of_an_object_is_merged(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_metric, str(tmp_path), world_size=4)
    assert workers.run(load_metric, str(tmp_path), world_size=2) == [15, 0]


def test_what_is_excluded_from_a_merge_stays(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_counters, str(tmp_path), world_size=3)
    holder = bcp.RankLocal({"int": 1, "large": torch.zeros(LARGE)}, merge="sum")
    bcp.load(tmp_path, {"n": holder}, include=["n.float", "n.int"], exclude="n.int")
    assert holder.value == {"int": 1, "float": 16.5, "large": holder.value["large"]}


def load_on_another_device(rank: int, world_size: int, path: str) -> int:
    metric = Metric(-1)
    with torch.device("meta"):
        bcp.load(path, {"metric": bcp.RankLocal(metric, merge="sum")})
    return int(metric.seen)


def test_what_is_merged_is_on_the_host_whatever_the_default_device_is(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_metric, str(tmp_path), world_size=3)
    assert workers.run(load_on_another_device, str(tmp_path), world_size=2) == [7, 0]


def save_case(rank: int, world_size: int, path: str, case: str) -> None:
    values = {**UNLIKE, **MERGED}[case][1]
    bcp.save(path, {"n": bcp.RankLocal({"a": values[rank]})})


UNLIKE: dict[str, tuple[str, list[Any], str]] = {
    "lengths": ("sum", [[1], [1, 2]], "lists of different lengths"),
    "kinds": ("sum", [1, "one"], "neither numbers nor the same on all ranks"),
    "texts": ("max", ["a", "b"], "neither numbers nor the same on all ranks"),
    "shapes": ("sum", [torch.ones(2), torch.ones(3)], "different in shape or dtype"),
    "large shapes": ("sum", [torch.ones(LARGE), torch.ones(LARGE + 1)], "different in shape or dtype"),
    "dtypes": ("max", [np.ones(2), np.ones(2, dtype=np.int64)], "different in shape or dtype"),
    "truths": ("sum", [True, False], "bool values, which have no sum"),
    "large truths": ("sum", [torch.ones(80_000).bool(), torch.ones(80_000).bool()], "bool values, which have no sum"),
    "complex": ("max", [torch.ones(1) * 1j, torch.ones(1) * 1j], "complex values, which have no max"),
    "overflow": ("sum", [torch.full((1,), 2**62), torch.full((1,), 2**62)], "int64 integers whose sum is out of range"),
    "unsigned overflow": ("sum", [np.uint8(200), np.uint8(100)], "uint8 integers whose sum is out of range"),
    "under a list": ("sum", [{"b": [1, True]}, {"b": [1, True]}], "bool values, which have no sum"),
    "half bytes": ("max", [torch.ones(8).byte().view(torch.uint4)] * 2, "dtype that torch cannot add or compare"),
    "large half bytes": ("sum", [torch.ones(80_000).byte().view(torch.uint4)] * 2, "torch cannot add or compare"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_values_that_have_no_sum_or_largest_are_refused_before_anything_changes(
    workers: WorkerPool, tmp_path: Path, case: str
) -> None:
    merge, _, why = UNLIKE[case]
    workers.run(save_case, str(tmp_path), case, world_size=2)
    holder: bcp.RankLocal = bcp.RankLocal({"a": "mine"}, merge=merge)
    with pytest.raises(bcp.CheckpointMismatchError, match=rf"n\.a.*: the values of ranks 0 to 1 .*{why}"):
        bcp.load(tmp_path, {"n": holder})
    assert holder.value == {"a": "mine"}


def save_seen(rank: int, world_size: int, path: str) -> None:
    seen = {"a": torch.full((LARGE,), 2**62 + rank), "b": torch.ones(LARGE), "c": torch.full((3,), rank)}
    bcp.save(path, {"n": bcp.RankLocal(seen), "x": torch.ones(2), "y": torch.ones(LARGE)})


def load_seen(rank: int, world_size: int, path: str, exchange: Any) -> tuple[str, str, bool]:
    holder: bcp.RankLocal = bcp.RankLocal("mine", merge="sum")
    state = {"n": holder, "x": torch.zeros(2), "y": torch.zeros(LARGE)}
    with pytest.raises(bcp.CheckpointMismatchError) as error:
        bcp.load(path, state, options=bcp.LoadOptions(exchange=exchange))
    is_changed = holder.value != "mine" or bool(state["x"].any()) or bool(state["y"].any())
    return error.value.kind, error.value.message, is_changed


OUT_OF_RANGE = "n.a: the values of ranks 0 to 1 of the save are int64 integers whose sum is out of range of it; load on"
ON_RANKS = pytest.mark.parametrize(("world_size", "exchange"), [(1, "off"), (3, "off"), (3, "on")])


@ON_RANKS
def test_sums_of_large_tensors_that_are_out_of_range_are_refused_before_anything_changes(
    workers: WorkerPool, tmp_path: Path, world_size: int, exchange: str
) -> None:
    workers.run(save_seen, str(tmp_path), world_size=2)
    for kind, message, is_changed in workers.run(load_seen, str(tmp_path), exchange, world_size=world_size):
        assert (kind, is_changed) == ("conflict", False)
        assert message.startswith("state and checkpoint do not fit (1 conflict); nothing was loaded and the state is")
        assert f"conflict: {OUT_OF_RANGE}" in message


def save_sized(rank: int, world_size: int, path: str, size: int) -> None:
    seen = {"a": torch.full((size,), 2**62 + rank), "b": torch.full((size,), 1 + rank)}
    bcp.save(path, {"n": bcp.RankLocal(seen), "x": torch.ones(2)})


def load_what_fits(rank: int, world_size: int, path: str, exchange: Any, on_meta: bool) -> tuple[Any, ...]:
    holder: bcp.RankLocal = bcp.RankLocal("mine", merge="sum")
    model = torch.nn.Module()
    model.register_buffer("x", torch.zeros(2, device="meta" if on_meta else "cpu"))
    options = bcp.LoadOptions(exchange=exchange)
    report = bcp.load(path, {"n": holder, "": model}, strict=False, options=options)
    return report.mismatched, report.missing, report.unexpected, holder.value, model.x.tolist()


@ON_RANKS
@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("size", [3, LARGE])
def test_what_has_no_sum_is_left_as_it_was_by_a_load_of_what_fits_whatever_its_size(
    workers: WorkerPool, tmp_path: Path, world_size: int, exchange: str, on_meta: bool, size: int
) -> None:
    workers.run(save_sized, str(tmp_path), size, world_size=2)
    results = workers.run(load_what_fits, str(tmp_path), exchange, on_meta, world_size=world_size)
    for mismatched, missing, unexpected, value, x in results:
        assert (missing, unexpected, value, x) == ([], [], "mine", [1.0, 1.0])
        assert [text.startswith(OUT_OF_RANGE) for text in mismatched] == [True]


def load_without_a(rank: int, world_size: int, path: str, rules: dict[str, Any], missing: Any) -> tuple[Any, ...]:
    holder: bcp.RankLocal = bcp.RankLocal({"a": "mine"}, merge="sum", missing=missing)
    state = {"n": holder, "x": torch.zeros(2)}
    report = bcp.load(path, state, **rules, options=bcp.LoadOptions(verify=False))
    value = {key: each if key == "a" else each.unique().tolist() for key, each in holder.value.items()}
    return value, state["x"].tolist(), report.unexpected, report.num_bytes_read


RULES = [{"exclude": "n.a"}, {"include": ["x", "n.b"]}, {"exclude": ["n.a*"]}]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_value_that_has_no_sum_can_be_left_out(
    workers: WorkerPool, tmp_path: Path, rules: dict[str, Any], size: int, world_size: int
) -> None:
    workers.run(save_sized, str(tmp_path), size, world_size=2)
    results = workers.run(load_without_a, str(tmp_path), rules, "error", world_size=world_size)
    for rank, (value, x, unexpected, num_bytes) in enumerate(results):
        assert (value, x, unexpected) == ({"a": "mine", "b": [0 if rank else 3]}, [1.0, 1.0], [])
        assert num_bytes < 4.5 * size * 8 + 10_000  # twice `b` of two ranks, and nothing of `a`


UNLIKE_PARTS: dict[str, tuple[list[Any], list[str]]] = {
    "lists of different lengths": ([[1], [1, 2]], ["n.a"]),
    "truths in a dict": ([{"b": True}, {"b": True}], ["n.a.*"]),
    "a dict and a number": ([{"b": 1}, 1], ["n.a*"]),
    "large shapes": ([torch.ones(LARGE), torch.ones(LARGE + 1)], ["n.a"]),
    "tensors in lists": ([[torch.ones(1), "x"], [torch.ones(1), "y"]], ["n.a.*"]),
}


def save_unlike(rank: int, world_size: int, path: str, case: str) -> None:
    bcp.save(path, {"n": bcp.RankLocal({"a": UNLIKE_PARTS[case][0][rank], "b": 1})})


@pytest.mark.parametrize("case", UNLIKE_PARTS)
def test_what_is_left_out_of_a_merge_may_differ_between_ranks(workers: WorkerPool, tmp_path: Path, case: str) -> None:
    workers.run(save_unlike, str(tmp_path), case, world_size=2)
    holder: bcp.RankLocal = bcp.RankLocal({"a": "mine"}, merge="sum")
    with pytest.raises(bcp.CheckpointMismatchError, match=r"n\.a"):
        bcp.load(tmp_path, {"n": holder})
    bcp.load(tmp_path, {"n": holder}, exclude=UNLIKE_PARTS[case][1])
    assert holder.value["b"] == 2


def test_only_leaves_by_their_own_names_are_left_out_of_a_merge(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_unlike, str(tmp_path), "lists of different lengths", world_size=2)
    with pytest.raises(bcp.CheckpointMismatchError, match="lists of different lengths"):
        bcp.load(tmp_path, {"n": bcp.RankLocal({}, merge="sum")}, exclude=["n.a.0", "n.b"])


def load_with_a_part_missing(rank: int, world_size: int, path: str) -> int:
    reads: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "apart", reads.append)
        state = {"n": bcp.RankLocal(None, merge="sum"), "x": torch.zeros(2), "not there": torch.zeros(1)}
        with pytest.raises(bcp.CheckpointMismatchError, match="missing_key: not there"):
            bcp.load(path, state)
    return len(reads)


@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_is_summed_for_a_state_that_does_not_fit_anyway(
    workers: WorkerPool, tmp_path: Path, world_size: int
) -> None:
    workers.run(save_sized, str(tmp_path), LARGE, world_size=2)
    assert workers.run(load_with_a_part_missing, str(tmp_path), world_size=world_size) == [0] * world_size


def load_without_n(rank: int, world_size: int, path: str, merge: Any, rules: dict[str, Any]) -> tuple[Any, ...]:
    holder: bcp.RankLocal = bcp.RankLocal("mine", merge=merge)
    state = {"n": holder, "x": torch.zeros(2)}
    report = bcp.load(path, state, **rules)
    return holder.value, state["x"].tolist(), report.missing, report.unexpected


@pytest.mark.parametrize("rules", [{"exclude": "n.*"}, {"exclude": ["n.a", "n.b"]}, {"include": "x"}], ids=str)
@pytest.mark.parametrize("merge", [None, "sum"])
def test_a_rank_without_a_saved_value_leaves_it_out_with_its_parts(
    workers: WorkerPool, tmp_path: Path, merge: str | None, rules: dict[str, Any]
) -> None:
    workers.run(save_sized, str(tmp_path), 3, world_size=2)
    results = workers.run(load_without_n, str(tmp_path), merge, rules, world_size=3)
    assert results == [("mine", [1.0, 1.0], [], [])] * 3


def load_of_a_part(rank: int, world_size: int, path: str) -> str:
    with pytest.raises(bcp.CheckpointMismatchError, match="none of them had this rank's number") as error:
        bcp.load(path, {"n": bcp.RankLocal({}), "x": torch.zeros(2)}, include=["n.a", "x"])
    assert "no entry" not in str(error.value)
    return error.value.kind


def test_a_rank_without_a_saved_value_is_told_so_if_a_part_of_it_is_included(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(save_sized, str(tmp_path), 3, world_size=2)
    assert workers.run(load_of_a_part, str(tmp_path), world_size=3) == ["missing_key"] * 3


def load_of_more_ranks(rank: int, world_size: int, path: str, name: str) -> str:
    with pytest.raises(bcp.CheckpointMismatchError) as error:
        bcp.load(path, {name: bcp.RankLocal({}), "x": torch.zeros(2)})
    return str(error.value).partition("The checkpoint has no entry")[2]


def test_a_value_that_other_ranks_have_counts_as_an_entry_of_the_checkpoint(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(save_sized, str(tmp_path), 3, world_size=2)
    assert workers.run(load_of_more_ranks, str(tmp_path), "n", world_size=3) == [""] * 3
    for text in workers.run(load_of_more_ranks, str(tmp_path), "m", world_size=3):
        assert text == " 'm': it has the entries n, x"


MERGED: dict[str, tuple[str, list[Any], Any]] = {
    "nan is largest": ("max", [1.0, math.nan], math.nan),
    "nan first": ("max", [math.nan, 1.0], math.nan),
    "any": ("max", [False, True], True),
    "whole integers": ("sum", [2**70, 1], 2**70 + 1),
    "the last bit": ("sum", [torch.tensor([2**62 + 1]), torch.tensor([2])], torch.tensor([2**62 + 3])),
    "unsigned": ("max", [torch.tensor([1], dtype=torch.uint64)] * 2, torch.tensor([1], dtype=torch.uint64)),
    "no dimension": ("sum", [torch.tensor(2), torch.tensor(3)], torch.tensor(5)),
    "an array of none": ("sum", [np.array(2.0), np.array(3.0)], np.array(5.0)),
    "empty": ("sum", [torch.ones(0), torch.ones(0)], torch.ones(0)),
    "small integers in float": ("sum", [torch.tensor([256.0]).bfloat16()] * 2, torch.tensor([512.0]).bfloat16()),
    "complex numbers": ("sum", [1j, 2j], 3j),
    "large integers": (
        "sum",
        [torch.full((LARGE,), 2**62), torch.full((LARGE,), 2**62 - 1)],
        torch.full((LARGE,), 2**63 - 1),
    ),
    "the largest of large integers": ("max", [torch.full((LARGE,), 2**62)] * 2, torch.full((LARGE,), 2**62)),
    "ordered": ("sum", [OrderedDict(b=1, a=2), OrderedDict(b=3, a=4)], OrderedDict(b=4, a=6)),
    "a key of some": ("max", [{"x": 1}, {"y": 2}], {"x": 1, "y": 2}),
    "same text": ("sum", ["text", "text"], "text"),
}


def test_a_sum_is_exact_whose_parts_are_out_of_range_on_the_way() -> None:
    numbers = [[100, -1], [100, -1], [-100, -126]]
    merged = merge({rank: np.array(each, np.int8) for rank, each in enumerate(numbers)}, "n", "sum")
    assert (merged.dtype, merged.tolist()) == (np.int8, [100, -128])


@pytest.mark.parametrize("case", MERGED)
def test_values_are_merged(workers: WorkerPool, tmp_path: Path, case: str) -> None:
    merge, _, expected = MERGED[case]
    workers.run(save_case, str(tmp_path), case, world_size=2)
    holder = bcp.RankLocal(None, merge=merge)
    bcp.load(tmp_path, {"n": holder})
    assert type(holder.value["a"]) is type(expected)
    assert repr(holder.value["a"]) == repr(expected)


@pytest.mark.parametrize(
    ("merge", "value", "why"),
    [
        ("sum", {"a": torch.tensor(True)}, r"n\.a is in a RankLocal with merge='sum', and truth values have no sum"),
        ("max", {"a": [1j]}, r"n\.a\.0 is in a RankLocal with merge='max', and complex numbers have no largest"),
        ("max", torch.ones(2).byte().view(torch.uint4), r"n is a tensor of torch\.uint4 in a RankLocal with merge="),
        ("sum", {"a": torch.Generator()}, "a random number generator in a RankLocal with merge='sum'"),
    ],
)
def test_what_could_not_be_merged_is_refused_when_it_is_saved(tmp_path: Path, merge: Any, value: Any, why: str) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=why) as error:
        bcp.save(tmp_path, {"n": bcp.RankLocal(value, merge=merge)})
    assert error.value.kind == "unsupported_value"


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"RankLocal\.merge takes None, 'sum' or 'max', not 'mean'"):
        bcp.RankLocal(1, merge="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"RngState\.elastic takes 'keep' or 'fold', not 'exact'"):
        bcp.RngState("exact")  # type: ignore[arg-type]
    odd: list[Any] = [0.7, np.float32(0.7), "first", None, float("inf")]
    for number in odd:
        with pytest.raises(ValueError, match=r"RngState\.at takes an integer for each dimension, not \{'pp': "):
            bcp.RngState(at={"pp": number})


def test_a_place_may_be_given_as_any_number_without_a_fraction() -> None:
    places: list[Any] = [1, True, 1.0, "1", np.int64(1), torch.tensor(1)]
    for number in places:
        at = bcp.RngState(at={"pp": number}).at
        assert at == {"pp": 1}
        assert type(at["pp"]) is int
