"""Carries out load plans: stored bytes into shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import eq
from typing import NamedTuple

import torch

from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.adapters.target_shards import TargetShards
from bytecheckpoint.distributed.ranks import Ranks
from bytecheckpoint.loading.links import check_samples
from bytecheckpoint.loading.overwrite_state import StateChanges
from bytecheckpoint.loading.replacement import detect_replacement
from bytecheckpoint.loading.scatter import Targets, device_memory_of, memory_of, place_all, places_of, takes_bytes
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.ranges import Fetch, Frame, ignore_bytes
from bytecheckpoint.memory.device_to_host import has_streams
from bytecheckpoint.memory.direct_reader import DirectRead, find_direct_reader
from bytecheckpoint.memory.host_to_device import CopyStreams, streams_to
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.planner.byte_ranges import names_in
from bytecheckpoint.planner.load_plan import Wants, plan_load, wanted_files, zeros_in
from bytecheckpoint.region import relative
from bytecheckpoint.runtime.progress import ProgressMeter
from bytecheckpoint.storage.layout import check_files
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.range_reader import ALIGNMENT, max_bytes_at_once, run_fetches
from bytecheckpoint.storage.store import Store, SupportsFilePath, SupportsReadBytes, SupportsReadPieces

logger = logging.getLogger("bytecheckpoint")

_EXTENT_BYTES = 1 << 20
"""Longest extent of an ordinary file."""
_UNITS_IN_SCRATCH = 16
"""Units, read for other ranks as well, that scratch memory has room for: some are read while others are passed on."""


class Traffic(NamedTuple):
    """Bytes that a rank took in."""

    num_bytes_read: int
    num_bytes_received: int


class Source:
    """A committed checkpoint that is being read."""

    def __init__(
        self,
        store: Store,
        folder: str,
        manifest: Manifest,
        options: LoadOptions,
        *,
        is_exchanged: bool,
        path: str | None = None,
    ) -> None:
        """`is_exchanged` is True if ranks pass on to others what they read: that takes half of the scratch memory.
        `path` is shown in messages and reports; by default that of the folder, with its store.
        """
        self.store = store
        self.folder = folder
        self.manifest = manifest
        self.options = options
        self.is_exchanged = is_exchanged
        self.path = join_name(str(store), folder) if path is None else path
        self.changes = StateChanges()
        self.held_files: frozenset[int] = frozenset()
        """Numbers of the files that this rank can read and not all ranks can; only where reading is shared."""
        self.meter: ProgressMeter | None = None
        """Counts the bytes that are read, if somebody watches."""
        self._sampled: set[int] = set()
        """Files that were compared with the samples of their link."""
        self.traffic_apart: list[Traffic] = []
        """Bytes of the reads `apart` from those that fill the state."""

    @contextmanager
    def counting(self, ranks: Ranks) -> Iterator[None]:
        """Surrounds a load: counts its bytes for `on_progress` and for the log, if there is either."""
        on_progress = self.options.on_progress
        if on_progress is None and not logger.isEnabledFor(logging.DEBUG):
            yield
            return
        self.meter = ProgressMeter(self.path, ranks.global_ranks[ranks.rank], "load", on_progress)
        with self.meter.until_end():
            yield

    def expect_bytes(self, fetches: Sequence[Fetch]) -> None:
        """Tells the meter, if there is one, how many more bytes this rank is going to read."""
        if self.meter is not None:
            self.meter.expect("read", sum(fetch.byte_length for fetch in fetches))

    @property
    def _scratch_bytes(self) -> int:
        """Scratch memory for reading, in bytes."""
        return self.options.scratch_bytes // 2 if self.is_exchanged else self.options.scratch_bytes

    @property
    def max_fetch_bytes(self) -> int:
        """Length of the longest fetch, in bytes."""
        return max_bytes_at_once(self.store, scratch_bytes=self._scratch_bytes, threads=self.options.reader_threads)

    def showing(self, manifest: Manifest) -> Source:
        """Returns a source of the same checkpoint with this manifest: itself, or one with `changes` of its own."""
        return self if manifest is self.manifest else self._again(manifest)

    def apart(self) -> Source:
        """Returns a source of the checkpoint, with `changes` of its own, for reads into memory outside the state."""
        return self._again(self.manifest)

    def _again(self, manifest: Manifest) -> Source:
        options, is_exchanged = self.options, self.is_exchanged
        shown = Source(self.store, self.folder, manifest, options, is_exchanged=is_exchanged, path=self.path)
        shown.meter = self.meter
        shown.held_files, shown.traffic_apart = self.held_files, self.traffic_apart
        return shown

    @property
    def unit_bytes(self) -> int:
        """Bytes of the longest fetch of what other ranks want too, unless an extent is longer."""
        # As short as the store allows: what is passed on is still in the processor's cache.
        shortest = max(_EXTENT_BYTES, 2 * self.store.access.gap_bytes)
        return max(1, min(self.max_fetch_bytes, self.options.scratch_bytes // _UNITS_IN_SCRATCH, shortest))

    def plan(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> list[Fetch]:
        """Returns the fetches that fill each of the shards from the stored tensor with the same index in `stored_fqns`;
        checks the data files.

        Raises CheckpointMismatchError (coverage), CheckpointNotFoundError (missing_file, replaced) or
        CheckpointCorruptError (truncated, checksum, bad_manifest, unsupported_version); nothing has been read then.
        """
        fetches = self.plan_unchecked(shards, stored_fqns)
        self.check_files(wanted_files(fetches), verify=self.options.verify)
        return fetches

    def plan_unchecked(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> list[Fetch]:
        """Plans as `plan` does, but without looking at the data files: the caller checks them before it reads."""
        options, targets, dtypes = self.options, TargetShards.of(shards), self._dtypes(stored_fqns)
        # For a shard with an address, equal dtypes are enough.
        are_flat = list(map(eq, targets.dtypes, dtypes))
        for number in targets.without_address:
            are_flat[number] = takes_bytes(targets[number], dtypes[number])
        wants = Wants(stored_fqns, targets.regions, are_flat)
        max_fetch_bytes = self.max_fetch_bytes
        if any(map(has_streams, {tensor.device for tensor in targets.tensors_without_address})):
            # All bytes go through buffers, and twice as many of them: one is filled while another is copied from.
            max_fetch_bytes = _fitting(max_fetch_bytes // 2)
        elif isinstance(self.store, SupportsReadBytes) and options.verify:
            # Rows are widened to whole extents: the two copies of such a read must leave room for one on each thread.
            scratch_bytes = self._scratch_bytes - min(4 * _EXTENT_BYTES, self._scratch_bytes // 4)
            max_fetch_bytes = max_bytes_at_once(self.store, scratch_bytes=scratch_bytes, threads=options.reader_threads)
        return plan_load(
            self.manifest,
            wants,
            verify=options.verify,
            max_gap_bytes=self.store.access.gap_bytes if options.max_gap_bytes is None else options.max_gap_bytes,
            max_fetch_bytes=max_fetch_bytes,
        )

    def check_files(self, numbers: Iterable[int], *, verify: bool) -> None:
        """Checks that the data files of these numbers have their sizes, and with `verify` that files to which a link
        points are those that the link was made for.

        Raises CheckpointNotFoundError (missing_file, replaced) or CheckpointCorruptError (truncated, checksum).
        """
        wanted = set(numbers)
        with detect_replacement(self.store, self.folder, self.manifest):
            check_files(self.store, self.folder, self.manifest, wanted)
        if verify:
            new = [self.manifest.files[number] for number in sorted(wanted - self._sampled)]
            check_samples(self.store, self.folder, new, threads=self.options.reader_threads)
            self._sampled |= wanted

    def targets(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str], lanes: CopyStreams) -> Targets:
        """Returns the memory of these shards, as destinations of a load."""
        return Targets(shards, self._dtypes(stored_fqns), lanes)

    def with_targets(self, fetches: Sequence[Fetch], targets: Targets, stored_fqns: Sequence[str]) -> list[Fetch]:
        """Returns the fetches of a plan that was made for the shards of `targets`, with the memory that they go to."""
        if not isinstance(self.store, SupportsReadPieces):
            return [self.with_place(fetch, targets, stored_fqns) for fetch in fetches]
        places = [None if fetch.is_direct else places_of(fetch, targets) for fetch in fetches]
        return [
            self.with_place(fetch, targets, stored_fqns)
            if each is None
            else fetch._replace(
                wanted_by=partial(names_in, fetch, stored_fqns),
                pieces=partial(each.opened, self.changes),
                gap_bytes=int(each.gaps.sum()),
            )
            for fetch, each in zip(fetches, places, strict=True)
        ]

    def run(self, fetches: Sequence[Fetch], lanes: CopyStreams, on_failure: Callable[[], None] = lambda: None) -> None:
        """Carries out fetches with targets, and counts their bytes for the meter. Copies to devices may be under way
        until the streams in `lanes` are closed. `on_failure` is called as soon as a fetch fails.
        """
        meter = self.meter
        if meter is not None:
            fetches = [fetch._replace(place=partial(_place_and_count, fetch, meter)) for fetch in fetches]
        with detect_replacement(self.store, self.folder, self.manifest):
            run_fetches(
                self.store,
                self.folder,
                self.manifest.files,
                fetches,
                threads=self.options.reader_threads,
                verify=self.options.verify,
                scratch_bytes=self._scratch_bytes,
                memory=lanes,
                on_failure=on_failure,
            )

    def read(self, fetches: Sequence[Fetch], shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> None:
        """Carries out a plan for these shards without other ranks; also fills the zeros that lie in no file."""
        self.expect_bytes(fetches)
        with streams_to(TargetShards.of(shards).tensors_without_address) as lanes:
            targets = self.targets(shards, stored_fqns, lanes)
            other_fetches = self._read_directly(fetches, targets, lanes)
            self.run(self.with_targets(other_fetches, targets, stored_fqns), lanes)
        self.fill_zeros(shards, stored_fqns)

    def _read_directly(self, fetches: Sequence[Fetch], targets: Targets, lanes: CopyStreams) -> Sequence[Fetch]:
        """Reads straight into device memory what options and device allow, and waits for it. Returns the fetches that
        are left to do.
        """
        store, options = self.store, self.options
        is_wanted = options.direct == "auto" and not options.verify and isinstance(store, SupportsFilePath)
        reader = find_direct_reader() if is_wanted else None
        if reader is None or not isinstance(store, SupportsFilePath):
            return fetches
        reads: dict[tuple[int, torch.device], list[DirectRead]] = {}
        other_fetches: list[Fetch] = []
        for fetch in fetches:
            target = device_memory_of(fetch.parts[0], targets) if fetch.is_direct else None
            if target is None:
                other_fetches.append(fetch)
            else:
                reads.setdefault((fetch.file, target.device), []).append(DirectRead(fetch.byte_offset, target))
        lanes.wait_for_callers()
        with detect_replacement(store, self.folder, self.manifest):
            for (file, _), of_file in reads.items():
                with self.changes.overwriting():
                    reader.read(store.file_path(join_name(self.folder, self.manifest.files[file].name)), of_file)
                if self.meter is not None:
                    self.meter.add(sum(read.target.nbytes for read in of_file))
        return other_fetches

    def fill_zeros(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> None:
        """Zeroes the elements of these shards that lie in no file because a name map added them."""
        if self.manifest.map_notes.zeros_file is None:
            return
        for shard, fqn in zip(shards, stored_fqns, strict=True):
            for zeros in zeros_in(self.manifest, fqn, shard.region):
                inside = zip(*relative(zeros, shard.region), strict=True)
                with self.changes.overwriting(), torch.no_grad():
                    shard.tensor[tuple(slice(first, first + length) for first, length in inside)].zero_()

    def _dtypes(self, stored_fqns: Sequence[str]) -> list[str]:
        return [dtype for dtype, _ in self.manifest.describe_each(stored_fqns)]

    def with_place(self, fetch: Fetch, targets: Targets, stored_fqns: Sequence[str]) -> Fetch:
        """Returns the fetch with the memory that its bytes are read into or copied to. It then also notes in `changes`
        when it overwrites the state.
        """
        wanted_by = partial(names_in, fetch, stored_fqns)
        memory = memory_of(fetch.parts[0], targets) if fetch.is_direct else None
        if memory is not None:
            return fetch._replace(wanted_by=wanted_by, target=partial(_noting_overwrite, memory, self.changes))
        frames = tuple(_frame_with_target(frame, targets, self.changes) for frame in fetch.frames)
        fetch = fetch._replace(wanted_by=wanted_by, frames=frames)
        place = partial(place_all, fetch.parts, fetch.byte_offset, targets)
        return fetch._replace(place=partial(_place_and_note, place, self.changes)) if fetch.parts else fetch


def _frame_with_target(frame: Frame, targets: Targets, changes: StateChanges) -> Frame:
    """Returns the frame with the memory that its raw bytes go to."""
    memory = memory_of(frame.parts[0], targets) if frame.is_direct else None
    place = partial(place_all, frame.parts, 0, targets) if memory is None else ignore_bytes
    return frame._replace(target=memory, place=partial(_place_and_note, place, changes))


def _fitting(num_bytes: int) -> int:
    """Returns the length of a fetch that, widened to whole extents, mostly fits into this number of bytes of pinned
    memory, which torch allocates in powers of two.
    """
    block_bytes = 1 << (num_bytes.bit_length() - 1)
    return block_bytes - ALIGNMENT - 2 * min(_EXTENT_BYTES, block_bytes // 4)


def _place_and_count(fetch: Fetch, meter: ProgressMeter, content: memoryview) -> None:
    fetch.place(content)
    meter.add(fetch.byte_length)


@contextmanager
def _noting_overwrite(memory: memoryview, changes: StateChanges) -> Iterator[memoryview]:
    with changes.overwriting():
        yield memory


def _place_and_note(place: Callable[[memoryview], None], changes: StateChanges, content: memoryview) -> None:
    with changes.overwriting():
        place(content)
