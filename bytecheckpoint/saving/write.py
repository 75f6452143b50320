"""The data files of one rank, written from its snapshot to the store or to the local stage."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Literal, NamedTuple

import msgspec

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.runtime.progress import ProgressMeter
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.saving.prepare import PreparedSave
from bytecheckpoint.saving.report import WrittenFile
from bytecheckpoint.saving.target import SaveTarget
from bytecheckpoint.staging.compress import CompressedFile, allocate_for, compress_file
from bytecheckpoint.staging.file_image import PlannedFile
from bytecheckpoint.staging.reuse import FileReuse, ReusableFiles, RunningDigest, content_digest
from bytecheckpoint.staging.snapshots import Snapshot
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.object_io import FileImage, write_image
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import SupportsDuplicate


def find_reusable(prepared: PreparedSave) -> FileReuse | None:
    """Returns the files of the newest checkpoint under the root that this rank may duplicate instead of writing its
    own; an empty FileReuse if there is no such checkpoint. Returns None if `SaveOptions.reuse` is off, or the store
    cannot duplicate files.

    All ranks call this together: the coordinator chooses the checkpoint, and sends the records of its files to ranks
    that have not saved it themselves.
    """
    target, history = prepared.target, prepared.reuse
    store = target.store
    if history is None or not isinstance(store, SupportsDuplicate):
        return None

    def replies(known_ids: Sequence[bytes]) -> list[bytes]:
        folder = history.newest.folder if history.newest.save_id else None
        files = _reusable_of(target, folder, [known.decode() for known in known_ids])
        return [msgspec.msgpack.encode(each) for each in files]

    reply = prepared.call.ranks.reduce_scatter(history.newest.save_id.encode(), replies)
    known = msgspec.msgpack.decode(reply, type=ReusableFiles | None)
    return FileReuse(store, history.newest if known is None else known)


def _reusable_of(target: SaveTarget, folder: str | None, known_ids: Sequence[str]) -> list[ReusableFiles | None]:
    """Returns, for each rank, its reusable files of the newest checkpoint; None for a rank that knows them already, as
    its id in `known_ids` says. `folder` is None if the coordinator does not know that checkpoint: it is looked up then.
    """
    if folder is not None and len(set(known_ids)) == 1:
        return [None] * len(known_ids)
    try:
        if folder is None:
            wanted: Literal["latest"] | None = "latest" if target.step is not None else None
            folder = layout.find_checkpoint(target.store, wanted, location=str(target.store))
        manifest = layout.read_manifest(target.store, folder)
    except CheckpointError:  # there is none, or none that can be read: all files are written
        return [ReusableFiles()] * len(known_ids)
    by_rank: dict[int, list[DataFile]] = {}
    for file in manifest.files:
        if file.content_digest:
            plain = file._replace(extent_lengths=tuple(file.extent_lengths), extent_digests=tuple(file.extent_digests))
            by_rank.setdefault(_rank_of(file), []).append(plain)
    return [
        None if known == manifest.save_id else ReusableFiles(manifest.save_id, folder, tuple(by_rank.get(rank, ())))
        for rank, known in enumerate(known_ids)
    ]


def _rank_of(file: DataFile) -> int:
    """Returns the rank in the name of a data file; -1 where it has none."""
    rank = file.name.rpartition("/")[2].split("-")[1:2]
    return int(rank[0]) if rank and rank[0].isdigit() else -1


class SaveFiles(NamedTuple):
    """The data files of one rank in one save."""

    target: SaveTarget
    save_id: str
    rank: int
    planned: Sequence[PlannedFile]
    extent_digests: Sequence[Sequence[int]] = ()
    """Extent digests of each file if memory holds the save, for which they were computed already; else empty."""

    def name(self, number: int) -> str:
        """Returns the name of a file inside the checkpoint's folder."""
        return layout.data_file_name(self.save_id, self.rank, number)


def write_files(files: SaveFiles, prepared: PreparedSave, *, reuse: FileReuse | None) -> list[WrittenFile]:
    """Writes all files of this rank durably from the snapshot; a frozen one of which `reuse` has an equal file is
    duplicated from that instead. Returns both kinds, in the order of the plan.
    """
    snapshot, timer, meter = prepared.snapshot, prepared.call.timer, prepared.meter
    scratch = prepared.buffers.scratch
    meter.begin("write", sum(planned.byte_length for planned in files.planned))
    num_raw = sum(not planned.codecs for planned in files.planned)  # they come first
    written = [_write_raw(files, number, snapshot, timer, meter, reuse=reuse) for number in range(num_raw)]
    if num_raw == len(files.planned):
        return written
    numbers = range(num_raw, len(files.planned))
    # One file is compressed while the one before it is written: two buffers, used alternately.
    buffers = [allocate_for(files.planned[num_raw:]) for _ in range(2)]
    compressed: dict[int, CompressedFile] = {}

    def compress(number: int) -> None:
        compressed[number] = compress_file(
            files.planned[number],
            _with_content(files.planned[number], snapshot, meter),
            buffers[number % 2],
            threads=prepared.options.writer_threads,
            second_block=scratch.second_block,
            on_compressed=partial(timer.add, "compress"),
            on_checksum=partial(timer.add, "checksum"),
        )

    def write(number: int) -> None:
        file = compressed.pop(number)
        image = file.image(files.name(number), scratch)
        frozen_reuse = reuse if files.planned[number].is_frozen else None
        data_file = _take(files.target, image, frozen_reuse, timer)
        if data_file is None:
            data_file = _write_image(files.target, image, timer, is_digested=frozen_reuse is not None)
        written.append(WrittenFile(data_file, file.locations))

    for steps in zip_longest(
        [None, *(partial(write, number) for number in numbers)], [partial(compress, number) for number in numbers]
    ):
        run_jobs(lambda step: step(), [step for step in steps if step is not None], num_threads=2)
    return written


def _write_raw(
    files: SaveFiles,
    number: int,
    snapshot: Snapshot,
    timer: PhaseTimer,
    meter: ProgressMeter,
    *,
    reuse: FileReuse | None,
) -> WrittenFile:
    """Writes a file of uncompressed tensors, or duplicates an equal one of an earlier checkpoint."""
    planned = files.planned[number]
    blocks = [block._replace(content=partial(snapshot.content, block)) for block in planned.blocks]
    digests = files.extent_digests[number] if files.extent_digests else None
    image = FileImage(files.name(number), planned.extent_lengths, blocks, digests)
    frozen_reuse = reuse if planned.is_frozen else None
    reused = _take(files.target, image, frozen_reuse, timer)
    if reused is not None:
        meter.add(planned.byte_length)
        return WrittenFile(reused, None)
    counted = image._replace(blocks=_with_content(planned, snapshot, meter))
    return WrittenFile(_write_image(files.target, counted, timer, is_digested=frozen_reuse is not None), None)


def _take(target: SaveTarget, image: FileImage, reuse: FileReuse | None, timer: PhaseTimer) -> DataFile | None:
    """Duplicates an equal file of the newest checkpoint into the folder of this one. Returns None if there is none, or
    it is gone or the store cannot duplicate it: then the file is to be written. Raises the other errors of
    `FileReuse.take`.
    """
    if reuse is None or not reuse.may_have(image):
        return None
    started = time.perf_counter()
    digest = content_digest(image.blocks)
    timer.add("checksum", time.perf_counter() - started)
    file = reuse.take(image, join_name(target.folder, image.name), digest)
    if file is not None and target.stage is not None:
        target.stage.leave_out(image.name)
    return file


def _with_content(planned: PlannedFile, snapshot: Snapshot, meter: ProgressMeter) -> list[Block]:
    return [block._replace(content=partial(_counted_content, snapshot, block, meter)) for block in planned.blocks]


@contextmanager
def _counted_content(snapshot: Snapshot, block: Block, meter: ProgressMeter) -> Iterator[memoryview]:
    """Yields the bytes of a block; counts them in `meter` once the caller has written or compressed them."""
    with snapshot.content(block) as content:
        yield content
    meter.add(block.byte_length)


def _write_image(target: SaveTarget, image: FileImage, timer: PhaseTimer, *, is_digested: bool) -> DataFile:
    """Writes a file to the store or the local stage; with `is_digested`, adds a digest of its content."""
    path, digest = join_name(target.folder, image.name), RunningDigest()
    if is_digested:
        # Hazard: the digest by which `_take` looked for an equal file may be wrong by now: live state may have changed.
        image = image._replace(blocks=digest.hashed_blocks(image.blocks))
    on_checksum = partial(timer.add, "checksum")
    if target.stage is not None:
        file = target.stage.write(image, target.store, path, on_checksum)
    else:
        file = write_image(target.store, path, image, on_checksum)
    return file._replace(content_digest=digest.digest(file.byte_length)) if is_digested else file
