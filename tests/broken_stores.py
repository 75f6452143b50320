"""Local stores that each break one promise of a store."""

from __future__ import annotations

from pathlib import Path

from bytecheckpoint.storage.backends.local_store import LocalStore


class ForgetfulStore(LocalStore):
    """Lists what was there a moment ago."""

    def list(self, folder):
        listing = dict(super().list(folder))
        if listing:
            listing.popitem()
        return listing


class ReplacingStore(LocalStore):
    """Has no creation."""

    def write(self, name, blocks, *, replace):
        super().write(name, blocks, replace=replace or True)


class KeepingStore(LocalStore):
    """Ignores a write that is to replace."""

    def write(self, name, blocks, *, replace):
        if not replace:
            super().write(name, blocks, replace=False)


class TornStore(LocalStore):
    """Shows what it has so far."""

    def write(self, name, blocks, *, replace):
        if len(blocks) > 1:
            super().write(name, blocks[:1], replace=replace)
        super().write(name, blocks, replace=True if len(blocks) > 1 else replace)


class GenerousStore(LocalStore):
    """Pads what is past the end."""

    def read_into(self, name, byte_offset, buffer, *, on_filled=None):
        size = (Path(str(self)) / name).stat().st_size if (Path(str(self)) / name).exists() else None
        if size is None:
            super().read_into(name, byte_offset, buffer, on_filled=on_filled)
        else:
            super().read_into(
                name, byte_offset, buffer[: max(0, min(buffer.nbytes, size - byte_offset))], on_filled=on_filled
            )
