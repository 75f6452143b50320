"""The text that names a job, made from the root that it saves to."""

from __future__ import annotations

import os

from bytecheckpoint.storage.open_store import is_remote
from bytecheckpoint.storage.store import Store, full_location


def location_of(store: Store) -> str:
    """Returns the text that identifies the root of a job; for a local folder, the same through every symbolic link."""
    return full_location(store, "") if is_remote(store) else os.path.realpath(str(store))
