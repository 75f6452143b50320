"""Tensors of every dtype and every memory layout, filled with random bits, and a comparison that looks at bits."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from bytecheckpoint.dtypes import DTYPE_ITEMSIZES

DTYPES = [getattr(torch, name) for name in sorted(DTYPE_ITEMSIZES) if hasattr(torch, name)]
SHAPE = (4, 6)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor whose bytes are random: NaNs with payloads, infinities, subnormals, whatever the dtype can hold."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = prod(shape) * DTYPE_ITEMSIZES[str(dtype).removeprefix("torch.")]
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)


def bits_of(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, as bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    integers = tensor.view(_INTEGERS[tensor.element_size()])
    return integers.contiguous().numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits_of(a) == bits_of(b)


def _placed(
    content: torch.Tensor, shape: tuple[int, ...], view: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A view of new zeros of a shape, with the content's bits in it."""
    memory = torch.zeros(prod(shape) * content.element_size(), dtype=torch.uint8).view(content.dtype).reshape(shape)
    target = view(memory)
    if content.dtype == torch.complex128:
        torch.view_as_real(target).copy_(torch.view_as_real(content))
    else:
        integers = _INTEGERS[content.element_size()]
        target.view(integers).copy_(content.view(integers))
    return target


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda content: _placed(content, (4, 6), lambda base: base),
    "transposed": lambda content: _placed(content, (6, 4), lambda base: base.t()),
    "every_other_column": lambda content: _placed(content, (4, 12), lambda base: base[:, ::2]),
    "every_third_row": lambda content: _placed(content, (12, 6), lambda base: base[::3]),
    "inside_a_larger_storage": lambda content: _placed(content, (50,), lambda base: base[13:37].view(4, 6)),
    "middle_of_a_cube": lambda content: _placed(content, (6, 3, 8), lambda base: base[1:5, 1, 2:8]),
}
"""Each gives the bits of a contiguous tensor of shape SHAPE another place in memory."""
