"""Streams over datasets of Hugging Face, torchdata and webdataset, and in loaders of torchdata and accelerate: a run
that is stopped and goes on gives what one gives that was not stopped.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import bytecheckpoint as bcp
from bytecheckpoint.data import Packer, ShuffleBuffer, Streams
from bytecheckpoint.data.known_loaders import elastic_loader_of

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]  # of the packages
NUM_STREAMS, LENGTH = 3, 12

Make = Callable[[int], Any]
"""Makes the source of a stream by its number."""


def map_style(number: int) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"id": list(range(100 * number, 100 * number + LENGTH))})


def iterable(number: int) -> Any:
    return map_style(number).to_iterable_dataset(num_shards=4)


def mapped(number: int) -> Any:
    return iterable(number).map(lambda sample: {"id": sample["id"] + 1000}).filter(lambda sample: sample["id"] % 3 > 0)


def shuffled(number: int) -> Any:
    return ShuffleBuffer(iterable(number), 5, seed=number)


def packed(number: int) -> Any:
    tokens = iterable(number).map(lambda sample: {"tokens": [sample["id"]] * (sample["id"] % 4)})
    return Packer(tokens, 5, key="tokens")


def stateful_loader(number: int) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    samples = list(range(100 * number, 100 * number + LENGTH))
    return stateful.StatefulDataLoader(samples, batch_size=2, collate_fn=list)


def nodes(number: int) -> Any:
    node = pytest.importorskip("torchdata.nodes")
    return node.Loader(node.IterableWrapper(list(range(100 * number, 100 * number + LENGTH))))


def web_dataset(folder: Path, number: int, **options: Any) -> Any:
    webdataset = pytest.importorskip("webdataset")
    paths = [str(folder / f"{number}-{part}.tar") for part in range(2)]
    for part, path in enumerate(paths):
        with tarfile.open(path, "w") as archive:
            for sample in range(LENGTH // 2):
                data = str(100 * number + 10 * part + sample).encode()
                member = tarfile.TarInfo(f"{number}-{part}-{sample}.txt")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return webdataset.WebDataset(paths, shardshuffle=False, **options).decode().to_tuple("txt")


@pytest.fixture(autouse=True)
def _leave_no_garbage() -> Iterator[None]:
    """Datasets whose passes were broken off leave files open, which their packages warn of."""
    yield
    gc.collect()


KINDS: dict[str, Make] = {
    make.__name__: make for make in (map_style, iterable, mapped, shuffled, packed, stateful_loader, nodes)
}


@pytest.fixture(params=[*KINDS, "web_dataset"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return KINDS.get(request.param, lambda number: web_dataset(tmp_path, number))


def streams(make: Make, rank: int = 0, size: int = 1) -> Streams:
    return Streams({f"s{each}": make(each) for each in range(NUM_STREAMS)}, rank=rank, size=size, with_ids=True)


def batches(loader: Any) -> list[str]:
    return [repr(batch) for batch in loader]


def go_on(old: Any, new: Any) -> None:
    assert old.refuse_inexact() is None
    states = {each: copy.deepcopy(old.stream_state(each)) for each in old.stream_ids()}
    new.load_streams(states, old.shared_state())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_taken", [1, 4, 9])
def test_a_data_loader_goes_on(make: Make, num_workers: int, num_taken: int) -> None:
    def loader() -> DataLoader:
        return DataLoader(streams(make), batch_size=2, num_workers=num_workers, collate_fn=list)

    whole, first, second = loader(), loader(), loader()
    of_whole, of_first, of_second = (elastic_loader_of(each) for each in (whole, first, second))
    uninterrupted = batches(whole) + batches(whole)
    begun = batches(itertools.islice(first, num_taken))
    go_on(of_first, of_second)
    rest = batches(second)
    assert begun + (rest + batches(second) if begun + rest != uninterrupted else rest) == uninterrupted
    assert of_whole is not None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_second_epoch_has_all_samples(make: Make, num_workers: int) -> None:
    loader = DataLoader(streams(make), batch_size=2, num_workers=num_workers, collate_fn=list)
    tracked = elastic_loader_of(loader)
    first = [sample for batch in loader for sample in batch]
    assert {state["epoch"] for state in map(tracked.stream_state, tracked.stream_ids())} == {1}
    second = [sample for batch in loader for sample in batch]
    if "packed" not in repr(make):
        assert len(first) == len(second) >= NUM_STREAMS


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_counts_what_the_trainer_took(num_workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        samples = {f"s{each}": list(range(100 * each, 100 * each + LENGTH)) for each in range(4)}
        return stateful.StatefulDataLoader(
            Streams(samples, rank=0, size=1), batch_size=3, num_workers=num_workers, collate_fn=list
        )

    whole, first, second = loader(), loader(), loader()
    first.state_dict()  # starts workers before the state is loaded, as accelerate does
    second.state_dict()
    tracked = [elastic_loader_of(each) for each in (whole, first, second)]
    uninterrupted = list(whole) + list(whole)
    begun = list(itertools.islice(first, 5))
    assert sum(tracked[1].stream_state(each)["samples"] for each in tracked[1].stream_ids()) == 15
    second.state_dict()
    go_on(tracked[1], tracked[2])
    assert begun + list(second) + list(second) == uninterrupted


@pytest.mark.parametrize("use_stateful", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_of_accelerate_counts_what_the_trainer_took(num_workers: int, use_stateful: bool) -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    if use_stateful:
        pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        samples = {f"s{each}": list(range(100 * each, 100 * each + LENGTH)) for each in range(4)}
        return accelerate.DataLoaderShard(
            Streams(samples, rank=0, size=1),
            batch_size=3,
            num_workers=num_workers,
            use_stateful_dataloader=use_stateful,
        )

    whole, first, second = loader(), loader(), loader()
    tracked = [elastic_loader_of(each) for each in (whole, first, second)]
    assert elastic_loader_of(first) is tracked[1]
    uninterrupted = [batch.tolist() for batch in whole] + [batch.tolist() for batch in whole]
    begun = []
    for batch in first:
        begun.append(batch.tolist())
        assert sum(tracked[1].stream_state(each)["samples"] for each in tracked[1].stream_ids()) == 3 * len(begun)
        if len(begun) == 5:
            break
    go_on(tracked[1], tracked[2])
    assert begun + [batch.tolist() for batch in second] + [batch.tolist() for batch in second] == uninterrupted


def of_two_ranks(rank: int) -> DataLoader[Any]:
    samples = {f"s{each}": [10 * each + number for number in range(4)] for each in range(4)}
    return DataLoader(Streams(samples, rank=rank, size=2), batch_size=2)


def test_what_accelerate_reads_on_one_rank_for_all_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    loader = accelerate.prepare_data_loader(of_two_ranks(0), num_processes=2, process_index=0, put_on_device=True)
    assert type(loader).__name__ == "DataLoaderDispatcher"
    why = elastic_loader_of(loader).refuse_inexact()
    assert "reads the streams of one process for all" in why
    assert "leave this loader out of prepare()" in why


def test_streams_that_accelerate_splits_a_second_time_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    loader = accelerate.prepare_data_loader(of_two_ranks(1), num_processes=2, process_index=1)
    taken = {sample for batch in loader.base_dataloader for sample in batch.tolist()}
    assert taken == {11, 31, 13, 33}, "half of the samples of this rank"
    with pytest.raises(ValueError, match=r"samples would be lost.*num_processes=1, process_index=0"):
        bcp.DataLoaderState(loader, rank=1, size=2, elastic="same")


def test_a_loader_that_accelerate_prepares_for_one_process_has_all_samples_of_its_rank() -> None:
    pytest.importorskip("accelerate.data_loader")
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "prepare_data_loader" in each)
    taken: list[int] = []
    for rank in range(2):
        names: dict[str, Any] = {"loader": of_two_ranks(rank), "accelerator": SimpleNamespace(device="cpu")}
        exec(block, names)
        loader = names["loader"]
        tracked = bcp.DataLoaderState(loader, rank=rank, size=2).streams
        for number, batch in enumerate(loader, start=1):
            taken += batch.tolist()
            assert sum(tracked.stream_state(each)["samples"] for each in tracked.stream_ids()) == 2 * number
    assert sorted(taken) == [10 * each + number for each in range(4) for number in range(4)]


def test_a_shuffle_buffer_of_datasets_is_refused() -> None:
    inexact = Streams({"a": iterable(0).shuffle(buffer_size=4).map(lambda sample: sample)}, rank=0, size=1)
    assert "wrap the dataset in bcp.data.ShuffleBuffer" in inexact.refuse_inexact()
    unseeded = Streams({"a": iterable(0).shuffle(buffer_size=1).map(lambda sample: sample)}, rank=0, size=1)
    assert "without a seed" in unseeded.refuse_inexact()
    seeded = Streams({"a": iterable(0).shuffle(seed=3, buffer_size=1)}, rank=0, size=1)
    assert seeded.refuse_inexact() is None
    assert Streams({"a": shuffled(0)}, rank=0, size=1).refuse_inexact() is None


def test_a_shuffle_of_webdataset_is_refused(tmp_path: Path) -> None:
    inexact = Streams({"a": web_dataset(tmp_path, 0).shuffle(4)}, rank=0, size=1)
    assert "shardshuffle=False" in inexact.refuse_inexact()
    assert Streams({"a": web_dataset(tmp_path, 0)}, rank=0, size=1).refuse_inexact() is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lightning_is_counted_at_the_step(num_workers: int) -> None:
    lightning = pytest.importorskip("lightning")
    torch = pytest.importorskip("torch")

    class Net(lightning.LightningModule):
        def __init__(self, tracked: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.tracked, self.num_trained, self.counts = tracked, 0, []

        def training_step(self, batch: Any, _: int) -> Any:
            self.num_trained += len(batch)
            return (self.weight * batch.float()).sum()

        def on_train_batch_end(self, *_: Any) -> None:
            samples = sum(self.tracked.stream_state(each)["samples"] for each in self.tracked.stream_ids())
            self.counts.append((samples, self.num_trained))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    samples = {f"s{each}": list(range(LENGTH)) for each in range(4)}
    loader = DataLoader(Streams(samples, rank=0, size=1, read_ahead=1), batch_size=5, num_workers=num_workers)
    net = Net(elastic_loader_of(loader))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    lightning.Trainer(max_epochs=2, enable_model_summary=False, **quiet).fit(net, loader)
    assert len(net.counts) >= 2 * 10
    assert [taken for taken, _ in net.counts] == [trained for _, trained in net.counts]


class Numbers(IterableDataset[int]):
    """An iterable dataset without a state: torchdata's loader reads it again to go on."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_iterable_dataset_in_a_loader_of_torchdata_goes_on_after_each_resume(
    tmp_path: Path, num_workers: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    seen: list[list[int]] = []
    for run in range(4):
        loader = stateful.StatefulDataLoader(Numbers(), 2, num_workers=num_workers, collate_fn=list)
        state = bcp.DataLoaderState(loader, rank=0, size=1, elastic="same")
        if run:
            bcp.load(tmp_path / str(run - 1), {"data": state})
        batches = iter(loader)
        seen += [next(batches) for _ in range(2)]
        bcp.save(tmp_path / str(run), {"data": state})
    uninterrupted = stateful.StatefulDataLoader(Numbers(), 2, num_workers=num_workers, collate_fn=list)
    assert seen == list(itertools.islice(uninterrupted, 8))
