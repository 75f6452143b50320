"""Arguments of torch.distributed.checkpoint's own classes: which of them count here, and which are refused, and why.
Nothing is ignored that would change what is saved, or when the state may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.options import SaveOptions

_HELD_ANYWAY = {"cache_staged_state_dict", "sync_files", "per_thread_copy_ahead", "serialization_format"}
"""Keywords without effect: staging memory is kept, files are synced, memory is bounded, files are safetensors."""
_REFUSED = {
    "single_file_per_rank": (True, "files hold many tensors: SaveOptions.max_file_bytes bounds them"),
    "_extensions": (None, "they change the bytes of files: SaveOptions.codec compresses them"),
    "_extension_registry": (None, "files are read as they were saved"),
}
"""The value that changes nothing, and the reason against any other."""


def with_writers_keywords(options: SaveOptions, given: Mapping[str, Any]) -> SaveOptions:
    """Returns the options, changed as these keywords of FileSystemWriter say. Without a keyword `overwrite`, that
    option becomes True.

    Raises CheckpointMismatchError (conflict) for what is not supported, and TypeError for other names.
    """
    check_keywords("BcpStorageWriter", given, {*_HELD_ANYWAY, "thread_count", "overwrite"})
    num_threads = given.get("thread_count", options.writer_threads)
    return replace(options, writer_threads=num_threads, overwrite=given.get("overwrite", True))


def check_keywords(kind: str, given: Mapping[str, Any], taken: set[str]) -> None:
    """Raises for keywords that are not in `taken`: TypeError for an unknown one, CheckpointMismatchError (conflict) for
    a known one with a value that would change something.
    """
    for name, value in given.items():
        if name in taken:
            continue
        if name not in _REFUSED:
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}")
        unchanged, reason = _REFUSED[name]
        if value != unchanged:
            raise CheckpointMismatchError(
                f"{name}={value!r:.200} is not supported; nothing was done: {reason}", kind="conflict"
            )


def stages_later(stager: AsyncStager | None) -> bool:
    """Returns True if the state must not change yet when `async_save` returns, False if it may.

    Raises CheckpointMismatchError (conflict) for a stager that is neither BlockingAsyncStager nor DefaultStager.
    """
    if stager is None or type(stager) is BlockingAsyncStager:
        return False
    if type(stager) is DefaultStager:
        return stager._config.use_async_staging
    name = f"{type(stager).__module__}.{type(stager).__qualname__}"
    raise CheckpointMismatchError(
        f"{name} stages in a way that is not known here; nothing was saved: leave async_stager out, or pass torch's "
        "DefaultStager, which lets staging go on after the call",
        kind="conflict",
    )
