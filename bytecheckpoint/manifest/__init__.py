"""The manifest: what a checkpoint is made of, and how it is encoded, decoded and validated."""

from bytecheckpoint.manifest.encoding import (
    Chunk,
    DataFile,
    Manifest,
    MapNotes,
    Sample,
    SoleChunks,
    TensorRecord,
    decode_manifest,
    encode_manifest,
    open_manifest,
    tensor_record,
)
from bytecheckpoint.manifest.table import ColumnTensors

__all__ = [
    "Chunk",
    "ColumnTensors",
    "DataFile",
    "Manifest",
    "MapNotes",
    "Sample",
    "SoleChunks",
    "TensorRecord",
    "decode_manifest",
    "encode_manifest",
    "open_manifest",
    "tensor_record",
]
