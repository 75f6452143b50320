"""Values that Megatron keeps beside the tensors of a `torch_dist` folder: a marker, arguments, counters, schedules and
random state. Releases put them in different places; here they have the names that they have in Megatron.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.formats.file_reader import FileReader, damaged, not_readable
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks.megatron_globals import find_megatron_value
from bytecheckpoint.formats.torch_save.file import missing_file
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

MARKER_NAME, _COMMON_FILE = "metadata.json", "common.pt"
_COMMON_KEY = "common_state/shard_0_1"
_SHARDED_OBJECT = re.compile(r"/shard_[\d.]+_[\d.]+\Z")
_BACKEND, _READ_BACKEND = "sharded_backend", "torch_dist"
_MAX_MARKER_BYTES = 1 << 16


def read_backend(store: Store, folder: str, listing: Mapping[str, int | None]) -> str | None:
    """Returns the backend that Megatron says has written the folder; None if it is none of Megatron's."""
    num_bytes = listing.get(MARKER_NAME)
    if not num_bytes or num_bytes > _MAX_MARKER_BYTES:
        return None
    content = FileReader(store, join_name(folder, MARKER_NAME), num_bytes).read(0, num_bytes)
    try:
        marker = json.loads(content)
    except (ValueError, RecursionError):
        return None
    backend = marker.get(_BACKEND) if isinstance(marker, dict) else None
    return backend if isinstance(backend, str) else None


def refuse_other_backends(backend: str | None, path: str, *, has_metadata: bool) -> None:
    """Raises CheckpointCorruptError (unsupported_version) for a folder of `zarr` and the like, and
    CheckpointNotFoundError (missing_file) for one that has lost its `.metadata`.
    """
    if backend is not None and backend != _READ_BACKEND:
        advice = "load it with Megatron and save it with --ckpt-format torch_dist"
        raise not_readable(path, f"Megatron wrote it as {backend!r:.80}", advice)
    if not has_metadata:
        raise missing_file(path, f"has no .metadata, and {MARKER_NAME} says that Megatron saved it as {backend}")


def with_common_state(root: dict[Any, Any], source: SourceFolder) -> dict[Any, Any]:
    """Returns the state with Megatron's objects as Megatron knows them: each of them is saved as a list of one, and the
    common state, which has a place of its own, is spread out.
    """
    found = {
        key: value[0] if _SHARDED_OBJECT.search(str(key)) and type(value) is list and len(value) == 1 else value
        for key, value in root.items()
    }
    common = found.pop(_COMMON_KEY, {})
    if _COMMON_FILE in source.files and not common:
        saved = source.open(_COMMON_FILE, find_megatron_value)
        common = saved.plain(saved.value, "")
    if not isinstance(common, dict):
        raise damaged(source.path, f"the common state of Megatron is not a dict but a {type(common).__name__}")
    for key, value in common.items():
        found.setdefault(key if key not in found else f"{_COMMON_KEY}.{key}", value)
    source.builder.set_step(common.get("iteration"))
    return found
