"""Streams in one process: order, epochs, state, and what is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from data.sample_sources import KINDS, EpochOrder, Lines, Records, documents, passes, plain
from torch.utils.data import IterableDataset, get_worker_info

from bytecheckpoint.data import ElasticLoader, Packer, ShuffleBuffer, Streams
from bytecheckpoint.data.elastic_loader import assign_streams
from bytecheckpoint.errors import CheckpointMismatchError


def lists(*lengths: int) -> dict[str, list[int]]:
    return {f"s{number}": [100 * number + each for each in range(length)] for number, length in enumerate(lengths)}


def state_of(*loaders: Any) -> dict[str, Any]:
    return {each: copy.deepcopy(loader.stream_state(each)) for loader in loaders for each in loader.stream_ids()}


def load(loader: Any, state: dict[str, Any], rank: int, size: int) -> None:
    ids = assign_streams(loader, sorted(state), size)[rank]
    loader.load_streams({each: state[each] for each in ids}, loader.shared_state())


def test_samples_come_from_the_streams_in_turn() -> None:
    streams = Streams(lists(3, 1, 2), rank=0, size=1)
    assert isinstance(streams, ElasticLoader)
    assert list(streams) == [0, 100, 200, 1, 201, 2]


def test_streams_are_read_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        streams = Streams(lists(3, 1, 2), rank=0, size=1)
        assert list(streams) == [0, 100, 200, 1, 201, 2]


def test_ranks_own_every_other_stream() -> None:
    ranks = [Streams(lists(2, 2, 2), rank=rank, size=2, with_ids=True) for rank in range(2)]
    assert [each.stream_ids() for each in ranks] == [["s0", "s2"], ["s1"]]
    assert list(ranks[1]) == [("s1", 100), ("s1", 101)]


def test_the_next_pass_is_the_next_epoch() -> None:
    streams = Streams({"a": EpochOrder([0, 1, 2, 3])}, rank=0, size=1)
    assert [list(streams), list(streams)] == [[0, 1, 2, 3], [3, 0, 1, 2]]
    assert streams.stream_state("a") == {"epoch": 2, "position": 0, "samples": 8, "turn": 0, "source": "EpochOrder"}


def test_a_broken_off_pass_goes_on() -> None:
    streams = Streams(lists(3, 3), rank=0, size=1)
    assert list(itertools.islice(streams, 3)) == [0, 100, 1]
    assert list(streams) == [101, 2, 102]
    assert list(streams) == [0, 100, 1, 101, 2, 102]


def test_a_stream_whose_last_sample_was_taken_is_at_the_next_epoch() -> None:
    streams = Streams(lists(1, 3), rank=0, size=1)
    next(iter(streams))
    assert state_of(streams)["s0"] == {"epoch": 1, "position": 0, "samples": 1, "turn": 0, "source": "list"}


def test_an_end_that_was_not_known_when_it_was_saved_gives_no_empty_pass() -> None:
    first = Streams({"a": Lines([1, 2])}, rank=0, size=1)
    assert list(itertools.islice(first, 2)) == [1, 2]
    saved = state_of(first)
    assert saved["a"]["position"] == 2
    second = Streams({"a": Lines([1, 2])}, rank=0, size=1)
    load(second, saved, 0, 1)
    assert list(second) == [1, 2]
    assert second.stream_state("a")["epoch"] == 2


@pytest.mark.parametrize("empty", [[], Lines([])], ids=["sequence", "lines"])
def test_a_stream_without_samples_that_is_left_over_gives_no_empty_pass(empty: Any) -> None:
    first = Streams({"a": [1], "b": empty}, rank=0, size=1)
    assert next(iter(first)) == 1
    saved = state_of(first)
    assert [saved[each]["epoch"] for each in "ab"] == [1, 0]
    second = Streams({"a": [1], "b": empty}, rank=0, size=1)
    load(second, saved, 0, 1)
    assert list(second) == [1]
    assert {state["epoch"] for state in state_of(second).values()} == {2}


def test_a_pass_over_no_samples_ends() -> None:
    streams = Streams({"a": [], "b": Lines([])}, rank=0, size=1)
    assert list(streams) == []
    assert list(streams) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_taken", [0, 1, 7, 10, 11, 14, 23])
def test_each_kind_of_source_goes_on_where_it_was(kind: str, num_taken: int) -> None:
    def streams() -> Streams:
        return Streams({"a": KINDS[kind](list(range(20)))}, rank=0, size=1, endless=True)

    whole = passes(KINDS[kind](list(range(20))), 6)
    first, second = streams(), streams()
    assert [plain(each) for each in itertools.islice(first, num_taken)] == whole[:num_taken]
    load(second, state_of(first), 0, 1)
    rest = [plain(each) for each in itertools.islice(second, 30)]
    assert rest == whole[num_taken : num_taken + 30]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_taken", [0, 1, 7])
def test_a_copy_for_another_process_goes_on_where_it_was(kind: str, num_taken: int) -> None:
    streams = Streams({"a": KINDS[kind](list(range(20)))}, rank=0, size=1)
    taken = [plain(each) for each in itertools.islice(streams, num_taken)]
    rest = [plain(each) for each in pickle.loads(pickle.dumps(streams))]
    assert taken + rest == passes(KINDS[kind](list(range(20))), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_goes_back_in_a_loader_that_was_read(kind: str) -> None:
    streams = Streams({"a": KINDS[kind](list(range(20)))}, rank=0, size=1, endless=True)
    start = state_of(streams)
    first = [plain(each) for each in itertools.islice(streams, 12)]
    load(streams, start, 0, 1)
    assert [plain(each) for each in itertools.islice(streams, 12)] == first


def test_a_pass_that_a_load_overtook_says_so() -> None:
    streams = Streams(lists(5), rank=0, size=1)
    old = iter(streams)
    next(old)
    load(streams, state_of(streams), 0, 1)
    with pytest.raises(RuntimeError, match="out of date"):
        next(old)


def test_a_second_pass_puts_the_first_out_of_date() -> None:
    streams = Streams(lists(5), rank=0, size=1)
    old, new = iter(streams), iter(streams)
    assert [next(old), next(new)] == [0, 1]
    with pytest.raises(RuntimeError, match="out of date"):
        next(old)


def test_endless_streams_go_through_epochs() -> None:
    streams = Streams(lists(2, 1), rank=0, size=1, endless=True)
    assert list(itertools.islice(streams, 7)) == [0, 100, 1, 0, 100, 1, 0]


def test_endless_streams_without_samples_end() -> None:
    assert list(Streams({"a": []}, rank=0, size=1, endless=True)) == []


def test_endless_streams_without_samples_in_different_epochs_end() -> None:
    streams = Streams({"a": [], "b": []}, rank=0, size=1, endless=True)
    saved = state_of(streams)
    saved["b"]["epoch"] = 1
    load(streams, saved, 0, 1)
    assert list(streams) == []


def test_four_ranks_go_on_as_two_and_as_three() -> None:
    sources = lists(*range(3, 15))
    saved, found = {}, []
    for size in (4, 2, 3):
        ranks = [Streams(sources, rank=rank, size=size, with_ids=True) for rank in range(size)]
        for rank, streams in enumerate(ranks):
            if saved:
                load(streams, saved, rank, size)
        for streams in ranks:
            found += itertools.islice(streams, 24 // size)
        saved = state_of(*ranks)
    for stream_id, samples in sources.items():
        taken = [sample for each, sample in found if each == stream_id]
        assert taken == (samples * 3)[: len(taken)]
        assert len(taken) == saved[stream_id]["samples"]
    assert len(found) == 72


def test_an_error_of_a_source_loses_no_sample() -> None:
    class Flaky(Lines):
        num_errors = 1

        def __iter__(self) -> Any:
            for sample in self.samples:
                if sample == 2 and self.num_errors:
                    self.num_errors -= 1
                    raise OSError("connection reset")
                yield sample

    streams = iter(Streams({"a": Flaky([1, 2, 3])}, rank=0, size=1))
    assert next(streams) == 1
    with pytest.raises(OSError, match="connection reset"):
        next(streams)
    assert list(streams) == [2, 3]


def test_a_stop_iteration_of_a_source_is_no_end_of_the_pass() -> None:
    class Stopping(EpochOrder):
        num_errors = 1

        def __getitem__(self, index: int) -> Any:
            if index == 1 and self.num_errors:
                self.num_errors -= 1
                raise StopIteration
            return super().__getitem__(index)

    loader = Streams({"a": Stopping([1, 2, 3])}, rank=0, size=1)
    streams = iter(loader)
    assert next(streams) == 1
    with pytest.raises(RuntimeError, match="the source of stream 'a' raised StopIteration"):
        next(streams)
    assert loader.stream_state("a")["position"] == 1
    assert list(streams) == [2, 3]


def test_an_iterable_dataset_of_torch_with_a_length_is_no_sequence() -> None:
    class Sized(IterableDataset[int]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2, 3])

    assert list(Streams({"a": Sized()}, rank=0, size=1)) == [1, 2, 3]


def test_a_snapshot_is_taken_where_the_trainer_is() -> None:
    streams = Streams({"a": Records(list(range(50)))}, rank=0, size=1)
    list(itertools.islice(streams, 7))
    assert streams.stream_state("a")["snapshot"] == {"epoch": 0, "position": 7, "samples": 7, "state": {"position": 7}}


def test_a_prepared_snapshot_costs_the_save_nothing() -> None:
    source = Records(list(range(50)))
    streams = Streams({"a": source}, rank=0, size=1)
    list(itertools.islice(streams, 7))
    streams.prepare_state()
    assert next(iter(streams)) == 7
    num_asked = source.num_asked
    saved = streams.stream_state("a")
    assert source.num_asked == num_asked
    assert (saved["position"], saved["snapshot"]["position"]) == (8, 7)
    again = Streams({"a": Records(list(range(50)))}, rank=0, size=1)
    load(again, {"a": saved}, 0, 1)
    assert next(iter(again)) == 8


def test_a_load_reads_at_most_the_samples_since_the_snapshot() -> None:
    streams = Streams({"a": Records(list(range(50)))}, rank=0, size=1, snapshot_every=4)
    streams.is_tracked = True  # as inside a loader that reads ahead, so that nothing is asked at the save
    reader = streams._begin_pass()
    list(itertools.islice(reader, 10))
    streams._take(reader.take_changes(), 1)
    streams._lose_places()
    saved = streams.stream_state("a")
    assert saved["snapshot"]["position"] == 8
    source = Records(list(range(50)))
    again = Streams({"a": source}, rank=0, size=1)
    load(again, {"a": saved}, 0, 1)
    assert next(iter(again)) == 10
    assert source.num_read == 3


def test_a_source_that_ends_once_and_for_all_is_no_epoch_less() -> None:
    class Spent(Records):
        def __iter__(self) -> Any:
            while self.position < len(self.samples):
                self.position += 1
                yield self.samples[self.position - 1]

    streams = Streams({"a": Spent([1, 2])}, rank=0, size=1)
    assert list(streams) == [1, 2]
    with pytest.raises(ValueError, match="must begin a new pass each time"):
        list(streams)
    again = Streams({"a": Spent([1, 2])}, rank=0, size=1)
    load(again, state_of(streams), 0, 1)
    with pytest.raises(ValueError, match="must begin a new pass each time"):
        list(again)


def test_a_source_with_fewer_samples_than_were_taken_is_refused() -> None:
    message = "stands at sample 7 of epoch 0"
    long = Streams({"a": Lines(range(9))}, rank=0, size=1)
    list(itertools.islice(long, 7))
    with pytest.raises(CheckpointMismatchError, match=message):
        load(Streams({"a": list(range(5))}, rank=0, size=1), state_of(long), 0, 1)
    without_length = Streams({"a": Lines(range(5))}, rank=0, size=1)
    load(without_length, state_of(long), 0, 1)
    with pytest.raises(CheckpointMismatchError, match=message):
        next(iter(without_length))


def test_other_streams_are_refused_and_nothing_changes() -> None:
    streams = Streams(lists(3, 3), rank=0, size=1)
    next(iter(streams))
    before = state_of(streams)
    with pytest.raises(CheckpointMismatchError, match="the unknown streams \\['s2'\\]"):
        streams.load_streams({"s2": {}}, streams.shared_state())
    with pytest.raises(CheckpointMismatchError, match=r"cannot take over \{'consumed': 3\}"):
        streams.load_streams(before, {"consumed": 3})
    with pytest.raises(CheckpointMismatchError, match="is not one of"):
        streams.load_streams({"s0": before["s0"], "s1": {"epoch": -1}}, streams.shared_state())
    assert state_of(streams) == before


def test_a_load_gives_up_all_other_streams() -> None:
    streams = Streams(lists(3, 3, 3), rank=0, size=1)
    streams.load_streams({"s1": streams.stream_state("s1")}, streams.shared_state())
    assert streams.stream_ids() == ["s1"]
    assert list(streams) == [100, 101, 102]


def test_a_buffer_that_is_new_or_gone_is_refused() -> None:
    packed, bare = (Streams({"a": KINDS[kind](list(range(9)))}, rank=0, size=1) for kind in ("packed lines", "lines"))
    next(iter(packed))
    with pytest.raises(CheckpointMismatchError, match=r"with the source Packer\[3\]\(Lines\).*reads it from Lines"):
        load(bare, state_of(packed), 0, 1)


@pytest.mark.parametrize("other", [{"size": 5, "seed": 1}, {"size": 4, "seed": 2}], ids=["size", "seed"])
@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: Packer(each, 3)], ids=["alone", "packed"])
def test_a_buffer_of_another_order_is_refused(wrap: Any, other: dict[str, int]) -> None:
    def streams(size: int, seed: int) -> Streams:
        return Streams({"a": wrap(ShuffleBuffer(documents(list(range(20))), size, seed=seed))}, rank=0, size=1)

    saved = state_of(streams(4, 1))
    load(streams(4, 1), saved, 0, 1)
    with pytest.raises(CheckpointMismatchError, match=r"saved with the source .*ShuffleBuffer\[4, seed 1\]\(list\)"):
        load(streams(**other), saved, 0, 1)
    saved["a"]["source"] = saved["a"]["source"].replace("[4, seed 1]", "")  # as earlier versions have named it
    load(streams(4, 1), saved, 0, 1)


def test_integers_of_numpy_are_taken_by_buffers_as_others_are() -> None:
    plain_one = Packer(ShuffleBuffer([[1, 2], [3], [4, 5]], 2, seed=3), 2)
    of_numpy = Packer(ShuffleBuffer([[1, 2], [3], [4, 5]], np.int64(2), seed=np.int64(3)), np.int32(2))  # type: ignore[arg-type]
    first, second = (Streams({"a": each}, rank=0, size=1) for each in (plain_one, of_numpy))
    load(second, state_of(first), 0, 1)
    assert list(map(plain, second)) == list(map(plain, first))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_are_packed_on_the_host_whatever_device_is_the_default(kind: Any) -> None:
    made = list(map(kind, [[1, 2, 3], [4, 5, 6], [7]]))
    with torch.device("meta"):  # as after torch.set_default_device, which a trainer calls for its GPU
        packer = Packer(made, 2)
        first = next(iter(packer))
        resumed = Packer(made, 2)
        resumed.load_state_dict(packer.state_dict())
        rest = list(resumed)
    assert [row.tolist() for row in (first, *rest)] == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        (["words"], "got a str: tokenize first"),
        ([{"ids": [1, 2]}], "got a dict: tokenize first, or pass key="),
        ([torch.ones(2, 2)], r"this one has the shape \(2, 2\)"),
        ([[1], torch.ones(2)], r"tokens of torch.float32 and those before it of torch.int64"),
    ],
)
def test_documents_that_make_no_rows_are_refused_with_the_reason(documents: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        list(Packer(documents, 2))


@pytest.mark.parametrize("view", [lambda each: each, torch.from_numpy], ids=["array", "tensor"])
def test_a_source_may_reuse_the_memory_of_its_documents(view: Callable[[np.ndarray], Any]) -> None:
    """Documents that fill no row yet had the tokens of the last one."""

    class Reusing:
        def __iter__(self) -> Iterator[Any]:
            buffer = np.zeros(2, np.int64)
            for number in range(4):
                buffer[:] = number
                yield view(buffer)

    assert [row.tolist() for row in Packer(Reusing(), 3)] == [[0, 0, 1], [1, 2, 2]]


def test_the_tokens_of_a_document_are_found_in_a_dict_and_rows_of_another_length_are_refused() -> None:
    packer = Packer([{"ids": [1, 2, 3]}], 2, key="ids")
    assert [row.tolist() for row in packer] == [[1, 2]]
    with pytest.raises(ValueError, match="with rows of 2 tokens, and this one makes rows of 3: positions count rows"):
        Packer([{"ids": [1, 2, 3]}], 3, key="ids").load_state_dict(packer.state_dict())


def test_a_row_of_many_short_documents_counts_each_of_them_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    numel, num_counts = torch.Tensor.numel, 0

    def counting(tensor: torch.Tensor) -> int:
        nonlocal num_counts
        num_counts += 1
        return numel(tensor)

    monkeypatch.setattr(torch.Tensor, "numel", counting)
    first, second, *_ = Packer([[number] for number in range(450)], 200)
    assert [*first.tolist(), *second.tolist()] == list(range(400))
    assert num_counts < 10 * 450


@pytest.mark.parametrize("arguments", [{"size": 2.0}, {"size": 2, "seed": None}, {"size": True}])
def test_a_buffer_whose_size_or_seed_is_no_integer_is_refused_at_once(arguments: Any) -> None:
    with pytest.raises(ValueError, match="size and seed of a ShuffleBuffer are integers, not"):
        ShuffleBuffer([1], **arguments)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_state_stays_when_a_training_loop_changes_samples_of_a_buffer(kind: Callable[[Any], Any]) -> None:
    buffer = ShuffleBuffer([kind({"x": torch.zeros(2)}) for _ in range(4)], 4)
    samples = iter(buffer)
    next(samples)
    state = buffer.state_dict()
    for sample in samples:
        sample["x"].add_(1)
    assert not any(bool(each["x"].any()) for each in state["buffer"])


def test_a_buffer_with_no_room_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="has room for 0 samples; it needs 1 or more"):
        ShuffleBuffer([1], 0)


@pytest.mark.parametrize("length", [0, 2.0, True])
def test_rows_of_no_whole_number_of_tokens_are_refused_at_once(length: Any) -> None:
    with pytest.raises(ValueError, match="a row has a whole number of them, 1 or more"):
        Packer([[1]], length)


def test_sources_do_not_see_that_they_are_read_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils import worker

    class Seeing(Lines):
        def __iter__(self) -> Any:
            for sample in self.samples:
                yield sample, get_worker_info()

    info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(worker, "_worker_info", info)
    assert list(Streams({"a": Seeing([1, 2])}, rank=0, size=1)) == [(1, None), (2, None)]
    assert get_worker_info() is info


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (lists(1), {"rank": 0, "size": 2}, "1 streams cannot be shared out to 2 ranks"),
        ([[1], [2]], {"rank": 0, "size": 1}, "sources is a list; it is a dict"),
        (lists(1), {"rank": 1, "size": 1}, "rank 1 is not one of 1 ranks"),
        (lists(1), {"rank": 0, "size": 1, "snapshot_every": 0}, "1 or more"),
        ({1: []}, {"rank": 0, "size": 1}, "the id of a stream is a text; 1 is a int"),
        ({"": []}, {"rank": 0, "size": 1}, "the id of a stream is empty"),
        ({"a": iter([])}, {"rank": 0, "size": 1}, "can be read once and never again"),
        ({"a": {"b": 1}}, {"rank": 0, "size": 1}, "a source is a sequence of samples or an iterable"),
        ({"a": 5}, {"rank": 0, "size": 1}, "the source of stream 'a' is a int"),
    ],
)
def test_what_cannot_be_streams_is_refused(sources: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Streams(sources, **options)


@pytest.mark.parametrize("source", [Records([1, 2]), EpochOrder([1, 2])], ids=["records", "epoch order"])
def test_two_streams_that_would_move_one_source_are_refused(source: Any) -> None:
    with pytest.raises(ValueError, match=r"streams 'a' and 'b' have the same .* as their source"):
        Streams({"a": source, "b": source}, rank=0, size=1)


def test_two_streams_whose_buffers_would_move_one_source_are_refused() -> None:
    source = Records([1, 2])
    sources = {"a": Packer(ShuffleBuffer(source, 2), 1), "b": ShuffleBuffer(source, 2)}
    with pytest.raises(ValueError, match="streams 'a' and 'b' have the same Records as their source"):
        Streams(sources, rank=0, size=1)


def test_two_streams_may_read_one_source_that_keeps_no_place() -> None:
    samples = [1, 2]
    assert list(Streams({"a": samples, "b": samples}, rank=0, size=1)) == [1, 1, 2, 2]
