"""Checks of data files before a load: each file is checked once in the whole job, by one of the ranks that read it.
Integers that a load will sum are read and summed here: a sum may be out of range, and no manifest shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.collect import Entry
from bytecheckpoint.adapters.rank_values.rank_local import RankLocalEntry
from bytecheckpoint.adapters.target_shards import TargetShards
from bytecheckpoint.distributed.ranks import Ranks, SoleRank, merge_texts
from bytecheckpoint.loading.exchange import read_together
from bytecheckpoint.loading.match import Match
from bytecheckpoint.loading.overwrite_state import StateChanges, report_overwrite
from bytecheckpoint.loading.read import Source
from bytecheckpoint.manifest.ranges import Fetch
from bytecheckpoint.planner.load_plan import wanted_files
from bytecheckpoint.storage.store import SupportsByteLength


class _WantedFiles(msgspec.Struct, frozen=True, array_like=True):
    """The data files that one rank reads."""

    files: bytes
    """A bit for each file of the manifest."""
    verify: bool


def plan_together(ranks: Ranks, source: Source, match: Match) -> list[Fetch]:
    """Returns the plan of this rank, and checks its share of the files that all ranks read. All ranks call it. Once a
    rank has a later message from all others, it knows that all files are there.

    Raises like `Source.plan`.
    """
    fetches = source.plan_unchecked(match.shards, match.stored_fqns)
    num_files = len(source.manifest.files)
    is_listed = not isinstance(source.store, SupportsByteLength)  # then one listing tells all

    def assign_shares(payloads: Sequence[bytes]) -> list[bytes]:
        wanted = [msgspec.msgpack.decode(payload, type=_WantedFiles) for payload in payloads]
        rows = [np.unpackbits(np.frombuffer(each.files, np.uint8), count=num_files).view(bool) for each in wanted]
        shares = shares_of(np.array(rows), is_listed=is_listed)
        verify = any(each.verify for each in wanted)
        return [msgspec.msgpack.encode((share, verify)) for share in shares]

    own = np.zeros(num_files, bool)
    own[list(wanted_files(fetches))] = True
    message = _WantedFiles(np.packbits(own).tobytes(), source.options.verify)
    reply = ranks.reduce_scatter(msgspec.msgpack.encode(message), assign_shares)
    numbers, verify = msgspec.msgpack.decode(reply, type=tuple[list[int], bool])
    source.check_files(numbers, verify=verify)
    return fetches


def plan_again(source: Source, match: Match, *, checked: Sequence[Fetch]) -> list[Fetch]:
    """Returns a new plan, for a match made after the state was given memory. Checks the files that the plan `checked`
    does not read. Raises like `Source.plan`.
    """
    fetches = source.plan_unchecked(match.shards, match.stored_fqns)
    new = set(wanted_files(fetches)).difference(wanted_files(checked))
    source.check_files(new, verify=source.options.verify)
    return fetches


def bad_sums(
    ranks: Ranks, source: Source, entries: Sequence[Entry], stored: CheckpointView, match: Match
) -> Mapping[str, str]:
    """Reads the integers that entries sum over ranks. Returns on every rank, by the FQN of the entry, the conflict of
    each sum that some rank finds out of range. All ranks must call it, also those that sum nothing: each may be the
    only one that can read some of the files.

    Raises the errors of reading.
    """
    summing = [entry for entry in entries if isinstance(entry, RankLocalEntry)]
    shards = [shard for entry in summing for shard in entry.shards_to_sum()]
    fqns = [stored.tensor_of_other_rank(shard.fqn).fqn for shard in shards]
    apart, to_sum = source.apart(), match._replace(shards=TargetShards(shards), stored_fqns=fqns)
    with report_overwrite(StateChanges(), SoleRank()):  # no rank has overwritten anything
        source.traffic_apart.append(read_together(ranks, apart, apart.plan_unchecked(shards, fqns), to_sum))
    return merge_texts(ranks, {entry.fqn: why for entry in summing if (why := entry.bad_sum())})


def shares_of(wanted: np.ndarray, *, is_listed: bool) -> list[list[int]]:
    """Returns, by rank, the numbers of the files that it looks at. `wanted` has a row for each rank and a column for
    each file. A file that several want goes to one of them, in turn. With `is_listed`, where one listing shows all
    files, rank 0 looks at all.
    """
    if is_listed:
        return [np.flatnonzero(wanted.any(axis=0)).tolist(), *([] for _ in wanted[1:])]
    shares, to_skip = [], np.arange(wanted.shape[1]) % np.maximum(wanted.sum(axis=0), 1)
    for row in wanted:  # not by file: with thousands of ranks a column is spread over all of memory
        shares.append(np.flatnonzero(row & (to_skip == 0)).tolist())
        to_skip -= row
    return shares
