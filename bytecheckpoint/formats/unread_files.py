"""Names the files of a foreign folder that may hold tensors and that no reader has read, for every format."""

from __future__ import annotations

import re

from bytecheckpoint.formats.folder import SourceFolder

_DATA = re.compile(
    r"\A.*\.(?:safetensors|bin|pt|pth|ckpt|pkl|pickle|distcp|npz|npy|h5|hdf5|msgpack|gguf|onnx|ot|tar|zip)\Z"
)
_WHY = "not among the files of the checkpoint, which were read"


def name_unread_files(source: SourceFolder) -> None:
    """Leaves them out by name; of a subfolder in which nothing was read, the subfolder."""
    builder = source.builder
    read = {file.name for file in builder.files}
    seen = {name.partition("/")[0] for name in read}
    seen |= {name.partition("/")[0] for names in builder.left_out.values() for name in names}
    for name, num_bytes in sorted(source.listing.items()):
        if name in seen:
            continue
        if num_bytes is not None and _DATA.match(name):
            builder.leave_out(name, _WHY)
        elif num_bytes is None and any(map(_DATA.match, source.list(name))):
            builder.leave_out(f"{name}/", _WHY)
