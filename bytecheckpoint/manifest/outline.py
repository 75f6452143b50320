"""Reads the outline of a manifest: what a list of many checkpoints shows, without what grows with a checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec

from bytecheckpoint.manifest.encoding import count_items, decode_column, decode_metadata
from bytecheckpoint.manifest.envelope import unseal
from bytecheckpoint.manifest.manifest import ManifestOutline, check_outline
from bytecheckpoint.manifest.validation import MAX_FILES, MAX_METADATA_BYTES, MAX_TENSORS, bad_manifest


class _OutlineWire(msgspec.Struct):
    """The fields of the body that an outline needs."""

    save_id: str
    step: int | None
    file_names: msgspec.Raw
    file_byte_lengths: memoryview
    tensor_fqns: msgspec.Raw
    metadata: msgspec.Raw
    provenance: msgspec.Raw
    foreign_format: str = ""


class _ShortOutlineWire(msgspec.Struct):
    """The same fields in a body that is no longer than metadata may be: the metadata in it cannot be too long, so one
    step decodes all, which makes a list of many checkpoints faster.
    """

    save_id: str
    step: int | None
    file_names: msgspec.Raw
    file_byte_lengths: memoryview
    tensor_fqns: msgspec.Raw
    metadata: dict[str, Any]
    provenance: dict[str, Any]
    foreign_format: str = ""


def read_outline(data: bytes) -> ManifestOutline:
    """Reads the outline of a manifest. Checks that the manifest file is whole, and decodes no column but the lengths of
    data files. Raises as `decode_manifest` does.
    """
    body = unseal(data)
    wire: _OutlineWire | _ShortOutlineWire
    try:
        if len(body) <= MAX_METADATA_BYTES:
            wire = msgspec.msgpack.decode(body, type=_ShortOutlineWire)
            metadata, provenance = wire.metadata, wire.provenance
        else:
            wire = msgspec.msgpack.decode(body, type=_OutlineWire)
            metadata, provenance = decode_metadata(wire.metadata), decode_metadata(wire.provenance)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_manifest(f"its body cannot be decoded: {error}") from error
    num_tensors = count_items(wire.tensor_fqns, MAX_TENSORS, "tensors")
    lengths = decode_column(wire.file_byte_lengths, count_items(wire.file_names, MAX_FILES, "files"), "file lengths")
    outline = ManifestOutline(
        wire.save_id, wire.step, wire.foreign_format, sum(lengths.tolist()), num_tensors, metadata, provenance
    )
    check_outline(outline)
    return outline
