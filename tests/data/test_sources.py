"""Sources that carry something over from one pass to the next, and those that do not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from data.sample_sources import Records

from bytecheckpoint.data import Streams
from bytecheckpoint.data.sources import carries_over, inexact_reason


@pytest.mark.parametrize("module", ["records", "datasets.records", "datasets.iterable_dataset"])
def test_what_a_pass_left_is_kept_whatever_the_package_of_the_source_is_called(module: str) -> None:
    class Rising(Records):
        """Each pass begins with what the last one came to."""

        total = 0

        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                self.total += sample
                yield self.total

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"total": self.total}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.total = state["total"]

    Rising.__module__ = module
    streams = Streams({"a": Rising([1, 2])}, rank=0, size=1, snapshot_every=1)
    streams.is_tracked = True  # as inside a loader that reads ahead, so that nothing is asked at the save
    reader = streams._begin_pass()
    assert [sample for _, sample in reader] == [1, 3]
    streams._take(reader.take_changes(), 1)
    streams._lose_places()
    saved = streams.stream_state("a")
    assert saved["epoch"] == 1
    again = Streams({"a": Rising([1, 2])}, rank=0, size=1)
    again.load_streams({"a": saved}, again.shared_state())
    assert list(again) == [4, 6]


def test_an_iterable_dataset_of_hugging_face_begins_each_epoch_anew_also_in_a_subclass() -> None:
    def state_dict(self: Any) -> dict[str, Any]:
        return Records.state_dict(self)

    members = {"__module__": "datasets.iterable_dataset", "state_dict": state_dict, "_ex_iterable": None}
    hugging_face = type("IterableDataset", (Records,), members)
    subclass = type("Own", (hugging_face,), {"__module__": "records"})
    with_own_state = type("Own", (hugging_face,), {"__module__": "records", "state_dict": state_dict})
    assert [carries_over(each([])) for each in (hugging_face, subclass, with_own_state)] == [False, False, True]


def examples(*kinds: str, iter_arrow: object = None) -> Any:
    """Nested parts of a dataset of Hugging Face, the outermost first."""
    inner = None
    for kind in reversed(kinds):
        inner = type(f"{kind}ExamplesIterable", (), {"ex_iterable": inner, "iter_arrow": iter_arrow})()
    return inner


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        (("Arrow",), None),
        (("Mapped", "Formatted", "RebatchedArrow", "Arrow"), None),
        (("Filtered", "Formatted", "Arrow"), "before 5.1"),
        (("Take", "Mapped", "Formatted", "Arrow"), "before 5.1"),
        (("Mapped", "BufferShuffled", "Arrow"), "loses the content of its buffer"),
    ],
)
def test_datasets_of_hugging_face_whose_state_skips_samples_are_told(kinds: tuple[str, ...], why: str | None) -> None:
    members = {
        "__module__": "datasets.iterable_dataset",
        "state_dict": Records.state_dict,
        "_ex_iterable": examples(*kinds, iter_arrow=list),
    }
    reason = inexact_reason(type("IterableDataset", (Records,), members)([]))
    assert (reason is None) if why is None else (why in str(reason))


def test_a_filter_over_tables_that_are_given_as_arrays_is_told() -> None:
    filtered = examples("Filtered", "Formatted", "Arrow", iter_arrow=list)
    filtered.ex_iterable.iter_arrow = None  # as with_format("numpy") has it
    members = {
        "__module__": "datasets.iterable_dataset",
        "state_dict": Records.state_dict,
        "_ex_iterable": filtered,
    }
    assert "before 5.1" in str(inexact_reason(type("IterableDataset", (Records,), members)([])))


@pytest.mark.parametrize(("release", "why"), [("5.0", "before 5.1"), ("5.1", "None")])
def test_a_shuffle_of_shards_alone_is_told_where_its_state_skips_a_sample(
    monkeypatch: pytest.MonkeyPatch, release: str, why: str
) -> None:
    module = ModuleType("datasets.iterable_dataset")
    if release == "5.1":
        monkeypatch.setattr(module, "InterleavedShardsExamplesIterable", object, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shuffled = examples("BufferShuffled", "Arrow")
    shuffled.buffer_size, type(shuffled).__module__ = 1, module.__name__
    members = {"__module__": module.__name__, "state_dict": Records.state_dict, "_ex_iterable": shuffled}
    assert why in str(inexact_reason(type("IterableDataset", (Records,), members)([])))


@pytest.mark.parametrize(
    ("seed", "why"), [(None, "without a seed"), (1 << 64, "be told from none"), (3, "None"), ([3, 1], "None")]
)
def test_a_shuffle_of_shards_without_a_seed_is_told(monkeypatch: pytest.MonkeyPatch, seed: Any, why: str) -> None:
    module = ModuleType("datasets.iterable_dataset")
    monkeypatch.setattr(module, "InterleavedShardsExamplesIterable", object, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    shuffled = examples("BufferShuffled", "Arrow")
    shuffled.buffer_size, shuffled.generator = 1, np.random.default_rng(seed)
    type(shuffled).__module__ = module.__name__
    members = {"__module__": module.__name__, "state_dict": Records.state_dict, "_ex_iterable": shuffled}
    assert why in str(inexact_reason(type("IterableDataset", (Records,), members)([])))


def test_a_map_over_what_is_no_table_goes_on_exactly() -> None:
    members = {
        "__module__": "datasets.iterable_dataset",
        "state_dict": Records.state_dict,
        "_ex_iterable": examples("Mapped", "Formatted", ""),
    }
    assert inexact_reason(type("IterableDataset", (Records,), members)([])) is None
