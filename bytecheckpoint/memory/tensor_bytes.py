"""The memory of a tensor: the part that is a region, its bytes, and whether they lie on the host in row-major order.
Knows nothing of files.
"""

from __future__ import annotations

import torch

from bytecheckpoint.adapters.shards import LocalShard, flat_bytes, is_row_major
from bytecheckpoint.region import Region, relative

SAME_SIZE_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by item size: a tensor copied as integers is copied bit for bit, whatever its dtype."""


def view_region(shard: LocalShard, region: Region) -> torch.Tensor:
    """Returns a view of this region of a shard's tensor, given in global coordinates."""
    return narrowed(shard.tensor, relative(region, shard.region))


def narrowed(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """Returns a view of this region of a tensor, given in the tensor's own coordinates."""
    for dim, (offset, length) in enumerate(zip(*region, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def is_row_major_on_host(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor is on the host and `is_row_major`."""
    return tensor.is_cpu and is_row_major(tensor)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the live memory, as bytes, of a tensor of any shape that `is_row_major_on_host`."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return flat_bytes(tensor).numpy().data


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the host, of the same shape, that `is_row_major_on_host`: bit for bit."""
    integers = same_bits(tensor)
    copy = torch.empty(tensor.shape, dtype=integers.dtype, device="cpu")
    return copy.copy_(integers).view(tensor.dtype)


def same_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's memory as integers of its item size: not every dtype can be copied, and integers keep NaN
    payloads. A dtype of 16 bytes stays as it is. Only a tensor with a conjugate or negative bit is copied.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    integers = SAME_SIZE_INTEGERS.get(tensor.element_size())
    return tensor.view(integers) if integers is not None else tensor
