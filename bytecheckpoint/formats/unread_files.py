"""Files of a foreign folder that may hold tensors and that its reader has not read: they are named in every format."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_DATA = re.compile(
    r"\A.*\.(?:safetensors|bin|pt|pth|ckpt|pkl|pickle|distcp|npz|npy|h5|hdf5|msgpack|gguf|onnx|ot|tar|zip)\Z"
)
_WHY = "not among the files of the checkpoint, which were read"


def name_unread_files(store: Store, folder: str, listing: Mapping[str, int | None], builder: ManifestBuilder) -> None:
    """Names them in the parts; a subfolder of which nothing was read as one."""
    read = {file.name for file in builder.files}
    seen = {name.partition("/")[0] for name in read}
    seen |= {name.partition("/")[0] for names in builder.left_out.values() for name in names}
    for name, num_bytes in sorted(listing.items()):
        if name in seen:
            continue
        if num_bytes is not None and _DATA.match(name):
            builder.leave_out(name, _WHY)
        elif num_bytes is None and any(map(_DATA.match, store.list(join_name(folder, name)))):
            builder.leave_out(f"{name}/", _WHY)
