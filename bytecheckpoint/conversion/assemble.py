"""Reads the elements of a target's tensors from where they are stored. Other layouts, other dtypes and pieces of
several tensors are put together on the way, and an element that would become infinite in a smaller dtype is refused. It
knows no file of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import StoredTensor
from bytecheckpoint.adapters.native.weight_scales import WeightScales, block_shape, blocks_of, names_beside
from bytecheckpoint.adapters.shards import LocalShard, torch_dtype
from bytecheckpoint.dtypes import itemsize, weight_block
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.select import FLOAT_DTYPES, Selection
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.memory.tensor_bytes import narrowed
from bytecheckpoint.planner.copy_plan import WantedTensor, copies_of
from bytecheckpoint.region import relative

_CHECKED_NUMEL = 1 << 18
"""Elements that are checked in one go: they stay in the processor's cache."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Job(NamedTuple):
    """Elements to read into some memory."""

    tensor: int
    """Number of the tensor."""
    first: int
    """Number of the first element in the row-major flat tensor."""
    numel: int
    memory: memoryview
    """Memory of exactly these elements, aligned to an element."""


class Elements:
    """Reads elements of a target's tensors, on the calling thread and the source's threads."""

    def __init__(self, source: Source, wanted: Sequence[WantedTensor]) -> None:
        self._source = source
        self._wanted = wanted
        self._quantized = quantized_weights(wanted, source.manifest)
        """Quantized weights that become tensors of full precision, and their scales."""
        self._narrowed = {number for number, tensor in enumerate(wanted) if self._is_narrowed(tensor)}

    def check_files(self) -> None:
        """Checks that the data files of the elements have their sizes and, if the options verify, that files to which a
        link points are those that it was made for.

        Raises CheckpointNotFoundError (missing_file, replaced) or CheckpointCorruptError (truncated, checksum).
        """
        source = self._source
        stored = {piece.fqn for tensor in self._wanted for piece in tensor.pieces if piece.fqn is not None}
        stored.update(tensor.fqn for tensor in self._quantized.values())
        files = {file for fqn in stored for file in source.manifest.tensors[fqn].files}
        source.check_files(files, verify=source.options.verify)

    def read(self, jobs: Sequence[Job]) -> None:
        """Fills the memory of all jobs. Raises the errors of a load, and CheckpointMismatchError (dtype) for an element
        that is finite, and would be infinite in the dtype that is wanted.
        """
        source = self._source
        scales = WeightScales(self._quantized, source.manifest.metadata)
        filled = [scales.add(shard, shard.fqn) for job in jobs for shard in self._shards(job)]
        filled += [(place, place.fqn) for place in scales.places.values()]
        shards, fqns = [shard for shard, _ in filled], [fqn for _, fqn in filled]
        source.read(source.plan_unchecked(shards, fqns), shards, fqns)
        scales.multiply()
        for job in jobs:
            if job.tensor in self._narrowed:
                self._refuse_overflow(job)

    def _refuse_overflow(self, job: Job) -> None:
        """Raises CheckpointMismatchError (dtype) for an element that is finite as it is stored, and infinite in the
        wanted dtype. Parts with elements that are not finite are read again in float64, which holds each element
        exactly.
        """
        wanted = self._wanted[job.tensor]
        converted = torch.frombuffer(job.memory, dtype=torch.uint8).view(torch_dtype(wanted.dtype))
        for start in range(0, job.numel, _CHECKED_NUMEL):
            part = converted[start : start + _CHECKED_NUMEL]
            if not _has_non_finite(part):
                continue
            memory = memoryview(bytearray(part.numel() * itemsize("float64")))
            exact = Elements(self._source, [wanted._replace(dtype="float64")])
            exact.read([Job(0, job.first + start, part.numel(), memory)])
            stored = torch.frombuffer(memory, dtype=torch.float64)
            lost_items = (torch.isfinite(stored) & torch.isinf(part)).nonzero()
            if lost_items.numel():
                lost = int(lost_items[0])
                raise CheckpointMismatchError(
                    f"{wanted.fqn!r:.200} has the element {float(stored[lost])!r}, number {job.first + start + lost}, "
                    f"and {wanted.dtype} ends at {_largest(wanted.dtype):.6g}: it would become infinite; there is no "
                    "target: choose another --dtype, or leave the tensor out with --exclude",
                    kind="dtype",
                )

    def _is_narrowed(self, wanted: WantedTensor) -> bool:
        """Returns True if an element that is finite as stored may be infinite in the dtype that is wanted."""
        if wanted.dtype not in FLOAT_DTYPES:
            return False
        fqns = {piece.fqn for piece in wanted.pieces if piece.fqn is not None}
        stored = {self._source.manifest.describe(fqn)[0] for fqn in fqns}
        if not fqns.isdisjoint(self._quantized):
            stored.add("float32")  # that of a product
        return any(dtype in FLOAT_DTYPES and _largest(dtype) > _largest(wanted.dtype) for dtype in stored)

    def _shards(self, job: Job) -> Iterator[LocalShard]:
        """Yields the targets of a job's reads; fills with zeros what is in no stored tensor."""
        wanted = self._wanted[job.tensor]
        memory = torch.frombuffer(job.memory, dtype=torch.uint8).view(torch_dtype(wanted.dtype))
        for copy in copies_of(wanted, job.first, job.numel):
            block = memory[copy.first : copy.first + copy.block.numel].view(copy.block.lengths)
            target = narrowed(block, relative(copy.region, copy.block))
            if copy.fqn is None:
                target.view(torch.uint8).zero_()
            else:
                shape = self._source.manifest.describe(copy.fqn)[1]
                shaped = target.view(copy.source_region.lengths)
                yield LocalShard(copy.fqn, wanted.dtype, shape, copy.source_region, shaped)


def quantized_weights(wanted: Sequence[WantedTensor], manifest: Manifest) -> dict[str, StoredTensor]:
    """Returns the quantized weights whose product with their scales is wanted, and the tensors that `names_beside`
    names for them, by FQN. Raises the errors of `blocks_of`.
    """
    dtypes = {piece.fqn: tensor.dtype for tensor in wanted for piece in tensor.pieces if piece.fqn is not None}
    found: dict[str, StoredTensor] = {}
    names = {*manifest.tensors, *manifest.aliases}
    for (fqn, dtype), described in zip(dtypes.items(), manifest.describe_each(list(dtypes)), strict=True):
        weight = StoredTensor(fqn, *described)
        beside = names_beside(weight, dtype, names)
        if beside:
            stored_names = [manifest.aliases.get(name, name) for name in beside]
            stored = [StoredTensor(name, *manifest.describe(name)) for name in stored_names]
            blocks_of(weight, stored[0], names, manifest.metadata)
            found |= {fqn: weight, **dict(zip(beside, stored, strict=True))}
    return found


def refuse_lost_blocks(selection: Selection, metadata: Mapping[str, Any]) -> None:
    """Raises CheckpointMismatchError (conflict) for quantized weights, if a load of a target without metadata would
    take scales for blocks of other lengths than the source's `metadata` says: the products would be wrong in silence.
    """
    block = weight_block(metadata)
    shapes = {tensor.fqn: tensor.shape for tensor in selection.wanted} if block else {}
    shapes |= {alias: shapes[fqn] for alias, fqn in selection.aliases.items() if fqn in shapes}
    for tensor in selection.wanted:
        weight = StoredTensor(tensor.fqn, tensor.dtype, tensor.shape)
        for name in names_beside(weight, "float32", shapes):
            by_shape = block_shape(weight.shape, shapes[name])
            if by_shape not in (None, found := block_shape(weight.shape, shapes[name], block)):
                raise CheckpointMismatchError(
                    f"the scales {name!r:.200} are for blocks of {list(found or ())}, which this format has no place "
                    f"to say, and by their shape a load would take blocks of {list(by_shape or ())}; nothing was "
                    "written: convert --to hf or bcp, which say it, or write the products with --dtype",
                    kind="conflict",
                )


def _has_non_finite(tensor: torch.Tensor) -> bool:
    """Returns True if any element is infinite or a NaN. The tensor must have elements, and a dtype of FLOAT_DTYPES.
    Several times as fast as `isfinite`.
    """
    bits = tensor.view(_BITS[tensor.element_size()])
    infinite = torch.tensor(float("inf"), dtype=tensor.dtype).view(bits.dtype)
    return bool((bits & torch.iinfo(bits.dtype).max).amax() >= infinite)


def _largest(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).max)
