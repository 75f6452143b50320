"""Data loaders over streams count what the trainer took, whatever their workers and wrappers read ahead."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from data.sample_sources import KINDS, passes, plain
from torch.utils.data import DataLoader, IterableDataset

from bytecheckpoint.data import ShuffleBuffer, Streams, batch_messages
from bytecheckpoint.data.known_loaders import elastic_loader_of

NUM_STREAMS, LENGTH = 4, 10
WORKERS = [
    pytest.param({"num_workers": 0}, id="no workers"),
    pytest.param({"num_workers": 2}, id="two workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="two that live on"),
]


def sources(kind: str = "sequence") -> dict[str, Any]:
    return {f"s{each}": KINDS[kind](list(range(100 * each, 100 * each + LENGTH))) for each in range(NUM_STREAMS)}


def loader_of(streams: Streams, batch_size: int = 3, **options: Any) -> tuple[DataLoader, Any]:
    loader = DataLoader(streams, batch_size=batch_size, collate_fn=list, **options)
    tracked = elastic_loader_of(loader)
    assert tracked is not None
    return loader, tracked


def new_loader(kind: str = "sequence", **options: Any) -> tuple[DataLoader, Any]:
    return loader_of(Streams(sources(kind), rank=0, size=1, with_ids=True), **options)


def saved(tracked: Any) -> dict[str, Any]:
    assert tracked.refuse_inexact() is None
    return {each: copy.deepcopy(tracked.stream_state(each)) for each in tracked.stream_ids()}


def load(tracked: Any, state: dict[str, Any]) -> None:
    tracked.load_streams(state, tracked.shared_state())


def batches(loader: DataLoader) -> list[Any]:
    return [[(each, plain(sample)) for each, sample in batch] for batch in loader]


def take(iterator: Iterator[Any], number: int) -> list[Any]:
    return [[(each, plain(sample)) for each, sample in next(iterator)] for _ in range(number)]


def num_taken(tracked: Any) -> int:
    return sum(state["samples"] for state in saved(tracked).values())


@pytest.mark.parametrize(
    "sample",
    [
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.arange(8).reshape(4, 2)[1:2, 1],
    ],
    ids=["sparse", "conjugated", "one element of a column"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_worker_shuffles_samples_whose_bytes_cannot_be_sent_as_they_are(sample: torch.Tensor) -> None:
    streams = Streams({"a": ShuffleBuffer([sample] * 4, 2)}, rank=0, size=1, snapshot_every=1)
    loader, _ = loader_of(streams, batch_size=1, num_workers=1)
    assert all(torch.equal(each.to_dense(), sample.to_dense()) for (each,) in loader)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_worker_shuffles_nested_samples() -> None:
    sample = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    streams = Streams({"a": ShuffleBuffer([sample] * 4, 2)}, rank=0, size=1, snapshot_every=1)
    loader, _ = loader_of(streams, batch_size=1, num_workers=1)
    arrived = [[part.tolist() for part in each.unbind()] for (each,) in loader]
    assert arrived == [[[1.0, 1.0], [0.0, 0.0, 0.0]]] * 4


@pytest.mark.parametrize(
    "sample",
    [
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.arange(8).reshape(4, 2)[1:2, 1],
        torch.empty(0, 4),
        torch.tensor(3.0, dtype=torch.bfloat16),
    ],
    ids=["conjugated", "negated", "one element of a column", "empty", "without dimensions"],
)
def test_a_sample_in_a_buffer_arrives_with_its_values(sample: torch.Tensor) -> None:
    arrived = batch_messages._unpack_tensor(pickle.loads(pickle.dumps(batch_messages._pack_tensor(sample))))
    assert torch.equal(arrived, sample)
    assert (arrived.dtype, arrived.shape) == (sample.dtype, sample.shape)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_no_tensor_of_a_sample_is_sent_as_one_which_would_hold_a_file_open(kind: Callable[[Any], Any]) -> None:
    sent = batch_messages._converted(batch_messages._pack_tensor, [kind({"x": torch.ones(3)})])
    assert not isinstance(sent[0]["x"], torch.Tensor)
    (arrived,) = batch_messages._converted(batch_messages._unpack_tensor, sent)
    assert type(arrived) is kind
    assert torch.equal(arrived["x"], torch.ones(3))


@pytest.mark.parametrize("workers", WORKERS)
def test_the_state_counts_what_the_trainer_took(workers: dict[str, Any]) -> None:
    loader, tracked = new_loader(**workers)
    iterator = iter(loader)
    assert num_taken(tracked) == 0
    for step in range(1, 5):
        next(iterator)
        assert num_taken(tracked) == 3 * step


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_goes_on_with_the_batch_that_comes_next(kind: str, workers: dict[str, Any]) -> None:
    options = {"batch_size": 2, **workers}
    whole, _ = new_loader(kind, **options)
    uninterrupted = batches(whole) + batches(whole)
    first, tracked = new_loader(kind, **options)
    begun = take(iter(first), 3)
    second, resumed = new_loader(kind, **options)
    load(resumed, saved(tracked))
    assert begun + batches(second) + batches(second) == uninterrupted
    # And the workers that were started in the middle of a pass begin the next one as all others do.
    assert batches(second) == batches(whole)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_pass_that_was_broken_off_goes_on(workers: dict[str, Any]) -> None:
    whole, _ = new_loader(**workers)
    loader, _ = new_loader(**workers)
    begun = take(iter(loader), 2)
    assert begun + batches(loader) == batches(whole)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("num_batches", [2, 5])
def test_a_load_goes_back_in_a_loader_that_was_read(num_batches: int, workers: dict[str, Any]) -> None:
    loader, tracked = new_loader("shuffled records", **workers)
    iterator = iter(loader)
    take(iterator, 2)
    state = saved(tracked)
    after = take(iterator, num_batches)
    load(tracked, state)
    assert take(iter(loader), num_batches) == after
    with pytest.raises(RuntimeError, match="out of date"):
        next(iterator)


@pytest.mark.parametrize("workers", WORKERS)
def test_all_streams_begin_the_next_epoch_when_a_pass_ends(workers: dict[str, Any]) -> None:
    loader, tracked = new_loader("lines", drop_last=True, **workers)
    assert sum(map(len, batches(loader))) < NUM_STREAMS * LENGTH
    assert {(state["epoch"], state["position"]) for state in saved(tracked).values()} == {(1, 0)}


@pytest.mark.parametrize("kind", ["sequence", "lines"])
@pytest.mark.parametrize("workers", WORKERS)
def test_samples_that_a_loader_drops_are_not_counted(kind: str, workers: dict[str, Any]) -> None:
    loader, tracked = new_loader(kind, drop_last=True, **workers)
    num_in_passes = sum(len(batch) for _ in range(3) for batch in batches(loader))
    assert num_in_passes < 3 * NUM_STREAMS * LENGTH
    num_in_next = sum(map(len, take(iter(loader), 4)))
    assert num_taken(tracked) == num_in_passes + num_in_next


@pytest.mark.parametrize("workers", WORKERS)
def test_an_end_that_was_not_known_when_it_was_saved_gives_no_empty_pass(workers: dict[str, Any]) -> None:
    first, tracked = new_loader("lines", batch_size=5, **workers)
    take(iter(first), 8)
    assert any(state["epoch"] == 0 for state in saved(tracked).values())
    second, resumed = new_loader("lines", batch_size=5, **workers)
    load(resumed, saved(tracked))
    whole = batches(second)
    assert sum(map(len, whole)) == NUM_STREAMS * LENGTH
    assert {state["epoch"] for state in saved(resumed).values()} == {2}
    assert batches(second) == whole


@pytest.mark.parametrize("workers", WORKERS)
def test_a_worker_without_samples_gives_no_empty_pass(workers: dict[str, Any]) -> None:
    def new() -> tuple[DataLoader, Any]:
        return loader_of(Streams({"a": [1], "b": []}, rank=0, size=1, with_ids=True), batch_size=1, **workers)

    first, tracked = new()
    assert take(iter(first), 1) == [[("a", 1)]]
    second, resumed = new()
    load(resumed, saved(tracked))
    assert batches(second) == [[("a", 1)]]


@pytest.mark.parametrize("workers", WORKERS)
def test_endless_streams_are_one_pass(workers: dict[str, Any]) -> None:
    def endless() -> tuple[DataLoader, Any]:
        return loader_of(Streams(sources("packed lines"), rank=0, size=1, with_ids=True, endless=True), **workers)

    whole, _ = endless()
    uninterrupted = take(iter(whole), 40)
    first, tracked = endless()
    begun = take(iter(first), 17)
    second, resumed = endless()
    load(resumed, saved(tracked))
    assert begun + take(iter(second), 23) == uninterrupted


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loop_that_holds_batches_is_counted_behind_them(workers: dict[str, Any]) -> None:
    loader, tracked = loader_of(Streams(sources("lines"), rank=0, size=1, with_ids=True, read_ahead=1), **workers)
    whole, _ = new_loader("lines", **workers)
    iterator = iter(loader)
    take(iterator, 3)
    assert num_taken(tracked) == 6
    assert take(iterator, 3)
    list(iterator)
    assert num_taken(tracked) == NUM_STREAMS * LENGTH
    assert batches(loader) == batches(whole)
    assert num_taken(tracked) == 2 * NUM_STREAMS * LENGTH


def test_batches_of_single_samples_are_counted() -> None:
    loader = DataLoader(Streams(sources(), rank=0, size=1), batch_size=None, num_workers=1)
    tracked = elastic_loader_of(loader)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(3)] == [0, 100, 200]
    assert num_taken(tracked) == 3


def test_spawned_workers_are_counted() -> None:
    streams = Streams({"a": list(range(9)), "b": list(range(9))}, rank=0, size=1)
    loader = DataLoader(streams, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    tracked = elastic_loader_of(loader)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert num_taken(tracked) == 6


def test_asking_twice_counts_once() -> None:
    loader, tracked = new_loader()
    assert elastic_loader_of(loader) is tracked
    assert take(iter(loader), 1)
    assert num_taken(tracked) == 3


def test_pinned_batches_are_counted() -> None:
    loader = DataLoader(Streams(sources(), rank=0, size=1), batch_size=3)
    elastic_loader_of(loader)
    assert loader.collate_fn is not None
    iter(loader.dataset).__next__()
    batch = loader.collate_fn([torch.zeros(2)])
    assert type(batch).__name__ == "CountedBatch"
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"(?i)accelerator|cuda|pin"):
            batch.pin_memory()
    else:
        assert batch.pin_memory().batch.is_pinned()


def test_workers_that_nothing_counts_are_refused_at_the_save() -> None:
    streams = Streams(sources(), rank=0, size=1)
    loader = DataLoader(streams, batch_size=3, num_workers=1)
    assert streams.refuse_inexact() is None
    next(iter(loader))
    assert "Make bcp.DataLoaderState(loader, ...) of the DataLoader" in streams.refuse_inexact()


@pytest.mark.parametrize("workers", WORKERS[:2])
def test_another_loader_that_nothing_counts_is_refused_at_the_save(workers: dict[str, Any]) -> None:
    streams = Streams(sources(), rank=0, size=1, with_ids=True)
    loader, tracked = loader_of(streams)
    first = take(iter(loader), 2)
    other = DataLoader(streams, batch_size=5, collate_fn=list, **workers)
    next(iter(other))
    assert "nothing counts" in (tracked.refuse_inexact() or "")
    of_other = elastic_loader_of(other)
    rest = batches(other)
    taken = [each for batch in first + rest for each in batch]
    assert len(taken) == len(set(taken)) == num_taken(of_other) == NUM_STREAMS * LENGTH


@pytest.mark.parametrize("workers", WORKERS)
def test_an_iterator_from_before_is_out_of_date(workers: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    streams = Streams(sources(), rank=0, size=1, endless=True, with_ids=True)
    loader = DataLoader(streams, batch_size=3, collate_fn=list, **workers)
    iterator = iter(loader)
    next(iterator)
    elastic_loader_of(loader)
    assert ("what that pass has given" in caplog.text) == (workers["num_workers"] > 0)  # in this process it was counted
    with pytest.raises(RuntimeError, match="out of date"):
        take(iterator, 20)  # some were read ahead


def test_a_worker_that_is_late_for_a_pass_from_before_is_no_reason_to_refuse_a_save() -> None:
    """Someone looks at the first batch; another worker begins only when the loader counts."""
    counts = multiprocessing.get_context("fork").Event()
    loader = DataLoader(
        Streams(sources(), rank=0, size=1, with_ids=True),
        batch_size=3,
        collate_fn=list,
        num_workers=2,
        worker_init_fn=lambda worker: worker == 0 or counts.wait(),
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    next(iterator)
    tracked = elastic_loader_of(loader)
    counts.set()
    with pytest.raises(RuntimeError, match="out of date"):
        next(iterator)
    assert len(batches(loader)) * 3 >= num_taken(tracked) == NUM_STREAMS * LENGTH


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_that_failed_is_read_again(workers: dict[str, Any], tmp_path) -> None:
    marker = tmp_path / "failed"

    def collate(samples: list[int]) -> list[int]:
        if 101 in samples and not marker.exists():
            marker.touch()
            raise OSError("no space")
        return samples

    loader = DataLoader(Streams(sources("records"), rank=0, size=1), batch_size=3, collate_fn=collate, **workers)
    tracked = elastic_loader_of(loader)
    found, num_errors = [], 0
    iterator = iter(loader)
    while True:
        try:
            found += next(iterator)
        except OSError:
            num_errors += 1
        except StopIteration:
            break
    assert num_errors == 1
    assert sorted(found) == sorted(sample for source in sources().values() for sample in source)
    assert {state["epoch"] for state in saved(tracked).values()} == {1}


@pytest.mark.parametrize("workers", WORKERS[:2])
def test_a_stop_iteration_of_a_collate_fn_is_no_end_of_the_pass(workers: dict[str, Any]) -> None:
    def collate(samples: list[int]) -> list[int]:
        if 101 in samples:
            raise StopIteration
        return samples

    loader = DataLoader(Streams(sources(), rank=0, size=1), batch_size=3, collate_fn=collate, **workers)
    tracked = elastic_loader_of(loader)
    with pytest.raises(RuntimeError, match="collate_fn of the DataLoader raised StopIteration"):
        list(loader)
    assert {state["epoch"] for state in saved(tracked).values()} == {0}


def test_a_snapshot_comes_from_the_worker_when_one_is_asked_for() -> None:
    # A process that is forked while a thread of this one imports something waits for a lock that nobody gives back.
    loader, tracked = new_loader("records", num_workers=1, multiprocessing_context="spawn")
    iterator = iter(loader)
    take(iterator, 2)
    assert "snapshot" not in saved(tracked)["s0"]
    tracked.prepare_state()
    take(iterator, 8)
    snapshot = saved(tracked)["s0"]["snapshot"]
    assert snapshot["state"] == {"position": snapshot["position"]}


def test_tensors_in_snapshots_take_no_open_files() -> None:
    samples = [torch.full((3,), each, dtype=torch.bfloat16) for each in range(3000)]
    streams = Streams({"a": ShuffleBuffer(samples, 2500)}, rank=0, size=1, snapshot_every=10)
    loader = DataLoader(streams, batch_size=2500, num_workers=1)
    tracked = elastic_loader_of(loader)
    first = next(iter(loader))
    snapshot = tracked.stream_state("a")["snapshot"]
    assert len(snapshot["state"]["buffer"]) == 500
    left = torch.stack(snapshot["state"]["buffer"])
    assert left.dtype == torch.bfloat16
    assert sorted(torch.cat([first, left])[:, 0].tolist()) == sorted(sample[0].item() for sample in samples)


def doubled_in_place(sample: Any) -> None:
    if isinstance(sample, dict):
        doubled_in_place(sample["tokens"])
    elif isinstance(sample, list):
        sample[:] = [2 * each for each in sample]
    else:
        sample *= 2


@pytest.mark.parametrize(
    "make",
    [torch.tensor, np.array, list, lambda tokens: {"tokens": tokens}],
    ids=["tensors", "arrays", "lists", "dicts"],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_sample_that_is_changed_in_place_is_not_changed_in_a_state(make: Any, *, is_loaded: bool) -> None:
    def loader() -> tuple[DataLoader, Any]:
        samples = [make([number, number + 1]) for number in range(1, 9)]
        streams = Streams({"a": ShuffleBuffer(samples, 4)}, rank=0, size=1)
        loader = DataLoader(streams, batch_size=None, collate_fn=lambda sample: sample)
        return loader, elastic_loader_of(loader)

    first, tracked = loader()
    iterator = iter(first)
    next(iterator)
    state = {"a": tracked.stream_state("a")}
    if is_loaded:
        first, tracked = loader()
        load(tracked, state)
        iterator = iter(first)
    before = repr(state)
    for sample in iterator:
        doubled_in_place(sample)
    assert repr(state) == before


def test_a_dataset_around_streams_is_not_known() -> None:
    class Around(IterableDataset):
        def __init__(self, inner: Streams) -> None:
            self.inner = inner

        def __iter__(self) -> Iterator[Any]:
            return iter(self.inner)

    assert elastic_loader_of(DataLoader(Around(Streams(sources(), rank=0, size=1)))) is None


@pytest.mark.parametrize("kind", ["lines", "records", "packed records"])
def test_an_ended_stream_is_complete_after_many_epochs(kind: str) -> None:
    loader, tracked = new_loader(kind, num_workers=2, persistent_workers=True, batch_size=4)
    found: dict[str, list[Any]] = {each: [] for each in sources()}
    for _ in range(3):
        for batch in batches(loader):
            for stream_id, sample in batch:
                found[stream_id].append(sample)
    assert found == {each: passes(source, 3) for each, source in sources(kind).items()}
    again, resumed = new_loader(kind, num_workers=2, batch_size=4)
    load(resumed, saved(tracked))
    for batch in batches(again):
        for stream_id, sample in batch:
            found[stream_id].append(sample)
    assert found == {each: passes(source, 4) for each, source in sources(kind).items()}


def test_workers_end_with_the_loader() -> None:
    loader, tracked = new_loader(num_workers=2, persistent_workers=True)
    take(iter(loader), 2)
    assert len(multiprocessing.active_children()) >= 2
    workers = loader._iterator._workers
    del loader, tracked
    for worker in workers:
        worker.join(timeout=60)
    assert not any(worker.is_alive() for worker in workers)
