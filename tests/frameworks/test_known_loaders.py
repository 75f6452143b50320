"""Loaders that are exact by themselves, real ones: what all ranks together take over changing numbers of ranks is what
one rank takes without an interruption.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain
from bytecheckpoint.data.elastic_loader import assign_streams
from bytecheckpoint.data.known_loaders import elastic_loader_of
from distributed.workers import WorkerError, WorkerPool

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

NUM_SAMPLES, GLOBAL_BATCH = 192, 12
Taken = list[list[int]]
"""Samples of each step."""


def known(loader: Any) -> Any:
    found = elastic_loader_of(loader)
    assert found is not None
    return found


def united(of_ranks: list[Taken]) -> Taken:
    """Returns the samples of each step of all ranks together, sorted."""
    return [sorted(chain.from_iterable(step)) for step in zip(*of_ranks, strict=True)]


# Grain: ranks are options of an iterator, in one process.


def grain_loaders(size: int, num_samples: int | None = None) -> list[Any]:
    """Loaders of three shuffled epochs, or of one of so many samples in their order."""
    grain = pytest.importorskip("grain")
    options = [grain.sharding.ShardOptions(shard_index=rank, shard_count=size) for rank in range(size)]
    once = grain.MapDataset.range(num_samples or NUM_SAMPLES)
    dataset = once if num_samples else once.shuffle(seed=3).repeat(3)
    return [grain.experimental.ElasticIterator(dataset, GLOBAL_BATCH, each) for each in options]


def test_grain_on_any_number_of_ranks() -> None:
    (alone,) = grain_loaders(1)
    num_steps = 2 * NUM_SAMPLES // GLOBAL_BATCH + 4  # two epochs and a part
    expected = [sorted(next(alone).tolist()) for _ in range(num_steps)]
    found: Taken = []
    shared: Any = None
    for size, steps in zip([4, 2, 3, 6, 1], [5, 9, 7, 8, num_steps - 29], strict=True):
        loaders = grain_loaders(size)
        for each in loaders if shared is not None else ():
            known(each).load_streams({}, shared)
        found += united([[next(each).tolist() for _ in range(steps)] for each in loaders])
        states = [known(each).shared_state() for each in loaders]
        assert all(state == states[0] for state in states)
        shared = states[0]
    assert found == expected


def test_an_iterator_of_grain_goes_on_inside_a_process() -> None:
    (loader,) = grain_loaders(1)
    iterator = iter(loader)
    next(iterator)
    state = known(iterator).shared_state()
    expected = next(iterator).tolist()
    known(iterator).load_streams({}, state)
    assert next(iterator).tolist() == expected


@pytest.mark.parametrize("num_samples", [NUM_SAMPLES, NUM_SAMPLES + 5, NUM_SAMPLES + GLOBAL_BATCH - 1])
def test_grain_at_the_end_of_a_dataset_begins_it_anew(num_samples: int) -> None:
    expected = list(range(NUM_SAMPLES))  # batches that are not full are dropped
    loaders = grain_loaders(4, num_samples)
    taken = united([[next(each).tolist() for _ in range(NUM_SAMPLES // GLOBAL_BATCH)] for each in loaders])
    assert sorted(chain.from_iterable(taken)) == expected
    before_the_end = grain_loaders(4, num_samples)
    for each in before_the_end:
        known(each).load_streams({}, {"global_next_index": NUM_SAMPLES - GLOBAL_BATCH})
        assert known(each).shared_state() == {"global_next_index": NUM_SAMPLES - GLOBAL_BATCH}
    states = [known(each).shared_state() for each in loaders]
    assert all(state == states[0] for state in states)
    again = grain_loaders(2, num_samples)
    for each in again:
        known(each).load_streams({}, states[0])
    taken = united([[next(each).tolist() for _ in range(NUM_SAMPLES // GLOBAL_BATCH)] for each in again])
    assert sorted(chain.from_iterable(taken)) == expected


# Mosaic and litData: ranks are processes.


class Run:
    """Reads some steps with a loader that was given a position, and tells the samples and the position after them."""

    def __init__(self, loader: Any, shared: Any, steps: int) -> None:
        if shared is not None:
            known(loader).load_streams({}, shared)
        self.taken: Taken = []
        while len(self.taken) < steps:
            before = len(self.taken)
            for batch in loader:
                ids = batch["id"] if isinstance(batch, dict) else batch
                self.taken.append([int(each) for each in ids])
                if len(self.taken) == steps:
                    break
            assert len(self.taken) > before, "a pass is never empty"
        self.shared = known(loader).shared_state()


def run_on_ranks(
    workers: WorkerPool, function: Any, folder: Path, num_workers: int, sizes: list[int], steps: list[int]
) -> Taken:
    found: Taken = []
    shared: Any = None
    for size, num_steps in zip(sizes, steps, strict=True):
        call = (str(folder), num_workers, shared, num_steps)
        outcomes = workers.run(function, *call, world_size=size, timeout_s=120)
        found += united([taken for taken, _ in outcomes])
        assert all(state == outcomes[0][1] for _, state in outcomes)
        shared = outcomes[0][1]
    return found


def as_torchrun(rank: int, world_size: int) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in values.items()})


def import_streaming() -> Any:
    """Imports Mosaic's package, which asks for torchvision, and needs it for datasets of images only."""
    pytest.importorskip("transformers")  # it looks for torchvision, too
    stands_in = importlib.util.find_spec("torchvision") is None and "streaming" not in sys.modules
    names = {"torchvision": "", "torchvision.transforms": "", "torchvision.transforms.functional": "to_tensor"}
    stand_ins = {**names, "torchvision.datasets": "VisionDataset"} if stands_in else {}
    for name, attribute in stand_ins.items():
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], attribute or "name", type(attribute or "Name", (), {}))
    try:
        return pytest.importorskip("streaming")
    finally:
        for name in stand_ins:
            del sys.modules[name]


def run_mosaic(rank: int, world_size: int, folder: str, num_workers: int, shared: Any, steps: int) -> tuple[Taken, Any]:
    as_torchrun(rank, world_size)
    streaming = import_streaming()
    batch_size = GLOBAL_BATCH // world_size
    dataset = streaming.StreamingDataset(
        local=f"{folder}/mosaic", shuffle=True, shuffle_seed=5, batch_size=batch_size, num_canonical_nodes=2
    )
    context = "fork" if num_workers else None  # a new interpreter would ask for torchvision
    loader = streaming.StreamingDataLoader(
        dataset, batch_size=batch_size, num_workers=num_workers, multiprocessing_context=context
    )
    run = Run(loader, shared, steps)
    return run.taken, run.shared


@pytest.mark.parametrize(("sizes", "num_workers"), [([1, 2, 4, 1], 0), ([2, 1, 3, 2], 0), ([2, 1, 2], 2)])
def test_mosaic_on_any_number_of_ranks(workers: WorkerPool, tmp_path: Path, sizes: list[int], num_workers: int) -> None:
    with import_streaming().MDSWriter(out=str(tmp_path / "mosaic"), columns={"id": "int"}, size_limit=256) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number})
    per_epoch = NUM_SAMPLES // GLOBAL_BATCH
    steps = [5, 6, 5, per_epoch + 3] if len(sizes) == 4 else [6, 10, per_epoch + 4]  # the last but one ends an epoch
    found = run_on_ranks(workers, run_mosaic, tmp_path, num_workers, sizes, steps)
    expected = run_on_ranks(workers, run_mosaic, tmp_path, num_workers, sizes[:1], [sum(steps)])
    assert Counter(chain.from_iterable(found[:per_epoch])) == Counter(range(NUM_SAMPLES))
    assert found == expected


def run_litdata(
    rank: int, world_size: int, folder: str, num_workers: int, shared: Any, steps: int
) -> tuple[Taken, Any]:
    as_torchrun(rank, world_size)
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(f"{folder}/litdata", shuffle=True, seed=5, num_canonical_nodes=2, drop_last=True)
    loader = StreamingDataLoader(dataset, batch_size=GLOBAL_BATCH // world_size, num_workers=num_workers)
    run = Run(loader, shared, steps)
    return run.taken, run.shared


def number_of(number: int) -> int:
    return number


@pytest.mark.parametrize(("sizes", "num_workers"), [([1, 2, 4, 1], 0), ([2, 1, 3, 2], 0), ([2, 1, 2], 2)])
def test_litdata_on_any_number_of_ranks(
    workers: WorkerPool, tmp_path: Path, sizes: list[int], num_workers: int
) -> None:
    litdata = pytest.importorskip("litdata")
    cache = litdata.streaming.Cache(str(tmp_path / "litdata"), chunk_size=16)
    for number in range(NUM_SAMPLES):
        cache[number] = number
    cache.done()
    cache.merge()
    per_epoch = NUM_SAMPLES // GLOBAL_BATCH
    steps = [5, 6, 5, per_epoch] if len(sizes) == 4 else [6, 10, per_epoch]
    found = run_on_ranks(workers, run_litdata, tmp_path, num_workers, sizes, steps)
    assert Counter(chain.from_iterable(found[:per_epoch])) == Counter(range(NUM_SAMPLES))
    assert Counter(chain.from_iterable(found[per_epoch:])) == Counter(range(NUM_SAMPLES))


def test_a_position_that_litdata_would_round_down_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata")
    cache = litdata.streaming.Cache(str(tmp_path / "litdata"), chunk_size=16)
    for number in range(NUM_SAMPLES):
        cache[number] = number
    cache.done()
    cache.merge()
    with pytest.raises(WorkerError, match=r"60 samples of this epoch were taken, .* multiple of 24"):
        run_on_ranks(workers, run_litdata, tmp_path, 2, [2, 1], [5, 5])


# Energon: ranks are options of a loader, whose workers are processes of their own.


@pytest.fixture(scope="module")
def energon_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("megatron.energon")
    webdataset = pytest.importorskip("webdataset")
    from megatron.energon.flavors import BaseWebdatasetFactory

    folder = tmp_path_factory.mktemp("energon")
    (folder / "parts").mkdir()
    with webdataset.ShardWriter(f"{folder}/parts/data-%d.tar", maxcount=16, verbose=0) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:06d}", "txt": str(number).encode()})
    BaseWebdatasetFactory.prepare_dataset(
        str(folder),
        [f"parts/data-{{0..{NUM_SAMPLES // 16 - 1}}}.tar"],
        split_parts_ratio=[("train", 1.0)],
        shuffle_seed=None,
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: TextWebdataset\nfield_map:\n  text: txt\n"
    )
    return folder


def energon_loaders(folder: Path, size: int, num_workers: int) -> list[Any]:
    from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset

    loaders: list[Any] = []
    for rank in range(size):
        config = WorkerConfig(rank=rank, world_size=size, num_workers=num_workers, data_parallel_group=None)
        dataset = get_train_dataset(
            str(folder),
            worker_config=config,
            batch_size=1,
            shuffle_buffer_size=8,
            max_samples_per_sequence=16,
        )
        loaders.append(get_savable_loader(dataset, checkpoint_every_sec=0, checkpoint_every_min_n_samples=1))
    return loaders


def energon_state(loaders: list[Any]) -> tuple[dict[str, Any], Any]:
    """Streams of all ranks and the shared state, as they are in a checkpoint."""
    streams: dict[str, Any] = {}
    for each in map(known, loaders):
        own = {stream_id: each.stream_state(stream_id) for stream_id in each.stream_ids()}
        assert not own.keys() & streams.keys()
        assert set(each.all_stream_ids()) >= own.keys()
        streams |= own
    shared = [known(each).shared_state() for each in loaders]
    assert all(state == shared[0] for state in shared)
    return decode_plain(encode_plain((streams, shared[0]), "data"))


def resume_energon(loaders: list[Any], streams: dict[str, Any], shared: Any) -> None:
    for rank, loader in enumerate(loaders):
        own = assign_streams(known(loader), list(streams), len(loaders))[rank]
        known(loader).load_streams({stream_id: streams[stream_id] for stream_id in own}, shared)


def energon_samples(loaders: list[Any], steps: int) -> list[list[int]]:
    """Samples of each rank."""
    return [[int(sample.text[0]) for _, sample in zip(range(steps), loader, strict=False)] for loader in loaders]


@pytest.mark.parametrize("new_size", [1, 2, 4])
def test_energons_workers_on_any_number_of_ranks_that_divides_them(energon_folder: Path, new_size: int) -> None:
    loaders = energon_loaders(energon_folder, 2, 2)
    before = energon_samples(loaders, 10)
    streams, shared = energon_state(loaders)
    assert sorted(streams) == [f"worker_{number}" for number in range(4)]
    expected = energon_samples(loaders, 38)
    resumed = energon_loaders(energon_folder, new_size, 4 // new_size)
    resume_energon(resumed, streams, shared)
    after = energon_samples(resumed, 2 * 38 // new_size)
    if new_size == 2:
        assert after == expected
    first = Counter(chain.from_iterable([*before, *expected]))
    assert Counter(chain.from_iterable([*before, *after])) == first
    assert max(first.values()) == 1, "less than an epoch"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_energons_state_at_the_same_size(energon_folder: Path, num_workers: int) -> None:
    loaders = energon_loaders(energon_folder, 2, num_workers)
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        [next(iterator) for _ in range(5)]
    streams, shared = energon_state(loaders)
    expected = [[int(next(iterator).text[0]) for _ in range(7)] for iterator in iterators]
    resumed = energon_loaders(energon_folder, 2, num_workers)
    resume_energon(resumed, streams, shared)
    assert energon_samples(resumed, 7) == expected


def test_what_energon_cannot_share_out_is_refused(energon_folder: Path) -> None:
    loaders = energon_loaders(energon_folder, 2, 2)
    energon_samples(loaders, 3)
    streams, shared = energon_state(loaders)
    with pytest.raises(bcp.CheckpointMismatchError, match="4 workers of Energon were saved, which 3 ranks cannot"):
        resume_energon(energon_loaders(energon_folder, 3, 1), streams, shared)
    with pytest.raises(bcp.CheckpointMismatchError, match=r"make it with WorkerConfig\(num_workers=4\)"):
        resume_energon(energon_loaders(energon_folder, 1, 2), streams, shared)
    with pytest.raises(bcp.CheckpointMismatchError, match="run already"):
        resume_energon(loaders, streams, shared)
    streams["worker_0"]["worker"]["@energon"] = "savable_loader.os"
    with pytest.raises(bcp.CheckpointMismatchError, match="which the installed Energon lacks"):
        resume_energon(energon_loaders(energon_folder, 2, 2), streams, shared)
