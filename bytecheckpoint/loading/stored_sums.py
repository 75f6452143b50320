"""Sums of `RankLocal` integers that lie in data files, read and checked before a load changes anything: a sum may be
out of range, and no manifest shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from bytecheckpoint.adapters.rank_values.rank_local import RankLocalEntry
from bytecheckpoint.adapters.target_shards import TargetShards
from bytecheckpoint.distributed.ranks import Ranks, SoleRank
from bytecheckpoint.loading.exchange import read_together
from bytecheckpoint.loading.name_scope import Matched
from bytecheckpoint.loading.overwrite_state import StateChanges, report_overwrite
from bytecheckpoint.loading.read import Source


def bad_sums(ranks: Ranks, source: Source, matched: Matched) -> Mapping[str, str]:
    """Returns on every rank, by the FQN of the entry, the texts of all conflicts that some rank finds. All ranks must
    call it, also those that sum nothing: each may be the only one that can read some of the files.

    Raises the errors of reading.
    """
    summing = [entry for entry in matched.entries if isinstance(entry, RankLocalEntry)]
    shards = [shard for entry in summing for shard in entry.shards_to_sum()]
    fqns = [matched.stored.tensor_of_other_rank(shard.fqn).fqn for shard in shards]
    apart, match = source.apart(), matched.match._replace(shards=TargetShards(shards), stored_fqns=fqns)
    with report_overwrite(StateChanges(), SoleRank()):  # no rank has overwritten anything
        source.traffic_apart.append(read_together(ranks, apart, apart.plan_unchecked(shards, fqns), match))
    own = {entry.fqn: why for entry in summing if (why := entry.bad_sum())}

    def unite(payloads: Sequence[bytes]) -> Sequence[bytes]:
        found: dict[str, str] = {}
        for payload in payloads:
            found |= msgspec.msgpack.decode(payload, type=dict[str, str])
        return [msgspec.msgpack.encode(found)] * len(payloads)

    return msgspec.msgpack.decode(ranks.reduce_scatter(msgspec.msgpack.encode(own), unite), type=dict[str, str])
