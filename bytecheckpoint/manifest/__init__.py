"""The manifest: the list of what a checkpoint consists of, its encoding and its validation.

Modules from the bottom up: frames, records, validation, chunk_validation, table, manifest, envelope, encoding.
"""

from bytecheckpoint.manifest.encoding import decode_manifest, encode_manifest, open_manifest
from bytecheckpoint.manifest.manifest import Manifest, MapNotes
from bytecheckpoint.manifest.records import Chunk, Columns, DataFile, Sample, TensorRecord, tensor_record
from bytecheckpoint.manifest.table import SoleChunks, TensorTable

__all__ = [
    "Chunk",
    "Columns",
    "DataFile",
    "Manifest",
    "MapNotes",
    "Sample",
    "SoleChunks",
    "TensorRecord",
    "TensorTable",
    "decode_manifest",
    "encode_manifest",
    "open_manifest",
    "tensor_record",
]
