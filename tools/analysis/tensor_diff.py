"""Compares the tensors of two checkpoints, whatever their layouts: read region by region as a load reads them, in
bounded memory, several regions at a time. Chunks with equal checksums in both manifests are not read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from bytecheckpoint.adapters.checkpoint_view import StoredTensor
from bytecheckpoint.adapters.native.weight_scales import WeightScales
from bytecheckpoint.adapters.shards import LocalShard, torch_dtype
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.loading.read import Source
from bytecheckpoint.manifest.manifest import Described
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.region import Region, split_rows, whole
from bytecheckpoint.runtime.threads import run_jobs

from ..arguments import Opened
from .equal_chunks import ChunkColumns, are_cut_alike, known_equal
from .value_difference import TensorElements, Tolerance, ValueDifference, can_compare, find_difference

_TILE_BYTES = 16 << 20
"""Largest number of bytes of a region, and of those that are read together, in the wider of the two dtypes."""
_TILES_AT_ONCE = 4096
_OPTIONS = LoadOptions(reader_threads=1, scratch_bytes=16 << 20)


class TensorPair(NamedTuple):
    """Two tensors of one shape to compare: the FQN under which each checkpoint stores its own."""

    a: str
    b: str


class ReadAs(NamedTuple):
    """Tensors of the first checkpoint that are compared in another dtype than they are stored in."""

    dtypes: Mapping[str, str]
    """Their dtypes, by FQN."""
    quantized: Mapping[str, StoredTensor]
    """Quantized weights among them, and what these are multiplied by or unpacked from, by FQN."""

    @property
    def parts(self) -> set[str]:
        """FQNs of the scales and packed numbers, which are compared as parts of the products."""
        return {tensor.fqn for tensor in self.quantized.values()} - self.dtypes.keys()


class ComparedTensors(NamedTuple):
    """Result of a comparison."""

    differences: dict[TensorPair, ValueDifference]
    """Differences of all pairs whose values can be compared."""
    num_bytes_same: int
    """Bytes of elements of the first checkpoint, before compression, that are not read: both manifests have the same
    checksums for them."""


class _ComparedRegion(NamedTuple):
    """A region of a pair of tensors, small enough to be compared in one piece."""

    pair: TensorPair
    region: Region
    num_bytes: int
    """Bytes of the region in the wider of the two dtypes."""


class TensorDiff:
    """Comparison of two opened checkpoints. Making it reads nothing. `num_bytes` is the number of bytes to compare, of
    both checkpoints, before compression.
    """

    def __init__(
        self, a: Opened, b: Opened, pairs: Iterable[TensorPair], *, read_as: ReadAs, tolerance: Tolerance | None
    ) -> None:
        self._sources = [
            Source(side.store, side.folder, side.manifest, _OPTIONS, is_exchanged=False) for side in (a, b)
        ]
        self._read_as = read_as
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._regions: list[tuple[TensorPair, Region]] = []
        self._differences: dict[TensorPair, ValueDifference] = {}
        self._num_bytes_same = 0
        for pair in dict.fromkeys(pairs):
            if can_compare(*self._dtypes(pair)):
                self._differences[pair] = ValueDifference()
        self._add_regions()

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes_of(pair, region) for pair, region in self._regions)

    def describe(self, pair: TensorPair) -> list[Described]:
        """Returns dtype and shape of both tensors, as they are compared."""
        (stored, shape), of_b = (source.manifest.describe(fqn) for source, fqn in zip(self._sources, pair, strict=True))
        return [(self._read_as.dtypes.get(pair.a, stored), shape), of_b]

    def run(self, *, threads: int, on_progress: Callable[[int], None]) -> ComparedTensors:
        """Reads and compares. `on_progress` gets the number of bytes of both that are done since it was last called.

        Raises the errors of a load; every file that is needed is checked for its size before anything is read.
        """
        # Before anything is cut into tiles: a manifest may claim a tensor of any size.
        for index, source in enumerate(self._sources):
            fqns = {pair[index] for pair, _ in self._regions} | (set() if index else self._read_as.parts)
            files = {file for fqn in fqns for file in source.manifest.tensors[fqn].files}
            source.check_files(files, verify=source.options.verify)

        def do(batch: Sequence[_ComparedRegion]) -> None:
            found = self._compare(batch)
            with self._lock:
                for tile, difference in zip(batch, found, strict=True):
                    self._differences[tile.pair].add(difference)
                on_progress(sum(self._bytes_of(tile.pair, tile.region) for tile in batch))

        run_jobs(do, _batches(self._tiles()), num_threads=threads)
        return ComparedTensors(self._differences, self._num_bytes_same)

    def _bytes_of(self, pair: TensorPair, region: Region) -> int:
        return region.numel * sum(map(itemsize, self._dtypes(pair)))

    def _dtypes(self, pair: TensorPair) -> list[str]:
        return [dtype for dtype, _ in self.describe(pair)]

    def _tiles(self) -> Iterator[_ComparedRegion]:
        for pair, region in self._regions:
            item_bytes = max(map(itemsize, self._dtypes(pair)))
            for part in split_rows(region, _TILE_BYTES // item_bytes):
                yield _ComparedRegion(pair, part, part.numel * item_bytes)

    def _add_regions(self) -> None:
        """Collects what must be read: of tensors that are cut alike the chunks that may differ, all others whole."""
        a, b = (ChunkColumns(source.manifest) for source in self._sources)
        alike: list[TensorPair] = []
        others: list[TensorPair] = []
        for pair in self._differences:
            dtype_a, dtype_b = self._dtypes(pair)
            is_stored = dtype_a == dtype_b and pair.a not in self._read_as.dtypes
            is_alike = is_stored and are_cut_alike(a, pair.a, b, pair.b)
            (alike if is_alike else others).append(pair)
        numbers_a, numbers_b = (
            np.concatenate([np.arange(chunks.start, chunks.stop) for chunks in of_side] or [np.zeros(0, np.int64)])
            for of_side in ([a.chunk_numbers(pair.a) for pair in alike], [b.chunk_numbers(pair.b) for pair in alike])
        )
        equal = known_equal(a, b, numbers_a, numbers_b)
        start = 0
        for pair in alike:
            count = len(a.chunk_numbers(pair.a))
            unequal = np.flatnonzero(~equal[start : start + count]).tolist()
            regions = a.regions(pair.a, unequal) if unequal else []
            self._add(pair, regions)
            dtype, shape = a.manifest.describe(pair.a)
            self._num_bytes_same += (prod(shape) - sum(region.numel for region in regions)) * itemsize(dtype)
            start += count
        for pair in others:
            self._add(pair, [whole(a.manifest.describe(pair.a)[1])])

    def _add(self, pair: TensorPair, regions: Iterable[Region]) -> None:
        self._regions += [(pair, region) for region in regions if region.numel]

    def _compare(self, batch: Sequence[_ComparedRegion]) -> list[ValueDifference]:
        sides = [
            _read(source, [(tile.pair[index], tile.region) for tile in batch], read_as)
            for index, (source, read_as) in enumerate(zip(self._sources, (self._read_as, ReadAs({}, {})), strict=True))
        ]
        found = []
        for tile, a, b in zip(batch, *sides, strict=True):
            difference = find_difference(a, b, self._tolerance)
            if difference.first is not None:
                _, shape = self._sources[0].manifest.describe(tile.pair.a)
                index = np.unravel_index(difference.first.position, tile.region.lengths)
                whole_index = [at + offset for at, offset in zip(index, tile.region.offsets, strict=True)]
                position = int(np.ravel_multi_index(whole_index, shape)) if shape else 0
                difference.first = difference.first._replace(position=position)
            found.append(difference)
        return found


def _batches(tiles: Iterable[_ComparedRegion]) -> Iterator[list[_ComparedRegion]]:
    batch: list[_ComparedRegion] = []
    num_bytes = 0
    for tile in tiles:
        if batch and (num_bytes + tile.num_bytes > _TILE_BYTES or len(batch) == _TILES_AT_ONCE):
            yield batch
            batch, num_bytes = [], 0
        batch.append(tile)
        num_bytes += tile.num_bytes
    if batch:
        yield batch


def _read(source: Source, wanted: Sequence[tuple[str, Region]], read_as: ReadAs) -> list[TensorElements]:
    """Reads the bytes of these regions, on the calling thread, as stored or as they are converted."""
    described = source.manifest.describe_each([fqn for fqn, _ in wanted])
    filled, contents = [], []
    scales = WeightScales(read_as.quantized, source.manifest.metadata)
    for (fqn, region), (stored_dtype, shape) in zip(wanted, described, strict=True):
        dtype = read_as.dtypes.get(fqn, stored_dtype)
        content = torch.empty(region.numel * itemsize(dtype), dtype=torch.uint8, device="cpu")
        target = content.view(torch_dtype(dtype)).view(region.lengths)
        filled.append(scales.add(LocalShard(fqn, dtype, shape, region, target), fqn))
        contents.append(TensorElements(dtype, content.numpy().data))
    filled += [(place, place.fqn) for place in scales.places.values()]
    shards, fqns = [shard for shard, _ in filled], [fqn for _, fqn in filled]
    source.read(source.plan_unchecked(shards, fqns), shards, fqns)
    scales.multiply()
    return contents
