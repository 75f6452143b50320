"""Tensor memory and file bytes: what goes from one to the other, and nothing about where it lies in a tensor.

Staging turns shards into images: contiguous host tensors are written from where they are, everything else through
host copies. Placing puts bytes that were read where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import xxhash

from bytecheckpoint.adapters.plain_data import SMALL_TENSOR_BYTES
from bytecheckpoint.adapters.tensors import LocalShard, torch_dtype
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.planner.coalesce import BoxPart, Part
from bytecheckpoint.planner.file_plan import PlacedChunk, cut_extents
from bytecheckpoint.planner.load_plan import box_layout
from bytecheckpoint.region import Region, relative, split_rows, whole
from bytecheckpoint.storage.data_file import HeaderEntry, chunk_name, encode_header
from bytecheckpoint.storage.writer import Image, Piece

COPY_BYTES = 4 << 20
"""How much of a tensor that cannot be written from where it is gets copied at a time."""

_HEADER_METADATA = {"format": "pt"}
"""Some readers of safetensors files refuse those that do not say which framework's tensors they hold."""

_PAGE_BYTES = 4096

_SAME_SIZE_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def view_region(shard: LocalShard, region: Region) -> torch.Tensor:
    """The part of a shard's memory that is this region, given in global coordinates."""
    return _narrowed(shard.tensor, relative(region, shard.region))


def _narrowed(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(*region, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its elements, row-major and without gaps, on the host."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The live memory of a flat tensor."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy on the host, bit for bit."""
    same_bits = _same_bits(tensor)
    copy = torch.empty(tensor.shape, dtype=same_bits.dtype, device="cpu")
    return copy.copy_(same_bits).view(tensor.dtype)


def image_of(name: str, chunks: Sequence[PlacedChunk], shards: Sequence[LocalShard]) -> Image:
    """The image of one data file, its pieces views of live memory where that is possible."""
    header = encode_header([_header_entry(chunk) for chunk in chunks], _HEADER_METADATA)
    pieces = [_piece_of(memoryview(header))]
    for chunk in chunks:
        pieces += _pieces(view_region(shards[chunk.offer], chunk.region))
    return Image(name, len(header), pieces, cut_extents(len(header), [chunk.byte_length for chunk in chunks]))


def _header_entry(chunk: PlacedChunk) -> HeaderEntry:
    name = chunk_name(chunk.fqn, chunk.shape, chunk.region)
    return HeaderEntry(name, chunk.dtype, chunk.region.lengths, chunk.byte_length)


def _pieces(tensor: torch.Tensor) -> list[Piece]:
    if is_flat(tensor):
        return [Piece(tensor.nbytes, lambda: as_bytes(tensor))]
    max_numel = max(1, COPY_BYTES // tensor.element_size())
    parts = [_narrowed(tensor, part) for part in split_rows(whole(tensor.shape), max_numel)]
    return [Piece(part.nbytes, _copier(part)) for part in parts]


def _piece_of(content: memoryview) -> Piece:
    return Piece(content.nbytes, lambda: content)


def _copier(tensor: torch.Tensor) -> Callable[[], memoryview]:
    return lambda: as_bytes(to_host(tensor))


def staged_bytes(images: Sequence[Image]) -> int:
    """How much memory `stage_images` needs for these."""
    return sum(_aligned(image.byte_length) for image in images)


def stage_images(
    images: Sequence[Image], files: Sequence[Sequence[PlacedChunk]], shards: Sequence[LocalShard], memory: torch.Tensor
) -> list[Image]:
    """The same images with their bytes in `memory`, a flat uint8 tensor, so that the shards may change.

    All shards are copied by one call; a chunk lies at a multiple of its item size, so that it can be a tensor there.
    """
    staged: list[Image] = []
    copies: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    start = 0
    for image, chunks in zip(images, files, strict=True):
        of_image = memory[start : start + image.byte_length]
        start += _aligned(image.byte_length)
        content = of_image.numpy().data
        content[: image.data_start] = image.pieces[0].load()
        for chunk in chunks:
            if chunk.byte_length:
                source = _same_bits(view_region(shards[chunk.offer], chunk.region))
                first = image.data_start + chunk.data_offset
                copy = of_image[first : first + chunk.byte_length].view(source.dtype).view(source.shape)
                sources.append(source)
                copies.append(copy)
        staged.append(image._replace(pieces=[_piece_of(content)]))
    if copies:
        torch._foreach_copy_(copies, sources)
    return staged


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _same_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers of its item size: not every dtype can be copied, and integers have no payloads to lose."""
    tensor = tensor.resolve_conj().resolve_neg()
    integers = _SAME_SIZE_INTEGERS.get(tensor.element_size())
    return tensor.view(integers) if integers is not None else tensor


def small_digests(shards: Sequence[LocalShard]) -> list[int | None]:
    """The xxh3-64 of every shard that is a whole, small tensor: replicas are compared by it. None for the others."""
    digests: list[int | None] = [None] * len(shards)
    by_device: dict[torch.device, list[int]] = {}
    for index, shard in enumerate(shards):
        if shard.region.lengths == shard.global_shape and shard.tensor.nbytes <= SMALL_TENSOR_BYTES:
            by_device.setdefault(shard.tensor.device, []).append(index)
    for device, indices in by_device.items():
        flat = [_raw(shards[index].tensor) for index in indices]
        if device.type != "cpu":  # one transfer for all
            flat = list(torch.split(torch.cat(flat).cpu(), [tensor.numel() for tensor in flat]))
        for index, tensor in zip(indices, flat, strict=True):
            digests[index] = xxhash.xxh3_64_intdigest(tensor.numpy().data)
    return digests


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor on its device."""
    return _same_bits(tensor).contiguous().reshape(-1).view(torch.uint8)


class Target(NamedTuple):
    """A shard's memory as the destination of a load."""

    shard: LocalShard
    stored_dtype: str
    memory: memoryview | None
    """Its bytes, where stored bytes can be put there as they are."""


def takes_bytes(shard: LocalShard, stored_dtype: str) -> bool:
    """Whether stored bytes can be put into the shard's memory as they are."""
    return is_flat(shard.tensor) and shard.dtype == stored_dtype


def target_of(shard: LocalShard, stored_dtype: str) -> Target:
    return Target(shard, stored_dtype, as_bytes(shard.tensor) if takes_bytes(shard, stored_dtype) else None)


def place(part: Part, fetched: memoryview, fetched_offset: int, targets: Sequence[Target]) -> None:
    """Puts one part of the bytes that were read from `fetched_offset` of a file into its target."""
    target = targets[part.want]
    content = fetched[part.byte_offset - fetched_offset :][: part.byte_length]
    if isinstance(part, BoxPart):
        _place_box(part, content, target)
    elif target.memory is None:
        raise ValueError(f"the plan takes {target.shard.fqn} for memory that takes bytes, which it is not")
    else:
        target.memory[part.target_byte_offset : part.target_byte_offset + part.byte_length] = content


def _place_box(part: BoxPart, content: memoryview, target: Target) -> None:
    lengths, strides = box_layout(part)
    dtype = torch_dtype(target.stored_dtype)
    destination = view_region(target.shard, part.region)
    integers = _SAME_SIZE_INTEGERS.get(itemsize(target.stored_dtype))
    is_raw = target.stored_dtype == target.shard.dtype and not destination.is_conj() and not destination.is_neg()
    if is_raw and integers is not None:
        dtype, destination = integers, destination.view(integers)
    source = torch.frombuffer(content, dtype=torch.uint8).view(dtype).as_strided(lengths, strides)
    destination.copy_(source)
