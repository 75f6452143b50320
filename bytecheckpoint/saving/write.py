"""The data files of one rank, written from its snapshot to the store or to the local stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.runtime.buffers import BufferPool
from bytecheckpoint.runtime.phase_timer import PhaseTimer
from bytecheckpoint.runtime.progress import ProgressMeter
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.saving.report import WrittenFile
from bytecheckpoint.saving.target import SaveTarget
from bytecheckpoint.staging.compress import CompressedFile, allocate_for, compress_file
from bytecheckpoint.staging.file_image import PlannedFile
from bytecheckpoint.staging.snapshots import Snapshot
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.object_io import FileImage, write_image
from bytecheckpoint.storage.paths import join_name


class SaveFiles(NamedTuple):
    """The data files of one rank in one save."""

    target: SaveTarget
    save_id: str
    rank: int
    planned: Sequence[PlannedFile]

    def name(self, number: int) -> str:
        """Returns the name of a file inside the checkpoint's folder."""
        return layout.data_file_name(self.save_id, self.rank, number)


def write_files(
    files: SaveFiles,
    snapshot: Snapshot,
    timer: PhaseTimer,
    meter: ProgressMeter,
    *,
    writer_threads: int,
    scratch: BufferPool,
) -> list[WrittenFile]:
    """Writes all files of this rank durably. Compressed ones are put together in `scratch`."""
    meter.begin("write", sum(planned.byte_length for planned in files.planned))
    num_raw = sum(not planned.codecs for planned in files.planned)  # they come first
    written = [_write_raw(files, number, snapshot, timer, meter) for number in range(num_raw)]
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
            threads=writer_threads,
            second_block=scratch.second_block,
            on_compressed=partial(timer.add, "compress"),
            on_checksum=partial(timer.add, "checksum"),
        )

    def write(number: int) -> None:
        file = compressed.pop(number)
        image = file.image(files.name(number), scratch)
        written.append(WrittenFile(_write_image(files.target, image, timer), file.locations))

    for steps in zip_longest(
        [None, *(partial(write, number) for number in numbers)], [partial(compress, number) for number in numbers]
    ):
        run_jobs(lambda step: step(), [step for step in steps if step is not None], num_threads=2)
    return written


def _write_raw(
    files: SaveFiles, number: int, snapshot: Snapshot, timer: PhaseTimer, meter: ProgressMeter
) -> WrittenFile:
    planned = files.planned[number]
    image = FileImage(files.name(number), planned.extent_lengths, _with_content(planned, snapshot, meter))
    return WrittenFile(_write_image(files.target, image, timer), None)


def _with_content(planned: PlannedFile, snapshot: Snapshot, meter: ProgressMeter) -> list[Block]:
    return [block._replace(content=partial(_counted_content, snapshot, block, meter)) for block in planned.blocks]


@contextmanager
def _counted_content(snapshot: Snapshot, block: Block, meter: ProgressMeter) -> Iterator[memoryview]:
    """Counts the bytes of a block when they are no longer needed: they were written, or compressed."""
    with snapshot.content(block) as content:
        yield content
    meter.add(block.byte_length)


def _write_image(target: SaveTarget, image: FileImage, timer: PhaseTimer) -> DataFile:
    path = join_name(target.folder, image.name)
    on_checksum = partial(timer.add, "checksum")
    if target.stage is not None:
        return target.stage.write(image, target.store, path, on_checksum)
    return write_image(target.store, path, image, on_checksum)
