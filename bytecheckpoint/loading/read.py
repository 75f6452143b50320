"""Stored bytes into shards: the load plan carried out. What a load and a look into a checkpoint have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from bytecheckpoint.adapters.shards import NEW_TUPLE, LocalShard
from bytecheckpoint.loading.link_samples import check_samples
from bytecheckpoint.loading.overwrite_state import Changes
from bytecheckpoint.loading.replaced import noticing_replacement
from bytecheckpoint.loading.scatter import Targets, memory_of, place_all, takes_bytes
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.frames import FRAME_BYTES
from bytecheckpoint.memory.device_to_host import has_streams
from bytecheckpoint.memory.host_to_device import CopyStreams, streams_to
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.planner.byte_ranges import names_in
from bytecheckpoint.planner.coalesce import Fetch, Frame
from bytecheckpoint.planner.load_plan import Want, plan_load, wanted_files, zeros_in
from bytecheckpoint.region import relative
from bytecheckpoint.storage.layout import check_files
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.range_reader import ALIGNMENT, FrameRead, Read, fetch_bytes, run_reads
from bytecheckpoint.storage.store import Store, SupportsReadBytes

_EXTENT_BYTES = 1 << 20
"""The most that an extent of an ordinary file has."""


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
        """`is_exchanged` says whether ranks pass on to others what they read: that takes half of the scratch memory.
        `path` is where it stands, as messages and reports show it, where that is not the folder.
        """
        self.store = store
        self.folder = folder
        self.manifest = manifest
        self.options = options
        self.is_exchanged = is_exchanged
        self.path = join_name(str(store), folder) if path is None else path
        self.changes = Changes()
        self._sampled: set[int] = set()
        """Files that were compared with their samples."""

    @property
    def _scratch_bytes(self) -> int:
        """For reading."""
        return self.options.scratch_bytes // 2 if self.is_exchanged else self.options.scratch_bytes

    @property
    def max_fetch_bytes(self) -> int:
        """The most that is to be read at once."""
        return fetch_bytes(self.store, scratch_bytes=self._scratch_bytes, threads=self.options.reader_threads)

    def showing(self, manifest: Manifest) -> Source:
        """The same checkpoint with its tensors under other names and in other shapes."""
        if manifest is self.manifest:
            return self
        options, is_exchanged = self.options, self.is_exchanged
        return Source(self.store, self.folder, manifest, options, is_exchanged=is_exchanged, path=self.path)

    def unit_bytes(self, fetches: Sequence[Fetch]) -> int:
        """The most that is read at once of what others want too, unless an extent is longer."""
        has_frames = any(fetch.frames for fetch in fetches)
        # A frame of it is decompressed beside it.
        return max(self.max_fetch_bytes - (2 * FRAME_BYTES if has_frames else 0), 1)

    def plan(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> list[Fetch]:
        """The reads that fill these shards, each from the stored tensor of its number; data files are looked at.

        Raises CheckpointMismatchError (coverage), CheckpointNotFoundError (missing_file, replaced) or
        CheckpointCorruptError (truncated, checksum, unsupported_version); nothing has been read then.
        """
        options = self.options
        wants = [
            # Where there is an address, that is all that is left to look at.
            NEW_TUPLE(Want, (fqn, shard.region, shard.dtype == dtype if shard.address else takes_bytes(shard, dtype)))
            for shard, fqn, dtype in zip(shards, stored_fqns, self._dtypes(stored_fqns), strict=True)
        ]
        max_fetch_bytes = self.max_fetch_bytes
        if any(has_streams(device) for device in {shard.tensor.device for shard in shards if not shard.address}):
            # All of it goes through buffers, and twice as many of them: one is filled while another is copied from.
            max_fetch_bytes = _fitting(max_fetch_bytes // 2)
        elif isinstance(self.store, SupportsReadBytes) and options.verify:
            # Rows are widened to whole extents: the two copies of such a read must leave room for one on each thread.
            scratch_bytes = self._scratch_bytes - min(4 * _EXTENT_BYTES, self._scratch_bytes // 4)
            max_fetch_bytes = fetch_bytes(self.store, scratch_bytes=scratch_bytes, threads=options.reader_threads)
        fetches = plan_load(
            self.manifest,
            wants,
            verify=options.verify,
            max_gap_bytes=self.store.access.gap_bytes if options.max_gap_bytes is None else options.max_gap_bytes,
            max_fetch_bytes=max_fetch_bytes,
        )
        self.check_files(wanted_files(fetches))
        return fetches

    def check_files(self, numbers: Iterable[int]) -> None:
        """Makes sure that the data files of these numbers are there with their sizes, and that those which a link
        points to are the ones that it was made for.

        Raises CheckpointNotFoundError (missing_file, replaced) or CheckpointCorruptError (truncated, checksum).
        """
        wanted = set(numbers)
        with noticing_replacement(self.store, self.folder, self.manifest):
            check_files(self.store, self.folder, self.manifest, wanted)
        if self.options.verify:
            new = [self.manifest.files[number] for number in sorted(wanted - self._sampled)]
            check_samples(self.store, self.folder, new, threads=self.options.reader_threads)
            self._sampled |= wanted

    def targets(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str], lanes: CopyStreams) -> Targets:
        """The memory of these shards, as destinations of a load."""
        return Targets(shards, self._dtypes(stored_fqns), lanes)

    def reads(self, fetches: Sequence[Fetch], targets: Targets, stored_fqns: Sequence[str]) -> list[Read]:
        """The reads of a plan that was made for these shards."""
        return [self._read(fetch, targets, stored_fqns) for fetch in fetches]

    def run(self, reads: Sequence[Read], lanes: CopyStreams) -> None:
        """Carries out these reads; copies into devices may still be under way until the lanes are closed."""
        with noticing_replacement(self.store, self.folder, self.manifest):
            run_reads(
                self.store,
                reads,
                threads=self.options.reader_threads,
                verify=self.options.verify,
                scratch_bytes=self._scratch_bytes,
                memory=lanes,
            )

    def read(self, fetches: Sequence[Fetch], shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> None:
        """Carries out a plan that was made for these shards."""
        with streams_to(shard.tensor for shard in shards if not shard.address) as lanes:
            self.run(self.reads(fetches, self.targets(shards, stored_fqns, lanes), stored_fqns), lanes)
        self.fill_zeros(shards, stored_fqns)

    def fill_zeros(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> None:
        """Zeroes what of these shards lies in no file because a name map has added it: the last step of a read."""
        if self.manifest.map_notes.zeros_file is None:
            return
        for shard, fqn in zip(shards, stored_fqns, strict=True):
            for zeros in zeros_in(self.manifest, fqn, shard.region):
                inside = zip(*relative(zeros, shard.region), strict=True)
                with self.changes.overwriting(), torch.no_grad():
                    shard.tensor[tuple(slice(first, first + length) for first, length in inside)].zero_()

    def _dtypes(self, stored_fqns: Sequence[str]) -> list[str]:
        return [dtype for dtype, _ in self.manifest.describe_each(stored_fqns)]

    def _read(self, fetch: Fetch, targets: Targets, stored_fqns: Sequence[str]) -> Read:
        file = self.manifest.files[fetch.file]
        memory = memory_of(fetch.parts[0], targets) if fetch.is_direct else None
        place = partial(place_all, fetch.parts, fetch.byte_offset, targets)
        return Read(
            file=file,
            name=join_name(self.folder, file.name),
            byte_offset=fetch.byte_offset,
            byte_length=fetch.byte_length,
            target=None if memory is None else partial(_filled, memory, self.changes),
            place=partial(_placed, place, self.changes) if memory is None and fetch.parts else _leave,
            wanted_by=partial(names_in, fetch, stored_fqns),
            frames=[frame_read(frame, targets, self.changes) for frame in fetch.frames],
        )


def frame_read(frame: Frame, targets: Targets, changes: Changes) -> FrameRead:
    """What a frame is for, with the memory that it goes to."""
    memory = memory_of(frame.parts[0], targets) if frame.is_direct else None
    place = partial(place_all, frame.parts, 0, targets) if memory is None else _leave
    return FrameRead(
        byte_offset=frame.byte_offset,
        byte_length=frame.byte_length,
        raw_bytes=frame.raw_bytes,
        codec=frame.codec,
        item_bytes=frame.item_bytes,
        target=memory,
        place=partial(_placed, place, changes),
    )


def _fitting(num_bytes: int) -> int:
    """The bytes of a read that, widened to whole extents, mostly fits into that much pinned memory, of which torch
    gives powers of two.
    """
    block_bytes = 1 << (num_bytes.bit_length() - 1)
    return block_bytes - ALIGNMENT - 2 * min(_EXTENT_BYTES, block_bytes // 4)


@contextmanager
def _filled(memory: memoryview, changes: Changes) -> Iterator[memoryview]:
    with changes.overwriting():
        yield memory


def _placed(place: Callable[[memoryview], None], changes: Changes, content: memoryview) -> None:
    with changes.overwriting():
        place(content)


def _leave(content: memoryview) -> None:
    """The bytes are in their target already, or are for frames only."""
