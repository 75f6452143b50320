"""The manifest: the list of what a checkpoint consists of, its encoding and its validation.

Modules from the bottom up: frames, records, validation, run_column, chunk_validation,
table, manifest, envelope, encoding, outline. Beside them, ranges needs only records, and plain_wire none of them.
"""

from bytecheckpoint.manifest.encoding import decode_manifest, encode_manifest, open_manifest
from bytecheckpoint.manifest.manifest import Manifest, ManifestOutline, MapNotes
from bytecheckpoint.manifest.outline import read_outline
from bytecheckpoint.manifest.records import Chunk, Columns, DataFile, Sample, TensorRecord, tensor_record
from bytecheckpoint.manifest.table import TensorTable

__all__ = [
    "Chunk",
    "Columns",
    "DataFile",
    "Manifest",
    "ManifestOutline",
    "MapNotes",
    "Sample",
    "TensorRecord",
    "TensorTable",
    "decode_manifest",
    "encode_manifest",
    "open_manifest",
    "read_outline",
    "tensor_record",
]
