"""Puts the state of a data loader together from the parts of all ranks: the shared part once, each stream once. A
stream that would be lost or doubled is an error, which names the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from bytecheckpoint.adapters.data.stream_wire import StreamsPart, encode_loader_state
from bytecheckpoint.adapters.expectation import Scope
from bytecheckpoint.adapters.plain.plain_data import decode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointSaveError, and_more
from bytecheckpoint.manifest.plain_wire import join_fqn

_NUM_SHOWN = 10
_NUM_IDS_SHOWN = 5

_decode_streams = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


class StreamProblem(NamedTuple):
    """A reason why the parts cannot be put together."""

    text: str
    ranks: tuple[int, ...]
    """Global ranks."""


class MergedStreams(NamedTuple):
    """The encoded object for the manifest, empty if there are problems, and the problems."""

    encoded: bytes
    problems: list[StreamProblem]


def digest_of(ids: Sequence[str]) -> bytes:
    """Returns a digest of stream ids, which the caller has sorted: it depends on their order."""
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(ids))


def merge_streams(fqn: str, parts: Mapping[int, tuple[Scope, bytes]]) -> MergedStreams:
    """Unites the parts of a data loader's state, by global rank. Reasons why they do not fit are in `problems`."""
    others = [rank for rank, (scope, _) in parts.items() if scope != "streams"]
    if others:
        owner = next(rank for rank in parts if rank not in others)
        text = f"{fqn}: a DataLoaderState on rank {owner}, and something else on rank {others[0]}"
        return MergedStreams(b"", [StreamProblem(text, (owner, *others))])
    decoded = {rank: msgspec.msgpack.decode(part, type=StreamsPart) for rank, (_, part) in sorted(parts.items())}
    first_rank, first = next(iter(decoded.items()))
    problems = [
        StreamProblem(f"{what}: {value!r} on rank {first_rank}, {other!r} on rank {rank}", (first_rank, rank))
        for what, value, rank, other in _differing_facts(fqn, first, decoded)
    ]
    if problems:  # the checks below rely on them being equal
        return MergedStreams(b"", problems)
    problems += _differing_shared(fqn, first_rank, decoded)
    streams: dict[str, msgspec.Raw] = {}
    owners: dict[str, int] = {}
    """Data-parallel rank of each stream, by its id."""
    by_dp_rank: dict[int, int] = {}
    """Global rank of the first replica, by data-parallel rank."""
    for rank, part in sorted(decoded.items(), key=lambda item: (item[1].dp_rank, item[0])):
        replica_of = by_dp_rank.setdefault(part.dp_rank, rank)
        if replica_of != rank:
            problems += _differing_replica(fqn, (replica_of, decoded[replica_of]), (rank, part))
            continue
        own = _decode_streams(part.streams)
        if not owners.keys().isdisjoint(own):
            problems += _two_owners(fqn, sorted(owners.keys() & own.keys()), owners, by_dp_rank, part.dp_rank)
        streams.update(own)
        owners.update(dict.fromkeys(own, part.dp_rank))
    problems += _without_owner(fqn, first, decoded, by_dp_rank, owners)
    problems += _ambiguous(fqn, streams, by_dp_rank, owners)
    return MergedStreams(b"" if problems else encode_loader_state(first, streams, owners), problems)


def conflict_of_streams(problems: Sequence[StreamProblem]) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"the parts of data loaders' state from all ranks do not fit together, for {len(problems)} reasons; nothing "
        "was written. Give every data-parallel rank a number of its own in bcp.DataLoaderState(loader, rank=, size=), "
        "and only its tensor-, pipeline- and context-parallel replicas the same:\n  "
        + and_more([problem.text for problem in problems], _NUM_SHOWN, "\n  "),
        kind="conflict",
        ranks=tuple(sorted({rank for problem in problems for rank in problem.ranks})),
    )


def listed_ids(ids: Sequence[str]) -> str:
    """Returns how many these stream ids are, and the first 5 of them, as text: `2 streams 'a', 'b'`."""
    return f"{'stream' if len(ids) == 1 else f'{len(ids)} streams'} {and_more(list(map(repr, ids)), _NUM_IDS_SHOWN)}"


def _differing_facts(
    fqn: str, first: StreamsPart, parts: Mapping[int, StreamsPart]
) -> Iterator[tuple[str, Any, int, Any]]:
    """Yields, for each fact that differs: its name, the first rank's value, another rank, and the value there."""
    for name, what in (("loader", "the loader"), ("size", "the size"), ("elastic", "elastic"), ("keyed_by", "keys")):
        value = getattr(first, name)
        odd = next(((rank, part) for rank, part in parts.items() if getattr(part, name) != value), None)
        if odd is not None:
            yield f"{fqn}: {what}", value, odd[0], getattr(odd[1], name)


def _differing_shared(fqn: str, first_rank: int, parts: Mapping[int, StreamsPart]) -> Iterator[StreamProblem]:
    shared = parts[first_rank].shared
    odd = next(((rank, part) for rank, part in parts.items() if part.shared != shared), None)
    if odd is not None:
        values, others = (_leaves_of(f"{fqn}.shared", raw) for raw in (shared, odd[1].shared))
        differing = (name for name in [*values, *others] if values.get(name) != others.get(name))
        name = next(differing, f"{fqn}.shared")  # long tensors that differ may have the same text
        shown = [f"{of_rank.get(name, 'nothing')!r:.60}" for of_rank in (values, others)]
        text = f"{name}: {shown[0]} on rank {first_rank}, {shown[1]} on rank {odd[0]}: shared state is one for all"
        yield StreamProblem(text, (first_rank, odd[0]))


def _leaves_of(fqn: str, raw: msgspec.Raw) -> dict[str, str]:
    """Returns the leaves of an encoded tree as text, which can be compared whatever they are."""
    return {name: repr(value) for name, value in leaves(decode_plain(bytes(raw)), fqn).items()}


def _differing_replica(
    fqn: str, one: tuple[int, StreamsPart], other: tuple[int, StreamsPart]
) -> Iterator[StreamProblem]:
    (rank, part), (other_rank, replica) = one, other
    if part.streams == replica.streams:
        return
    streams, others = _decode_streams(part.streams), _decode_streams(replica.streams)
    ids = sorted(name for name in streams.keys() | others.keys() if streams.get(name) != others.get(name))
    text = (
        f"{fqn}: {listed_ids(ids)} differ between the replicas rank {rank} and rank {other_rank}, which both passed "
        f"rank={part.dp_rank}"
    )
    yield StreamProblem(text, (rank, other_rank))


def _two_owners(
    fqn: str, ids: Sequence[str], owners: Mapping[str, int], by_dp_rank: Mapping[int, int], dp_rank: int
) -> Iterator[StreamProblem]:
    for other in sorted({owners[stream_id] for stream_id in ids}):
        of_both = [stream_id for stream_id in ids if owners[stream_id] == other]
        ranks = by_dp_rank[other], by_dp_rank[dp_rank]
        text = (
            f"{fqn}: {listed_ids(of_both)} have two owners: data-parallel rank {other} (rank {ranks[0]}) and "
            f"data-parallel rank {dp_rank} (rank {ranks[1]})"
        )
        yield StreamProblem(text, ranks)


def _without_owner(
    fqn: str,
    first: StreamsPart,
    parts: Mapping[int, StreamsPart],
    by_dp_rank: Mapping[int, int],
    owners: Mapping[str, int],
) -> Iterator[StreamProblem]:
    """Yields the problems of absent data-parallel ranks, of streams without an owner, and of the first rank that knows
    other streams than data-parallel rank 0.
    """
    absent = [str(dp_rank) for dp_rank in range(first.size) if dp_rank not in by_dp_rank]
    if absent:
        text = f"{fqn}: no process passed rank={and_more(absent, _NUM_SHOWN)} of size={first.size}"
        yield StreamProblem(f"{text}: the streams there have no owner", tuple(parts))
    known = next((part for part in parts.values() if part.known_ids), None)
    if known is None:
        return
    missing = sorted(set(known.known_ids).difference(owners))
    if missing and not absent:
        yield StreamProblem(f"{fqn}: {listed_ids(missing)} have no owner", tuple(by_dp_rank.values()))
    odd = next((rank for rank, part in parts.items() if part.known and part.known != known.known), None)
    if odd is not None:
        text = f"{fqn}: rank {odd} knows other streams than data-parallel rank 0, which knows {len(known.known_ids)}"
        yield StreamProblem(text, (by_dp_rank[0], odd))


def _ambiguous(
    fqn: str, streams: Mapping[str, msgspec.Raw], by_dp_rank: Mapping[int, int], owners: Mapping[str, int]
) -> Iterator[StreamProblem]:
    """Yields a problem for two streams that have values of one FQN: an id with dots may begin with another id.
    `by_dp_rank` maps data-parallel ranks to global ranks, `owners` stream ids to data-parallel ranks.
    """
    for stream_id in [stream_id for stream_id in streams if "." in stream_id]:
        parts = stream_id.split(".")
        for count in range(1, len(parts)):
            other = ".".join(parts[:count])
            if other not in streams:
                continue
            trees = {name: decode_plain(bytes(streams[name])) for name in (other, stream_id)}
            try:
                leaves(trees, join_fqn(fqn, "streams"))
            except CheckpointSaveError:
                ranks = tuple(by_dp_rank[owners[name]] for name in trees)
                text = f"{fqn}: streams {other!r} and {stream_id!r} have values of one name; rename one of them"
                yield StreamProblem(text, ranks)
