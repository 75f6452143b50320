"""This library's own format, written by the same parts as a save: the same data files, checksums and manifest."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from bytecheckpoint.conversion.stream import FileRun, TargetFile, TargetPlan, TensorSpan, spread
from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.info import OWN_FORMAT
from bytecheckpoint.loading.plain_trees import PlainData
from bytecheckpoint.loading.select import Selection
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, encode_manifest, tensor_record
from bytecheckpoint.planner.copy_plan import WantedTensor
from bytecheckpoint.planner.file_layout import PlacedChunk, cut_extents, lay_out_files
from bytecheckpoint.planner.write_items import ItemRegion, WriteItem
from bytecheckpoint.region import Region, flat_span, split_rows, whole
from bytecheckpoint.saving.report import provenance_of
from bytecheckpoint.staging.file_image import encode_file_header
from bytecheckpoint.storage.layout import MANIFEST_NAME, data_file_name
from bytecheckpoint.storage.object_io import BLOCK_BYTES


class _TensorPart(NamedTuple):
    """A part of a tensor that one rank writes, or all of the tensor."""

    tensor: int
    region: Region


def plan_own(
    manifest: Manifest, selection: Selection, plain: PlainData, *, max_file_bytes: int, num_ranks: int, save_id: str
) -> TargetPlan:
    """Plans data files and a manifest of this library. Raises the errors of `encode_header`."""
    wanted = selection.wanted
    parts = _parts(wanted, max_file_bytes, num_ranks)
    sizes = [part.region.numel * itemsize(wanted[part.tensor].dtype) for part in parts]
    files: list[TargetFile] = []
    by_rank: list[list[int]] = []
    chunks: dict[int, list[Chunk]] = {number: [] for number in range(len(wanted))}
    for rank, numbers in enumerate(spread(sizes, num_ranks)):
        of_rank = [parts[number] for number in numbers]
        items = [WriteItem(*wanted[part.tensor][:3], *part.region) for part in of_rank]
        writes = [ItemRegion(number, part.region) for number, part in enumerate(of_rank)]
        by_rank.append([])
        for index, placed in enumerate(lay_out_files(items, writes, groups=(), max_file_bytes=max_file_bytes)):
            header = encode_file_header([(chunk, chunk.byte_length, "none") for chunk in placed])
            for chunk in placed:
                place = Chunk(chunk.region, len(files), len(header) + chunk.data_offset, chunk.byte_length)
                chunks[of_rank[chunk.item].tensor].append(place)
            by_rank[-1].append(len(files))
            runs: list[FileRun] = [header, *(_span(chunk, of_rank[chunk.item].tensor) for chunk in placed)]
            lengths = [chunk.byte_length for chunk in placed]
            extents = cut_extents(len(header), lengths, block_bytes=BLOCK_BYTES, state_bytes=sum(sizes))
            files.append(TargetFile(data_file_name(save_id, rank, index), runs, extents))
    records = {
        tensor.fqn: tensor_record(tensor.dtype, tensor.shape, sorted(chunks[number]))
        for number, tensor in enumerate(wanted)
    }

    def encoded(written: Sequence[DataFile]) -> bytes:
        converted = Manifest(
            save_id=save_id,
            step=manifest.step,
            files=written,
            tensors=records,
            aliases=selection.aliases,
            objects=plain.objects(),
            rank_objects=plain.rank_objects(),
            metadata=manifest.metadata,
            provenance={**provenance_of(num_ranks), "converted_from": manifest.foreign_format or OWN_FORMAT},
        )
        return encode_manifest(converted)

    return TargetPlan(files, by_rank, MANIFEST_NAME, encoded)


def _parts(wanted: Sequence[WantedTensor], max_file_bytes: int, num_ranks: int) -> list[_TensorPart]:
    """Returns the parts of all tensors: a tensor that is larger than a file, or than a rank's share, has several."""
    sizes = [prod(tensor.shape) * itemsize(tensor.dtype) for tensor in wanted]
    max_bytes = min(max_file_bytes, max(1 << 20, -(-sum(sizes) // num_ranks)))
    return [
        _TensorPart(number, region)
        for number, tensor in enumerate(wanted)
        for region in split_rows(whole(tensor.shape), max(1, max_bytes // itemsize(tensor.dtype)))
    ]


def _span(chunk: PlacedChunk, number: int) -> TensorSpan:
    first = flat_span(chunk.region, whole(chunk.shape))[0] if chunk.region.numel else 0
    return TensorSpan(number, first, itemsize(chunk.dtype), chunk.byte_length)
