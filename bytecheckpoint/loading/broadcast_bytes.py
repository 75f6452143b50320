"""Few bytes that many ranks of a load want, such as an optimizer's `step`: the coordinator reads them and sends them to
all with a message, so nobody connects for them. Every rank verifies them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial

import xxhash

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.distributed.wire import damaged
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.receive import Arrivals
from bytecheckpoint.loading.scatter import Targets
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.memory.host_to_device import CopyStreams
from bytecheckpoint.planner.exchange_plan import Extents, Run


class CommonBytes:
    """The content of these runs, on every rank."""

    def __init__(self, runs: Sequence[Run], extents: Extents, files: Sequence[DataFile]) -> None:
        self._runs = runs
        self._extents = extents
        self._files = files
        self._content = bytearray()

    def __len__(self) -> int:
        return len(self._content)

    def share(self, ranks: Ranks, source: Source, targets: Targets, lanes: CopyStreams) -> None:
        """Reads them on the coordinator and sends them to all ranks, which must all call this.

        Raises what reading raises, and CheckpointCorruptError (checksum) for bytes that were damaged on the way.
        """
        if not self._runs:
            return
        content = self._read(source, targets, lanes) if ranks.rank == COORDINATOR else b""
        self._content = bytearray(ranks.broadcast(content))
        if source.options.verify:
            self._verify()

    def put(self, fetches: Sequence[Fetch], arrivals: Arrivals) -> None:
        """Puts into place what this rank wants of them; each fetch lies in one of the runs."""
        content = memoryview(self._content)
        places = list(self._places())
        for fetch in fetches:
            # Runs are in the order of the files.
            number = bisect_right(places, (fetch.file, fetch.byte_offset), key=lambda place: place[:2]) - 1
            _, byte_offset, position = places[number]
            first = position + fetch.byte_offset - byte_offset
            arrivals.put(fetch, content[first : first + fetch.byte_length])

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Of each run: its file, the byte offset there, and the position in the content."""
        position = 0
        for run in self._runs:
            yield run.file, self._extents.bounds(run.file)[run.first], position
            position += self._extents.num_bytes(run)

    def _read(self, source: Source, targets: Targets, lanes: CopyStreams) -> bytes:
        places = list(self._places())
        parts = [b""] * len(places)

        def keep(number: int, content: memoryview) -> None:
            parts[number] = bytes(content)

        fetches = [
            Fetch(file, byte_offset, self._extents.num_bytes(run), (), is_direct=False)
            for run, (file, byte_offset, _) in zip(self._runs, places, strict=True)
        ]
        reads = [
            read._replace(place=partial(keep, number), wanted_by=lambda *_: "what all ranks want")
            for number, read in enumerate(source.with_targets(fetches, targets, ()))
        ]
        source.run(reads, lanes)
        return b"".join(parts)

    def _verify(self) -> None:
        content = memoryview(self._content)
        for run, (_, _, position) in zip(self._runs, self._places(), strict=True):
            file, bounds = self._files[run.file], self._extents.bounds(run.file)
            for number in range(run.first, run.end) if file.extent_lengths else ():
                start, end = bounds[number], bounds[number + 1]
                first = position + start - bounds[run.first]
                if xxhash.xxh3_64_intdigest(content[first : first + end - start]) != file.extent_digests[number]:
                    raise damaged(f"bytes {start} to {end} of {file.name}, which rank 0 had sent to all, were")
