"""Names and element sizes of torch's dense dtypes, so that planner, manifest and storage count bytes without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bytecheckpoint.errors import CheckpointMismatchError

DTYPE_ITEMSIZES: dict[str, int] = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "complex64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "complex32", "bcomplex32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys((f"{sign}int{num_bits}" for sign in ("", "u") for num_bits in range(1, 8)), 1),
}
"""torch's name of a dtype without `torch.` -> bytes of one element. torch gives sub-byte elements a whole byte."""


def itemsize(dtype: str) -> int:
    """Returns the length of one element, in bytes. Raises CheckpointMismatchError (dtype) for a name that is not in
    DTYPE_ITEMSIZES.
    """
    size = DTYPE_ITEMSIZES.get(dtype)
    if size is None:
        raise CheckpointMismatchError(
            f"this release knows no dtype {dtype!r:.80}, only {', '.join(sorted(DTYPE_ITEMSIZES))}; nothing was read "
            "or written: convert the tensor to one of them, or use a newer release",
            kind="dtype",
        )
    return size


QUANTIZED_DTYPES = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8"})
"""Dtypes of weights that may have a tensor of scales beside them."""
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Behind the name of a quantized weight, they make the name of its scales."""
WEIGHT_BLOCK = "weight_block_size"
"""Key in the metadata of a checkpoint, as in Hugging Face's `quantization_config`."""
_BLOCK_TEXT = re.compile(r"\[([0-9]{1,9}), ([0-9]{1,9})\]")

MXFP4 = "mxfp4"
"""Dtype of a weight that no file has as a tensor: its 4-bit numbers are in a tensor of bytes, two in each, and the
exponents of its scales, each for MXFP4_NUMEL numbers of a row, in another. Only a manifest in memory has this dtype."""
MXFP4_NUMEL = 32
MXFP4_SUFFIXES = ("_scales", "_blocks")
"""Behind the name of such a weight, they make the names of the two."""


def weight_block(metadata: Mapping[str, object]) -> tuple[int, ...]:
    """Returns rows and columns of the block of a matrix that a scale is for, if these values say so, else (). They say
    it as a list or, since a header of safetensors holds texts alone, as the text of one.
    """
    found = metadata.get(WEIGHT_BLOCK)
    if isinstance(found, str) and (text := _BLOCK_TEXT.fullmatch(found)):
        found = [*map(int, text.groups())]
    block = tuple(each for each in found if type(each) is int and each > 0) if isinstance(found, list) else ()
    return block if len(block) == 2 and found == [*block] else ()
