"""Checkpoints with compressed chunks, made of codecs, headers and manifests alone: to test reading them needs no save
that compresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, decode_manifest, encode_manifest, tensor_record
from bytecheckpoint.manifest.frames import FRAME_BYTES, is_compressible, is_worth_it
from bytecheckpoint.region import Region
from bytecheckpoint.storage.compression import FrameEncoder
from bytecheckpoint.storage.safetensors_header import chunk_entry, encode_header

SAVE_ID = "packed"
EXTENT_BYTES = 1 << 20


class Content(NamedTuple):
    """A chunk of some tensor, and the codec to try."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    raw: bytes
    codec: str


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def encode_frames(codec: str, raw: memoryview, item_bytes: int) -> list[bytes] | None:
    """The frames of a chunk whose items take `item_bytes`, or None where it is better stored as it is."""
    if not is_compressible(raw.nbytes):
        return None
    encoder, starts = FrameEncoder(), range(0, raw.nbytes, FRAME_BYTES)
    frames = [encoder.encode(codec, raw[start : start + FRAME_BYTES], item_bytes) for start in starts]
    return frames if is_worth_it(raw.nbytes, sum(map(len, frames))) else None


def contents_of(fqn: str, tensor: torch.Tensor, regions: Iterable[Region], codec: str) -> list[Content]:
    """The chunks of a tensor that these regions cut it into."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    parts = [(region, tensor[tuple(map(slice, region.offsets, region.ends))]) for region in regions]
    return [Content(fqn, dtype, shape, region, tensor_bytes(part), codec) for region, part in parts]


def write_checkpoint(folder: Path, files: Sequence[Sequence[Content]]) -> Manifest:
    """A checkpoint of these chunks, one list a data file. Those that do not get smaller are stored as they are."""
    (folder / "data").mkdir(parents=True)
    names = [f"data/{SAVE_ID}-{number:05d}-0.safetensors" for number in range(len(files))]
    written = [write_data_file(folder, name, contents) for name, contents in zip(names, files, strict=True)]
    manifest = manifest_of(Manifest(save_id=SAVE_ID), files, written)
    (folder / "manifest.bcp").write_bytes(encode_manifest(manifest))
    return manifest


def write_data_file(
    folder: Path, name: str, contents: Sequence[Content]
) -> tuple[DataFile, list[tuple[int, int, str]]]:
    """The file as a manifest describes it, and byte offset, byte length and codec of each chunk."""
    parts, codecs = [], []
    for content in contents:
        item_bytes, raw = itemsize(content.dtype), memoryview(content.raw)
        frames = None if content.codec == "none" else encode_frames(content.codec, raw, item_bytes)
        parts.append(
            [raw[at : at + EXTENT_BYTES] for at in range(0, len(raw), EXTENT_BYTES)] if frames is None else frames
        )
        codecs.append("none" if frames is None else content.codec)
    lengths = [sum(map(len, extents)) for extents in parts]
    entries = [
        chunk_entry(each.fqn, each.dtype, each.shape, region=each.region, byte_length=length, codec=codec)
        for each, length, codec in zip(contents, lengths, codecs, strict=True)
    ]
    header = encode_header(entries, {})
    extents = [header, *(extent for of_chunk in parts for extent in of_chunk)]
    (folder / name).write_bytes(b"".join(extents))
    digests = [xxhash.xxh3_64_intdigest(extent) for extent in extents]
    file = DataFile(name, sum(map(len, extents)), [len(extent) for extent in extents], digests)
    starts = [len(header) + sum(lengths[:number]) for number in range(len(lengths))]
    return file, list(zip(starts, lengths, codecs, strict=True))


def manifest_of(
    manifest: Manifest,
    files: Sequence[Sequence[Content]],
    written: Sequence[tuple[DataFile, Sequence[tuple[int, int, str]]]],
) -> Manifest:
    """The manifest with these files and their tensors in place of its own."""
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, (contents, (_, places)) in enumerate(zip(files, written, strict=True)):
        for content, (start, length, codec) in zip(contents, places, strict=True):
            chunks.setdefault(content.fqn, []).append(Chunk(content.region, number, start, length, codec))
            kinds[content.fqn] = content.dtype, content.shape
    tensors = {fqn: tensor_record(*kinds[fqn], of_tensor) for fqn, of_tensor in chunks.items()}
    return replace(manifest, files=[file for file, _ in written], tensors=tensors)


def compress_checkpoint(folder: Path, codec_of: Callable[[str], str] = lambda _: "zstd") -> Manifest:
    """Writes the data files and the manifest of an uncompressed checkpoint again, compressed where that pays."""
    manifest = decode_manifest((folder / "manifest.bcp").read_bytes())
    stored = {file.name: (folder / file.name).read_bytes() for file in manifest.files}
    files: list[list[Content]] = [[] for _ in manifest.files]
    for fqn, record in manifest.tensors.items():
        for region, file, start, length, _ in record.chunks:
            raw = stored[manifest.files[file].name][start : start + length]
            files[file].append(Content(fqn, record.dtype, record.shape, region, raw, codec_of(fqn)))
    # What is compressed goes last: behind it nothing is aligned.
    ordered = [sorted(contents, key=_file_order) for contents in files]
    written = [
        write_data_file(folder, file.name, contents) for file, contents in zip(manifest.files, ordered, strict=True)
    ]
    changed = manifest_of(manifest, ordered, written)
    (folder / "manifest.bcp").write_bytes(encode_manifest(changed))
    return changed


def _file_order(content: Content) -> tuple[bool, int, str, Region]:
    return content.codec != "none", -itemsize(content.dtype), content.fqn, content.region


def codecs_in(manifest: Manifest) -> Mapping[str, set[str]]:
    return {fqn: {chunk.codec for chunk in record.chunks} for fqn, record in manifest.tensors.items()}
