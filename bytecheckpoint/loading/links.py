"""Manifests that point to files elsewhere than below their own folder, as `bcp convert --link` makes them. They are
followed only where that is asked for: whoever wrote a manifest would choose else what a load reads.
"""

from __future__ import annotations

from typing import NamedTuple

from bytecheckpoint.errors import UnsafeCheckpointError
from bytecheckpoint.formats.find_checkpoint import Opening, open_folder
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import is_local
from bytecheckpoint.storage.store import Store


class Files(NamedTuple):
    """Where the data files of a checkpoint are."""

    store: Store
    folder: str


def files_of(here: Files, manifest: Manifest, opening: Opening, *, follow_links: bool, path: str) -> Files:
    """Its own folder, or the one that its manifest leads to. `path` is the checkpoint, for the error.

    Raises UnsafeCheckpointError (path_escape) where that is not to be followed, and what opening a store raises.
    """
    if not manifest.linked_to:
        return here
    if not follow_links:
        raise UnsafeCheckpointError(
            f"{path} is a link: its files are in {showable_url(manifest.linked_to)!r:.300}, which is not below its own "
            "folder; nothing was read there: if you trust whoever made the link, follow it with "
            "LoadOptions(follow_links=True), or --follow-links of the command line",
            kind="path_escape",
            path=path,
        )
    return Files(*open_folder(manifest.linked_to, opening_at(manifest.linked_to, opening, follow_links=True)))


def opening_at(path: str, opening: Opening, *, follow_links: bool) -> Opening:
    """How this path is opened. Where links are followed, a local one may lead to where the storage options are for."""
    return opening._replace(storage_options=None) if follow_links and is_local(path) else opening
