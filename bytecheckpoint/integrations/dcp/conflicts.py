"""Finds values of one name that differ from rank to rank. torch.distributed.checkpoint silently saves the value of one
rank; here the value of each rank is saved. Modules, optimizers and other live objects are compared by the save itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
import xxhash

from bytecheckpoint.adapters.plain.plain_data import encode_plain, fits_inline
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.rank_values.rank_local import RankLocal
from bytecheckpoint.adapters.shards import PLAIN_TENSORS
from bytecheckpoint.distributed.ranks import COORDINATOR, Ranks, Subject, join_ranks, together
from bytecheckpoint.distributed.store_limits import run_on_thread
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointSaveError, and_more
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, join_fqn, too_deep
from bytecheckpoint.saving.in_flight import wait_until_numbered
from bytecheckpoint.saving.replica_checks import combined_digest, digest_of

OnConflict = Literal["per_rank", "error"]

_NUM_SHOWN = 10


def mark_differing(
    state: Mapping[str, Any],
    *,
    path: str,
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
    on_conflict: OnConflict,
) -> dict[str, Any]:
    """Returns the state with each value that differs between ranks in a RankLocal; all ranks call it together.

    Compares plain data of any size, and unsharded tensors of at most 64 KiB. If some differ, rank 0 of the group
    warns; with on_conflict="error", all ranks raise CheckpointMismatchError (conflict) instead.
    """
    about = Subject(path, None, is_save=True)
    wait_until_numbered()
    ranks = join_ranks(process_group, timeout_s, about=about)
    if ranks.num_ranks == 1:
        return dict(state)
    with together(ranks, "comparing the values of ranks", about=about):
        differing = _Values(state).differing(ranks)
        if differing and on_conflict == "error":
            raise CheckpointMismatchError(
                f"{len(differing)} values differ between ranks: {and_more(differing, _NUM_SHOWN)}; nothing was "
                'written: give every rank the same, wrap them in bcp.RankLocal, or pass on_conflict="per_rank"',
                kind="conflict",
                ranks=tuple(ranks.global_ranks),
            )
    run_on_thread(ranks.close)  # the save, which follows, need not wait until every rank has read the answer
    if differing and ranks.rank == COORDINATOR:
        warnings.warn(
            f"{len(differing)} values differ between ranks: {and_more(differing, _NUM_SHOWN)}. Each rank's is saved, "
            "and a load gives it to the rank of the same number; wrap what is meant to differ in bcp.RankLocal",
            stacklevel=4,
        )
    # With the names above them: of a state with as many conflicts as parameters each part is looked at once.
    names = set(differing)
    on_the_way = {above for name in differing for above in accumulate(name.split("."), "{}.{}".format)}
    return {key: _marked(value, str(key), names, on_the_way) for key, value in state.items()}


class _Values:
    """The values of this rank that others may hold under the same name."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._plain: dict[str, bytes] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            for fqn, leaf in _parts(value, str(key), MAX_DEPTH):
                self._add(fqn, leaf)

    def _add(self, fqn: str, leaf: Any) -> None:
        """Notes a value for the comparison. Leaves out large tensors, sharded tensors and live objects."""
        if isinstance(leaf, torch.Tensor):
            if _is_compared(leaf):
                self._plain[fqn] = f"{leaf.dtype} {list(leaf.shape)}".encode()
                self._tensors[fqn] = leaf
            return
        inside: list[torch.Tensor] = []  # a tuple is one leaf
        try:
            self._plain[fqn] = encode_plain(leaf, fqn, lambda _name, tensor: inside.append(tensor))
            if inside and PLAIN_TENSORS.issuperset(map(type, inside)):  # a DTensor can be in no RankLocal
                self._plain[fqn] = encode_plain(leaf, fqn, _if_compared)
        except CheckpointSaveError:  # a live object, or a value that the save will refuse by its name
            return

    def differing(self, ranks: Ranks) -> list[str]:
        """Returns the sorted names whose values are not the same on all ranks that have them. If all are the same, each
        rank sends only one short message.
        """
        together_digest = xxhash.xxh3_64(msgspec.msgpack.encode(sorted(self._plain.items())))
        together_digest.update(combined_digest([self._tensors[fqn] for fqn in sorted(self._tensors)]).to_bytes(8))
        if ranks.reduce_scatter(together_digest.digest(), _to_all(_are_same)) == b"same":
            return []
        digests = {fqn: xxhash.xxh3_64_digest(data) for fqn, data in self._plain.items()}
        digests |= {fqn: digests[fqn] + digest_of(tensor).to_bytes(8) for fqn, tensor in self._tensors.items()}
        reply = ranks.reduce_scatter(msgspec.msgpack.encode(digests), _to_all(_names_that_differ))
        return msgspec.msgpack.decode(reply, type=list[str])


def _is_compared(tensor: torch.Tensor) -> bool:
    return fits_inline(tensor) and not tensor.is_meta


def _if_compared(_fqn: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor if its content is compared; None if only its name is."""
    return tensor if _is_compared(tensor) else None


def _to_all(reduce: Callable[[Sequence[bytes]], bytes]) -> Callable[[list[bytes]], Sequence[bytes]]:
    return lambda payloads: [reduce(payloads)] * len(payloads)


def _are_same(payloads: Sequence[bytes]) -> bytes:
    return b"same" if len(set(payloads)) == 1 else b"differ"


def _names_that_differ(payloads: Sequence[bytes]) -> bytes:
    found: dict[str, set[bytes]] = {}
    for payload in payloads:
        for fqn, digest in msgspec.msgpack.decode(payload, type=dict[str, bytes]).items():
            found.setdefault(fqn, set()).add(digest)
    return msgspec.msgpack.encode(sorted(fqn for fqn, digests in found.items() if len(digests) > 1))


def _parts(value: Any, fqn: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a value, each with its FQN. Takes dicts apart, and lists only if they hold tensors. Raises
    CheckpointSaveError for more than `depth` levels.
    """
    items = _items(value, fqn)
    if items is None:
        yield fqn, value
        return
    if depth == 0:
        raise too_deep(fqn)
    for key, item in items:
        yield from _parts(item, join_fqn(fqn, key), depth - 1)


def _items(value: Any, fqn: str) -> Collection[tuple[Any, Any]] | None:
    """Returns the items of a dict, or of a list that holds tensors; None for any other value."""
    if isinstance(value, dict):
        return value.items()
    if type(value) is list and leaves(value, fqn).keys() != {fqn}:
        return list(enumerate(value))
    return None


def _marked(value: Any, fqn: str, differing: set[str], on_the_way: set[str]) -> Any:
    """Returns a copy of the value in which the parts with these names are put into a RankLocal each. `on_the_way` has
    these names, and the names of all that they are in.
    """
    if fqn in differing:
        return RankLocal(value)
    items = _items(value, fqn) if fqn in on_the_way else None
    if items is None:
        return value
    marked = {key: _marked(item, join_fqn(fqn, key), differing, on_the_way) for key, item in items}
    return marked if isinstance(value, dict) else list(marked.values())
