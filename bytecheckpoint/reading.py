"""Stored bytes into shards: the load plan carried out. What a load and a look into a checkpoint have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bytecheckpoint.adapters.tensors import LocalShard
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.placing import Target, memory_of, place_all, takes_bytes, target_of
from bytecheckpoint.planner.coalesce import Fetch, Frame
from bytecheckpoint.planner.load_plan import Want, plan_load, wanted_files
from bytecheckpoint.storage.layout import check_files
from bytecheckpoint.storage.names import join_name
from bytecheckpoint.storage.reader import FrameRead, Read, run_reads
from bytecheckpoint.storage.store import Store


class Source:
    """A committed checkpoint that is being read."""

    def __init__(self, store: Store, folder: str, manifest: Manifest, options: LoadOptions) -> None:
        self.store = store
        self.folder = folder
        self.manifest = manifest
        self._options = options
        self._dtypes: dict[str, str] = {}

    @property
    def path(self) -> str:
        """Where it stands, as messages and reports show it."""
        return join_name(str(self.store), self.folder)

    def plan(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> list[Fetch]:
        """The reads that fill these shards, each from the stored tensor of its number; data files are looked at.

        Raises CheckpointMismatchError (coverage), CheckpointNotFoundError (missing_file) or CheckpointCorruptError
        (truncated, unsupported_version); nothing has been read then.
        """
        options = self._options
        wants = [
            Want(fqn, shard.region, takes_bytes(shard, self._stored_dtype(fqn)))
            for shard, fqn in zip(shards, stored_fqns, strict=True)
        ]
        fetches = plan_load(
            self.manifest,
            wants,
            verify=options.verify,
            max_gap_bytes=self.store.access.gap_bytes if options.max_gap_bytes is None else options.max_gap_bytes,
            max_fetch_bytes=options.scratch_bytes // options.reader_threads,
        )
        check_files(self.store, self.folder, self.manifest, wanted_files(fetches))
        return fetches

    def read(self, fetches: Sequence[Fetch], shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> None:
        """Carries out a plan that was made for these shards."""
        targets = [target_of(shard, self._stored_dtype(fqn)) for shard, fqn in zip(shards, stored_fqns, strict=True)]
        reads = [self._read(fetch, targets, stored_fqns) for fetch in fetches]
        run_reads(
            self.store,
            reads,
            threads=self._options.reader_threads,
            verify=self._options.verify,
            scratch_bytes=self._options.scratch_bytes,
        )

    def _stored_dtype(self, fqn: str) -> str:
        dtype = self._dtypes.get(fqn)
        if dtype is None:
            dtype = self._dtypes[fqn] = self.manifest.describe(fqn)[0]
        return dtype

    def _read(self, fetch: Fetch, targets: Sequence[Target], stored_fqns: Sequence[str]) -> Read:
        file = self.manifest.files[fetch.file]
        memory = memory_of(fetch.parts[0], targets) if fetch.is_direct else None
        return Read(
            file=file,
            name=join_name(self.folder, file.name),
            byte_offset=fetch.byte_offset,
            byte_length=fetch.byte_length,
            target=memory,
            place=partial(place_all, fetch.parts, fetch.byte_offset, targets) if memory is None else _leave,
            wanted_by=partial(_names, fetch, stored_fqns),
            frames=[_frame_read(frame, targets) for frame in fetch.frames],
        )


def _frame_read(frame: Frame, targets: Sequence[Target]) -> FrameRead:
    memory = memory_of(frame.parts[0], targets) if frame.is_direct else None
    return FrameRead(
        byte_offset=frame.byte_offset,
        byte_length=frame.byte_length,
        raw_bytes=frame.raw_bytes,
        codec=frame.codec,
        item_bytes=frame.item_bytes,
        target=memory,
        place=partial(place_all, frame.parts, 0, targets) if memory is None else _leave,
    )


def _leave(content: memoryview) -> None:
    """The bytes are in their target already."""


def _names(fetch: Fetch, stored_fqns: Sequence[str]) -> str:
    names = sorted({stored_fqns[part.want] for part in fetch.all_parts})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
