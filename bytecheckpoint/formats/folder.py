"""A folder that another program wrote: its files and folders, and the manifest that a reader builds of them."""

from __future__ import annotations

from collections.abc import Mapping

from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.formats.torch_save.file import SavedFile, open_saved
from bytecheckpoint.formats.torch_save.unpickler import FindGlobal
from bytecheckpoint.formats.torch_save.unpickler_globals import find_value
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store


class SourceFolder:
    """The folder of a checkpoint. Names are relative to it."""

    def __init__(self, store: Store, name: str, listing: Mapping[str, int | None]) -> None:
        self.store = store
        self.name = name
        """Path inside the store."""
        self.listing = listing
        """Length of each file in bytes; None for a folder."""
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
        return self.store.list(join_name(self.name, inside))

    def open(self, name: str, find_global: FindGlobal = find_value, *, num_bytes: int | None = None) -> SavedFile:
        """Opens a file of torch.save. `num_bytes` is the length of one that lies deeper.

        Raises CheckpointCorruptError or UnsafeCheckpointError.
        """
        length = self.listing[name] or 0 if num_bytes is None else num_bytes
        return open_saved(self.store, self.name, name, length, builder=self.builder, find_global=find_global)
