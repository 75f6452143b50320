"""A folder that another program wrote: its files and folders, and the manifest that a reader builds of them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from bytecheckpoint.errors import StorageError
from bytecheckpoint.formats.file_reader import REQUESTS_IN_FLIGHT, FileReader, damaged, missing_file, too_much
from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.formats.torch_save.file import SavedFile, open_saved
from bytecheckpoint.formats.torch_save.unpickler import FindGlobal
from bytecheckpoint.formats.torch_save.unpickler_globals import find_value
from bytecheckpoint.runtime.threads import map_looks
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

_MAY_HOLD_TENSORS = re.compile(
    r"\A.*\.(?:safetensors|bin|pt|pth|ckpt|pkl|pickle|distcp|npz|npy|h5|hdf5|msgpack|gguf|onnx|ot|tar|zip)\Z"
)

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 1 << 20


class SourceFolder:
    """The folder of a checkpoint. Names are relative to it."""

    def __init__(self, store: Store, name: str, listing: Mapping[str, int | None]) -> None:
        self.store = store
        self.name = name
        """Path inside the store."""
        self.listing = listing
        """Length of each file in bytes; None for a folder."""
        self._listings = {"": listing}
        self.builder = ManifestBuilder(join_name(str(store), name))

    @property
    def path(self) -> str:
        """Path for messages."""
        return self.builder.path

    @property
    def files(self) -> set[str]:
        return {name for name, num_bytes in self.listing.items() if num_bytes is not None}

    def is_folder(self, name: str) -> bool:
        return self.listing.get(name, 0) is None

    def list(self, inside: str) -> Mapping[str, int | None]:
        """Returns the listing, in the form of `listing`, of a folder in this one; later calls return the same."""
        if inside not in self._listings:
            self._listings[inside] = self.store.list(join_name(self.name, inside))
        return self._listings[inside]

    def list_all(self, inside: Iterable[str]) -> Sequence[Mapping[str, int | None]]:
        """Does what `list` does for several folders, with several requests in flight."""
        return map_looks(self.list, inside, num_threads=REQUESTS_IN_FLIGHT)

    def beside(self) -> SourceFolder:
        """Returns this folder as another SourceFolder, with an empty builder."""
        return SourceFolder(self.store, self.name, self.listing)

    def refuse_missing(self, names: Collection[str], index: str) -> None:
        """Raises CheckpointNotFoundError (missing_file) if files are missing that an index names."""
        missing = [
            name for name in sorted(names) if self.list(name.rpartition("/")[0]).get(name.rpartition("/")[2]) is None
        ]
        if missing:
            what = f"lacks {len(missing)} of the {len(names)} files that {index} names, the first {missing[0]!r:.200}"
            raise missing_file(self.path, f"{what}: it was copied or written in part", "them")

    def reader(self, name: str) -> FileReader:
        """Returns a reader of a file in the folder, or deeper. Raises CheckpointNotFoundError (missing_file) if no such
        file is listed.
        """
        parent, _, last = name.rpartition("/")
        num_bytes = self.list(parent).get(last)
        if num_bytes is None:
            path = join_name(self.path, name)
            raise missing_file(path, "is not there, and the checkpoint has tensors in it", "it")
        return FileReader(self.store, join_name(self.name, name), num_bytes)

    def open(self, name: str, find_global: FindGlobal = find_value) -> SavedFile:
        """Opens a file of torch.save, which becomes one of the builder's files. Raises as `reader` does,
        CheckpointCorruptError or UnsafeCheckpointError.
        """
        return self.open_all([name], find_global)[0]

    def open_all(self, names: Iterable[str], find_global: FindGlobal = find_value) -> Sequence[SavedFile]:
        """Does what `open` does for several files, each named once, with several requests in flight."""
        files = {name: self.reader(name) for name in names}
        return open_saved(files, builder=self.builder, find_global=find_global)

    def open_dicts(self, names: Iterable[str], find_global: FindGlobal) -> Sequence[SavedFile]:
        """Opens files of torch.save. Raises as `open` does, and CheckpointCorruptError if one holds no dict."""
        opened = self.open_all(names, find_global)
        for saved in opened:
            if not isinstance(saved.value, dict):
                raise damaged(saved.path, "it has no dict")
        return opened

    def name_unread_files(self) -> None:
        """Notes in the builder what is left out: unread files with an extension of tensor files, and unread folders
        that have such files, or that may not be listed.
        """
        builder, why = self.builder, "not among the files of the checkpoint, which were read"
        seen = {file.name.partition("/")[0] for file in builder.files}
        seen |= {name.partition("/")[0] for names in builder.left_out.values() for name in names}
        for name, num_bytes in sorted(self.listing.items()):
            if name in seen:
                continue
            if num_bytes is not None and _MAY_HOLD_TENSORS.match(name):
                builder.leave_out(name, why)
            elif num_bytes is None and self._may_hold_tensors(name):
                builder.leave_out(f"{name}/", why)

    def _may_hold_tensors(self, inside: str) -> bool:
        try:
            return any(map(_MAY_HOLD_TENSORS.match, self.list(inside)))
        except StorageError as error:
            if error.kind != "permission":
                raise
            return True  # as lost+found where a disk is mounted: it is no part of the checkpoint, so it is only named


def read_config(store: Store, folder: str) -> Mapping[str, Any]:
    """Reads the `config.json` of Hugging Face in the folder of a checkpoint; {} if there is none, or it holds no
    object.

    Raises CheckpointCorruptError, UnsafeCheckpointError (limits_exceeded) and the errors of reading a file.
    """
    num_bytes = store.list(folder).get(_CONFIG)
    if num_bytes is None:
        return {}
    file = FileReader(store, join_name(folder, _CONFIG), num_bytes)
    if num_bytes > _MAX_CONFIG_BYTES:
        raise too_much(file.path, f"it has {num_bytes} bytes, at most {_MAX_CONFIG_BYTES} are read")
    try:
        config = json.loads(file.read_all())
    except (ValueError, RecursionError) as error:
        raise damaged(file.path, f"it is no JSON: {error}") from error
    return config if isinstance(config, dict) else {}
