"""Finds tensors with NaN or infinite values before they are saved. It looks at the shards of this rank only."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from bytecheckpoint.adapters.expectation import EntryContents
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.errors import CheckpointSaveError, and_more

logger = logging.getLogger("bytecheckpoint")

FiniteCheck = Literal["off", "warn", "refuse"]
_NUM_SHOWN = 10
_ALWAYS_FINITE = {"float4_e2m1fn_x2"}
"""Dtypes without a NaN and an infinity; torch cannot convert them either."""
_PART_ELEMENTS = 1 << 24
"""Number of elements that are checked at a time: the check allocates a copy of them, and some bytes more for each."""


def check_finite(contents: Sequence[EntryContents], *, check: FiniteCheck, path: str, rank: int) -> None:
    """Names this rank's tensors with values that are not finite, if any: logs them for the check "warn", raises
    CheckpointSaveError (not_finite) for "refuse". Looks at nothing for "off".
    """
    if check == "off":
        return
    found = [text for entry in contents for shard in entry.shards if (text := _describe(shard))]
    if not found:
        return
    what = f"values that are not finite: {and_more(found, _NUM_SHOWN)}, on rank {rank}"
    if check == "refuse":
        raise CheckpointSaveError(
            f"the state has {what}; nothing was written: go back to an earlier checkpoint, or save it all the same "
            "with check_finite='warn'",
            kind="not_finite",
        )
    logger.warning("the save to %s has %s", path, what)


def _describe(shard: LocalShard) -> str:
    """Returns the name of a shard and how many NaN and infinite values it has; "" if it has or can have none."""
    tensor = shard.tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or shard.dtype in _ALWAYS_FINITE:
        return ""
    num_nan = num_inf = 0
    for part in _parts(tensor):
        values = part if part.dtype.itemsize >= 2 else part.float()  # torch has no such check for 8 bits
        if bool(torch.isfinite(values).all()):
            continue
        num_nan += int(torch.isnan(values).sum())
        num_inf += int(torch.isinf(values).sum())
    counts = [f"{count:,} {name}" for count, name in ((num_nan, "NaN"), (num_inf, "infinite")) if count]
    return f"{shard.fqn} ({', '.join(counts)})" if counts else ""


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields small views that together are the whole tensor, whatever its strides: none of its memory is copied."""
    if tensor.numel() <= _PART_ELEMENTS:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    for half in tensor.chunk(2, longest):
        yield from _parts(half)
