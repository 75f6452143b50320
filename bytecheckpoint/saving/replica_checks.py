"""Digests by which replicas are compared: small tensors on every save, and tensors of one FQN that several pipeline
stages hold. Stages may share a tensor; if each has its own under that FQN, all but one would be lost: an error.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from bytecheckpoint.adapters.plain.plain_data import SMALL_TENSOR_BYTES
from bytecheckpoint.adapters.shard_columns import ShardBlocks
from bytecheckpoint.adapters.shards import LocalShard, flat_bytes
from bytecheckpoint.errors import CheckpointMismatchError, and_more
from bytecheckpoint.memory.batched_copy import gather_pieces
from bytecheckpoint.memory.tensor_bytes import is_row_major_on_host, same_bits

_NUM_SHOWN = 10

_Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths."""
PartDigests = dict[str, list[tuple[tuple[int, ...], tuple[int, ...], int]]]
"""Offsets, lengths and digest of each part that a rank holds, by FQN."""


class StageDigests(NamedTuple):
    """The pipeline stages that one rank holds tensors of, and digests of these tensors."""

    stages: Mapping[str, int]
    """Stage by FQN."""
    digests: PartDigests


def fqns_in_several_stages(stages: Iterable[Mapping[str, int]]) -> list[str]:
    """Returns the FQNs, sorted, that ranks have in different stages. `stages` has the stage by FQN of each rank."""
    first: dict[str, int] = {}
    found: set[str] = set()
    for of_rank in stages:
        for fqn, stage in of_rank.items():
            if first.setdefault(fqn, stage) != stage:
                found.add(fqn)
    return sorted(found)


def part_digests(shards: Sequence[LocalShard], fqns: Iterable[str], aliases: Mapping[str, str]) -> PartDigests:
    """Returns digests of the parts of these tensors that this rank holds, however large. A tied weight has those of the
    tensor that it is tied to.
    """
    fqns_of: dict[str, list[str]] = {}
    for fqn in fqns:
        fqns_of.setdefault(aliases.get(fqn, fqn), []).append(fqn)
    digests = PartDigests()
    for shard in shards if fqns_of else ():
        if shard.fqn in fqns_of:
            part = (*shard.region, digest_of(shard.tensor))
            for fqn in fqns_of[shard.fqn]:
                digests.setdefault(fqn, []).append(part)
    return digests


def check_pipeline_stages(fqns: Iterable[str], ranks: Sequence[StageDigests], global_ranks: Sequence[int]) -> None:
    """Raises one CheckpointMismatchError (conflict) for all of these FQNs that are different tensors in the stages that
    hold them.
    """
    lines: list[str] = []
    guilty: set[int] = set()
    for fqn in fqns:
        parts: dict[int, dict[_Part, set[int]]] = {}
        holders: dict[int, int] = {}
        for rank, (stages, digests) in enumerate(ranks):
            if fqn not in stages:
                continue
            holders.setdefault(stages[fqn], global_ranks[rank])
            of_stage = parts.setdefault(stages[fqn], {})
            for offsets, lengths, digest in digests.get(fqn, []):
                of_stage.setdefault((offsets, lengths), set()).add(digest)
        (first, expected), *others = parts.items()
        odd = next((stage for stage, found in others if found != expected), None)
        if odd is not None:
            is_laid_out_alike = parts[odd].keys() == expected.keys()
            how = "" if is_laid_out_alike else ", which hold different parts of it: tied tensors need the same layout"
            where = f"in stage {first} on rank {holders[first]}, in stage {odd} on rank {holders[odd]}"
            lines.append(f"{fqn}: {where}{how}")
            guilty.update((holders[first], holders[odd]))
    if lines:
        raise CheckpointMismatchError(
            f"stages of a pipeline use {len(lines)} names for different tensors; nothing was written. Give their "
            "layers the names that they have in the whole model:\n  " + and_more(lines, _NUM_SHOWN, "\n  "),
            kind="conflict",
            ranks=tuple(sorted(guilty)),
        )


_GATHERED_BYTES = 16 * SMALL_TENSOR_BYTES


def is_compared(shard: LocalShard) -> bool:
    """Returns True if a shard is a whole tensor that is small enough to be compared on every save."""
    return shard.region.lengths == shard.global_shape and shard.tensor.nbytes <= SMALL_TENSOR_BYTES


def small_digests(shards: Sequence[LocalShard]) -> list[int | None]:
    """Returns the xxh3-64 of every shard that is a whole, small tensor, and None for the others."""
    digests: list[int | None] = [None] * len(shards)
    small = [index for index, shard in enumerate(shards) if is_compared(shard)]
    for index, tensor in zip(small, _on_host([shards[index].tensor for index in small]), strict=True):
        digests[index] = xxhash.xxh3_64_intdigest(_raw(tensor).numpy().data)
    return digests


def digest_of(tensor: torch.Tensor) -> int:
    """Returns the xxh3-64 of a tensor of any size. Copies it if it is on a device or not contiguous."""
    return xxhash.xxh3_64_intdigest(_raw(tensor).cpu().numpy().data)


def combined_digests(shards: ShardBlocks, groups: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each group of shards, which are small tensors given by their numbers, one xxh3-64 of all of them."""
    if not groups:
        return []
    addresses, lengths = shards.places()
    digests = []
    for group in groups:
        numbers = np.array(group, np.int64)
        if (addresses[numbers] != 0).all():
            digests.append(_digest_at(addresses[numbers], lengths[numbers]))
        else:
            digests.append(combined_digest([shards[number].tensor for number in group]))
    return digests


def _digest_at(addresses: np.ndarray, lengths: np.ndarray) -> int:
    """Returns what `combined_digest` returns for tensors at these addresses, gathered many at a time."""
    state = xxhash.xxh3_64()
    gathered = bytearray(min(max(int(lengths.sum()), 1), _GATHERED_BYTES))
    base = ctypes.addressof(ctypes.c_char.from_buffer(gathered))
    ends = np.cumsum(lengths)
    first = 0
    while first < len(ends):
        start = int(ends[first] - lengths[first])
        stop = int(np.searchsorted(ends, start + _GATHERED_BYTES, side="right"))
        starts = base + ends[first:stop] - lengths[first:stop] - start
        gather_pieces(addresses[first:stop], starts, lengths[first:stop])
        state.update(memoryview(gathered)[: int(ends[stop - 1]) - start])
        first = stop
    return state.intdigest()


def combined_digest(tensors: Sequence[torch.Tensor]) -> int:
    """Returns one xxh3-64 of all these small tensors. Faster than one for each, because it hashes large runs."""
    state = xxhash.xxh3_64()
    # New memory would cost a page fault for each 4 KiB, while training waits.
    gathered = bytearray(min(max(sum(tensor.nbytes for tensor in tensors), 1), _GATHERED_BYTES))
    base = ctypes.addressof(ctypes.c_char.from_buffer(gathered))
    filled = 0
    for tensor in _on_host(tensors):
        flat = tensor if is_row_major_on_host(tensor) else _raw(tensor)
        num_bytes = flat.nbytes
        if filled + num_bytes > _GATHERED_BYTES:
            state.update(memoryview(gathered)[:filled])
            filled = 0
        ctypes.memmove(base + filled, flat.data_ptr(), num_bytes)
        filled += num_bytes
    state.update(memoryview(gathered)[:filled])
    return state.intdigest()


def _on_host(tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Returns the same tensors, those of other devices as bytes on the host: one transfer for each device."""
    others: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if not tensor.is_cpu:
            others.setdefault(tensor.device, []).append(index)
    if not others:
        return tensors
    on_host = list(tensors)
    for indices in others.values():
        flat = [_raw(tensors[index]) for index in indices]
        copies = torch.split(torch.cat(flat).cpu(), [tensor.numel() for tensor in flat])
        for index, copy in zip(indices, copies, strict=True):
            on_host[index] = copy
    return on_host


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes as a flat uint8 tensor on its device."""
    return flat_bytes(same_bits(tensor).contiguous())


def warn_of_differing(fqns: Sequence[str]) -> None:
    """Warns of small tensors whose replicas differ, if there are any. Called once for each new plan."""
    if fqns:
        warnings.warn(
            f"{len(fqns)} tensors that ranks hold as replicas have different values: {and_more(fqns, _NUM_SHOWN)}. The "
            "lowest rank's value is saved; wrap what is meant to differ in bcp.RankLocal",
            stacklevel=3,
        )
