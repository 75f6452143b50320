"""Stored bytes into shards: the load plan carried out. What a load and a look into a checkpoint have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bytecheckpoint.adapters.tensors import LocalShard
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.planner.coalesce import Fetch
from bytecheckpoint.planner.load_plan import Want, plan_load, wanted_files
from bytecheckpoint.staging import Target, place, takes_bytes, target_of
from bytecheckpoint.storage.layout import check_files
from bytecheckpoint.storage.names import join_name
from bytecheckpoint.storage.reader import Read, run_reads
from bytecheckpoint.storage.store import Store


class Source:
    """A committed checkpoint that is being read."""

    def __init__(self, store: Store, folder: str, manifest: Manifest, options: LoadOptions) -> None:
        self.store = store
        self.folder = folder
        self.manifest = manifest
        self._options = options

    @property
    def path(self) -> str:
        """Where it stands, as messages and reports show it."""
        return join_name(str(self.store), self.folder)

    def plan(self, shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> list[Fetch]:
        """The reads that fill these shards, each from the stored tensor of its number; data files are looked at.

        Raises CheckpointMismatchError (coverage), CheckpointNotFoundError (missing_file) or CheckpointCorruptError
        (truncated); nothing has been read then.
        """
        wants = [
            Want(fqn, shard.region, takes_bytes(shard, self.manifest.describe(fqn)[0]))
            for shard, fqn in zip(shards, stored_fqns, strict=True)
        ]
        fetches = plan_load(
            self.manifest,
            wants,
            verify=self._options.verify,
            max_gap_bytes=self._options.max_gap_bytes,
            max_fetch_bytes=self._options.scratch_bytes // self._options.reader_threads,
        )
        check_files(self.store, self.folder, self.manifest, wanted_files(fetches))
        return fetches

    def read(self, fetches: Sequence[Fetch], shards: Sequence[LocalShard], stored_fqns: Sequence[str]) -> None:
        """Carries out a plan that was made for these shards."""
        targets = [
            target_of(shard, self.manifest.describe(fqn)[0]) for shard, fqn in zip(shards, stored_fqns, strict=True)
        ]
        reads = [self._read(fetch, targets, stored_fqns) for fetch in fetches]
        run_reads(self.store, reads, threads=self._options.reader_threads, verify=self._options.verify)

    def _read(self, fetch: Fetch, targets: Sequence[Target], stored_fqns: Sequence[str]) -> Read:
        file = self.manifest.files[fetch.file]
        memory = None
        if fetch.is_direct:
            start = fetch.parts[0].target_byte_offset  # type: ignore[union-attr]  # a direct fetch has one FlatPart
            target = targets[fetch.parts[0].want].memory
            memory = target[start : start + fetch.byte_length] if target is not None else None
        return Read(
            file=file,
            name=join_name(self.folder, file.name),
            byte_offset=fetch.byte_offset,
            byte_length=fetch.byte_length,
            target=memory,
            place=partial(_place_all, fetch, targets) if memory is None else _leave,
            wanted_by=partial(_names, fetch, stored_fqns),
        )


def _leave(content: memoryview) -> None:
    """The bytes were read into their target."""


def _place_all(fetch: Fetch, targets: Sequence[Target], content: memoryview) -> None:
    for part in fetch.parts:
        place(part, content, fetch.byte_offset, targets)


def _names(fetch: Fetch, stored_fqns: Sequence[str]) -> str:
    names = sorted({stored_fqns[part.want] for part in fetch.parts})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
