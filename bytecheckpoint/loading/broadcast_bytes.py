"""Few bytes that many ranks of a load want, such as an optimizer's `step`: the coordinator reads and broadcasts them,
so that no rank connects to another one for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, pairwise

from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks
from bytecheckpoint.distributed.wire import decode_checked, encode_checked
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.receive import Receiver
from bytecheckpoint.loading.scatter import Targets
from bytecheckpoint.memory.host_to_device import CopyStreams
from bytecheckpoint.planner.coalesce import Fetch
from bytecheckpoint.planner.exchange_plan import ExtentRun, Extents


class CommonBytes:
    """The content of some runs, which are in the order of the files, on every rank."""

    def __init__(self, runs: Sequence[ExtentRun], extents: Extents) -> None:
        self._starts = [(run.file, extents.bounds(run.file)[run.first]) for run in runs]
        bounds = [*accumulate(map(extents.num_bytes, runs), initial=0)]
        self.content = memoryview(bytearray(bounds[-1]))
        self._contents = [self.content[start:end] for start, end in pairwise(bounds)]

    def broadcast(self, ranks: Ranks, source: Source, targets: Targets, lanes: CopyStreams) -> None:
        """Reads the runs on the coordinator and sends them to all ranks, which must all call this.

        Raises what reading raises, and CheckpointCorruptError (checksum) for bytes that were damaged on the way.
        """
        if not self._starts:
            return
        if ranks.rank == COORDINATOR:
            reads = []
            for start, content in zip(self._starts, self._contents, strict=True):
                read = source.reads([Fetch(*start, len(content), (), is_direct=False)], targets, ())[0]
                reads.append(read._replace(target=partial(_open, content), wanted_by=lambda *_: "what all ranks want"))
            source.run(reads, lanes)
        message = ranks.broadcast(encode_checked(self.content))
        self.content[:] = decode_checked(message, "what rank 0 had read for all ranks")

    def place(self, fetches: Iterable[Fetch], receiver: Receiver) -> None:
        """Puts what this rank wants of the runs into its tensors; each fetch lies in one of them."""
        for fetch in fetches:
            number = bisect_right(self._starts, (fetch.file, fetch.byte_offset)) - 1
            first = fetch.byte_offset - self._starts[number][1]
            receiver.place(fetch, self._contents[number][first : first + fetch.byte_length])


def _open(content: memoryview) -> AbstractContextManager[memoryview]:
    return nullcontext(content)
