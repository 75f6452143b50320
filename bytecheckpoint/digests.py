"""Checksums of small tensors, by which replicas are compared: one a tensor, or one for many of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
import xxhash

from bytecheckpoint.adapters.plain_data import SMALL_TENSOR_BYTES
from bytecheckpoint.adapters.tensors import LocalShard, flat_bytes
from bytecheckpoint.tensor_memory import is_flat, same_bits

_GATHERED_BYTES = 16 * SMALL_TENSOR_BYTES


def is_small(shard: LocalShard) -> bool:
    """Whether a shard is a whole tensor that is small enough to be compared on every save."""
    return shard.region.lengths == shard.global_shape and shard.tensor.nbytes <= SMALL_TENSOR_BYTES


def small_digests(shards: Sequence[LocalShard]) -> list[int | None]:
    """The xxh3-64 of every shard that is a whole, small tensor. None for the others."""
    digests: list[int | None] = [None] * len(shards)
    small = [index for index, shard in enumerate(shards) if is_small(shard)]
    for index, tensor in zip(small, _on_host([shards[index].tensor for index in small]), strict=True):
        digests[index] = xxhash.xxh3_64_intdigest(_raw(tensor).numpy().data)
    return digests


def digest_of(tensor: torch.Tensor) -> int:
    """The xxh3-64 of a tensor of any size, copied where its elements have gaps between them or are on a device."""
    return xxhash.xxh3_64_intdigest(_raw(tensor).cpu().numpy().data)


def combined_digest(tensors: Sequence[torch.Tensor]) -> int:
    """One xxh3-64 of all these small tensors. Cheaper than one for each: they are gathered and hashed in large runs."""
    state = xxhash.xxh3_64()
    # Memory that is new to the process costs a page fault for each 4 KiB, while training waits.
    gathered = bytearray(min(max(sum(tensor.nbytes for tensor in tensors), 1), _GATHERED_BYTES))
    base = ctypes.addressof(ctypes.c_char.from_buffer(gathered))
    filled = 0
    for tensor in _on_host(tensors):
        flat = tensor if is_flat(tensor) else _raw(tensor)
        num_bytes = flat.nbytes
        if filled + num_bytes > _GATHERED_BYTES:
            state.update(memoryview(gathered)[:filled])
            filled = 0
        ctypes.memmove(base + filled, flat.data_ptr(), num_bytes)
        filled += num_bytes
    state.update(memoryview(gathered)[:filled])
    return state.intdigest()


def _on_host(tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The same tensors, those of other devices as bytes on the host: one transfer for each device."""
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
    """The tensor's bytes as a flat uint8 tensor on its device."""
    return flat_bytes(same_bits(tensor).contiguous())
