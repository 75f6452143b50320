"""Records of what a manifest lists: files, tensors and the chunks that hold them; and the columns into which all
tensors and chunks are put, because there may be millions. It checks nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bytecheckpoint.region import Region, part_of_grid

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Sample(NamedTuple):
    """A few bytes of a linked file: if they have changed, the file was written again since."""

    byte_offset: int
    byte_length: int
    digest: int
    """The xxh3-64 of these bytes."""


class DataFile(NamedTuple):
    """A file that holds chunks. It consists of consecutive extents, each with a checksum, or has no checksums at all
    and no extents.
    """

    name: str
    """Relative to the checkpoint's folder, with forward slashes."""
    byte_length: int
    extent_lengths: Sequence[int] = ()
    """In bytes, adding up to `byte_length`; empty where the file's writer left no checksums."""
    extent_digests: Sequence[int] = ()
    """The xxh3-64 of each extent."""
    samples: Sequence[Sample] = ()
    """Bytes of a linked file of another format, which has no extents."""
    content_digest: bytes = b""
    """The xxh3-128 of the whole file; empty unless a later save may find its own file equal to this one."""


def joined(numbers: Iterable[Sequence[int]]) -> np.ndarray:
    """Returns lists of numbers one after the other, as one array of uint64. The memory of an `array.array` is taken as
    it is, which is faster: its typecode has to be "Q".
    """
    parts = (
        np.frombuffer(each, np.uint64) if isinstance(each, array) else np.array(each, np.uint64) for each in numbers
    )
    return np.concatenate([np.zeros(0, np.uint64), *parts])


class Chunk(NamedTuple):
    """The region of a tensor that one place in a file holds, row-major and little-endian."""

    region: Region
    file: int
    """Index into `Manifest.files`."""
    byte_offset: int
    """From the start of the file."""
    byte_length: int
    """In the file."""
    codec: str = "none"
    """The encoding of its bytes: one of `frames.CODECS`, or one of a later release."""


class TensorRecord(NamedTuple):
    """A tensor and the chunks that hold it, as columns with one entry (or row) a chunk."""

    dtype: str
    """torch's name of it without `torch.`: `bfloat16`."""
    shape: tuple[int, ...]
    """The global shape."""
    coordinates: Sequence[int]
    """Offsets, then lengths of each chunk, one chunk after the other."""
    files: Sequence[int]
    byte_offsets: Sequence[int]
    byte_lengths: Sequence[int]
    codecs: Sequence[str] = ()
    """Empty where no chunk is compressed."""

    @property
    def num_chunks(self) -> int:
        return len(self.files)

    @property
    def chunks(self) -> list[Chunk]:
        num_dims, at = len(self.shape), self.coordinates
        starts = range(0, 2 * num_dims * self.num_chunks, 2 * num_dims) if num_dims else [0] * self.num_chunks
        regions = [
            Region(tuple(at[start : start + num_dims]), tuple(at[start + num_dims : start + 2 * num_dims]))
            for start in starts
        ]
        codecs = (self.codecs,) if self.codecs else ()
        return list(map(Chunk, regions, self.files, self.byte_offsets, self.byte_lengths, *codecs))


def tensor_record(dtype: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> TensorRecord:
    """Returns the record of a tensor that these chunks hold."""
    coordinates: list[int] = []
    files, byte_offsets, byte_lengths, codecs = [], [], [], []
    for region, file, byte_offset, byte_length, codec in chunks:
        coordinates += region.offsets
        coordinates += region.lengths
        files.append(file)
        byte_offsets.append(byte_offset)
        byte_lengths.append(byte_length)
        codecs.append(codec)
    is_compressed = codecs.count("none") < len(codecs)
    return TensorRecord(dtype, shape, coordinates, files, byte_offsets, byte_lengths, codecs if is_compressed else ())


class Columns(NamedTuple):
    """All tensors and chunks of a manifest as arrays. An array about tensors has one entry a tensor, one about chunks
    one entry a chunk, unless its line says otherwise.
    """

    dtype_names: Sequence[str]
    """The names in use."""
    dtypes: np.ndarray
    """A tensor's index into `dtype_names`."""
    num_dims: np.ndarray
    """Dimensions of a tensor."""
    num_chunks: np.ndarray
    """Chunks of a tensor."""
    shapes: np.ndarray
    """`num_dims` entries a tensor."""
    is_grid: NDArray[np.bool_]
    """True for a tensor whose chunks are a regular grid, in row-major order; see region.py."""
    grid_parts: np.ndarray
    """`num_dims` entries for each tensor that is a grid: the lengths of a part."""
    coordinates: np.ndarray
    """`2 * num_dims` entries for each chunk of the other tensors: its offsets, then its lengths."""
    files: np.ndarray
    """A chunk's index into `Manifest.files`. This and `byte_offsets` are RunColumns if millions are regular."""
    byte_offsets: np.ndarray
    byte_lengths: np.ndarray
    """Empty where every chunk has the bytes that its elements take."""
    codec_names: Sequence[str]
    """The names in use; empty where no chunk is compressed, and so is `codecs`."""
    codecs: np.ndarray
    """A chunk's index into `codec_names`."""


def columns_of(tensors: Mapping[str, TensorRecord]) -> Columns:
    """Returns the columns of these tensors. Raises OverflowError for a negative number."""
    records = tensors.values()
    parts = [part_of_grid(record.shape, record.coordinates, len(record.files)) for record in records]
    explicit = (record.coordinates for record, part in zip(records, parts, strict=True) if part is None)
    dtypes = {dtype: index for index, dtype in enumerate(dict.fromkeys(record.dtype for record in records))}
    codecs: dict[str, int] = {}
    chunk_codecs: list[int] = []
    if any(record.codecs for record in records):
        names = chain.from_iterable(record.codecs or ("none",) * len(record.files) for record in records)
        chunk_codecs = [codecs.setdefault(name, len(codecs)) for name in names]
    return Columns(
        dtype_names=list(dtypes),
        dtypes=_array(dtypes[record.dtype] for record in records),
        num_dims=_array(len(record.shape) for record in records).astype(np.int64),
        num_chunks=_array(len(record.files) for record in records).astype(np.int64),
        shapes=_array(chain.from_iterable(record.shape for record in records)),
        is_grid=np.fromiter((part is not None for part in parts), bool),
        grid_parts=_array(chain.from_iterable(part for part in parts if part is not None)),
        coordinates=_array(chain.from_iterable(explicit)),
        files=_array(chain.from_iterable(record.files for record in records)),
        byte_offsets=_array(chain.from_iterable(record.byte_offsets for record in records)),
        byte_lengths=_array(chain.from_iterable(record.byte_lengths for record in records) if codecs else ()),
        codec_names=list(codecs),
        codecs=_array(chunk_codecs),
    )


def _array(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.uint64)
