"""Few bytes that many ranks of a load want, such as an optimizer's `step`: the coordinator reads and broadcasts them,
so that no rank connects to another one for them. Every rank verifies them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, pairwise

import xxhash

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.distributed.wire import damaged
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.receive import Receiver
from bytecheckpoint.loading.scatter import Targets
from bytecheckpoint.manifest import DataFile
from bytecheckpoint.memory.host_to_device import CopyStreams
from bytecheckpoint.planner.coalesce import Fetch
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents


class CommonBytes:
    """The content of some runs, which are in the order of the files, on every rank."""

    def __init__(self, runs: Sequence[ExtentRun], extents: Extents) -> None:
        self._runs = runs
        self._extents = extents
        self._starts = [(run.file, extents.bounds(run.file)[run.first]) for run in runs]
        ends = [*accumulate(map(extents.num_bytes, runs), initial=0)]
        self.content = memoryview(bytearray(ends[-1]))
        self._contents = [self.content[start:end] for start, end in pairwise(ends)]

    def broadcast(self, ranks: Ranks, source: Source, targets: Targets, lanes: CopyStreams) -> None:
        """Reads the runs on the coordinator and sends them to all ranks, which must all call this.

        Raises what reading raises, and CheckpointCorruptError (checksum) for bytes that were damaged on the way.
        """
        if not self._runs:
            return
        if ranks.rank == COORDINATOR:
            reads = []
            for start, content in zip(self._starts, self._contents, strict=True):
                fetch = Fetch(*start, len(content), (), is_direct=False)
                read = source.reads([fetch], targets, ())[0]
                reads.append(read._replace(target=partial(_open, content), wanted_by=lambda *_: "what all ranks want"))
            source.run(reads, lanes)
        self.content[:] = ranks.broadcast(bytes(self.content))
        if source.options.verify:
            self._verify(source.manifest.files)

    def place(self, fetches: Iterable[Fetch], receiver: Receiver) -> None:
        """Puts what this rank wants of the runs into its tensors; each fetch lies in one of them."""
        for fetch in fetches:
            number = bisect_right(self._starts, (fetch.file, fetch.byte_offset)) - 1
            first = fetch.byte_offset - self._starts[number][1]
            receiver.place(fetch, self._contents[number][first : first + fetch.byte_length])

    def _verify(self, files: Sequence[DataFile]) -> None:
        for run, content in zip(self._runs, self._contents, strict=True):
            file, bounds = files[run.file], self._extents.bounds(run.file)
            for number in range(run.first, run.end) if file.extent_lengths else ():
                start, end = bounds[number], bounds[number + 1]
                extent = content[start - bounds[run.first] :][: end - start]
                if xxhash.xxh3_64_intdigest(extent) != file.extent_digests[number]:
                    raise damaged(f"bytes {start} to {end} of {file.name}, which rank 0 had sent to all, were")


def _open(content: memoryview) -> AbstractContextManager[memoryview]:
    return nullcontext(content)
