"""Ownership of a root: each manager claims a generation, and the highest one owns the root. What earlier generations
left half written is known by their prefixes and can be cleared at once. Knows no ranks and no policy.
"""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Annotated, NamedTuple

import msgspec

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    UnsafeCheckpointError,
)
from bytecheckpoint.manager import abandoned_steps, step_records
from bytecheckpoint.manager.agreement.decisions import StorageClock
from bytecheckpoint.storage import garbage, layout
from bytecheckpoint.storage.inventory import HasInventory
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, one_block, read_whole

GENERATIONS_FOLDER = "manager/generations"

_ATTEMPTS = 100
"""Attempts to claim a number while others claim numbers at the same time."""
_MAX_BYTES = 1 << 16


class OpenedRoot(msgspec.Struct, frozen=True):
    """The root as rank 0 found it."""

    token: str
    """Random text that distinguishes this manager from others."""
    newest: int | None
    """Newest committed step; None if there is none."""
    abandoned: list[int]
    save_s: float
    """Seconds that the newest save took; 0.0 if it left no record, or without a clock."""
    generation: int
    """Number of the claimed generation; 0 if the manager only reads."""


def look_at(store: Store, clock: StorageClock | None, generation: int) -> OpenedRoot:
    """Returns what the root has now. Moves a clock forward to the commit of the newest step; without a clock, `save_s`
    is 0.0.
    """
    newest, save_s = next(layout.newest_steps(store), None), 0.0
    if newest is not None and clock is not None and (found := step_records.read_step(store, newest)):
        clock.keep_after(found.info.time)
        save_s = found.info.seconds.get("total", 0.0)
    abandoned = sorted(abandoned_steps.present_abandoned(store))
    return OpenedRoot(secrets.token_hex(8), newest, abandoned, save_s, generation)


class Claim(msgspec.Struct, frozen=True):
    """The process that claimed a generation."""

    save_id_prefix: str
    host: str
    pid: int
    time: Annotated[float, msgspec.Meta(ge=0.0, le=step_records.MAX_TIME)]
    """Seconds since 1970 by the clock of the storage. A claim with a time that is no date counts as damaged."""


class Generation(NamedTuple):
    """A generation that this process has claimed."""

    store: Store
    number: int
    save_id_prefix: str
    """First 8 characters of the ids of its saves."""
    earlier_prefixes: tuple[str, ...]
    """Prefixes of earlier generations that were not cleared when this one was claimed."""

    def check(self, *, outcome: str) -> None:
        """Raises CheckpointSaveError (superseded) if there is a higher generation. `outcome` is a sentence about what
        was refused, for the message, or empty.
        """
        newest = max(_generation_numbers(self.store), default=0)
        if newest > self.number:
            raise CheckpointSaveError(
                f"{self.store} belongs to another manager since this one was made: {_claimant(self.store, newest)} "
                f"claimed generation {newest}, this process (pid {os.getpid()} on {socket.gethostname()}) has "
                f"{self.number}. {outcome}What the other one saves is safe: end this job, or the other one and then "
                "start this one again. A program that only reads takes ManagerOptions(read_only=True), which claims "
                "nothing",
                kind="superseded",
                path=str(self.store),
            )

    def is_newest(self) -> bool:
        """Returns True unless another manager owns the root: what that one wants to keep, this process cannot know."""
        return max(_generation_numbers(self.store), default=0) <= self.number

    def is_claimed_in(self, store: Store) -> bool:
        """Returns True if the claim lies in this store: it is the same root, perhaps under another name."""
        found = _read_claim(store, self.number)
        return found is not None and found.save_id_prefix == self.save_id_prefix

    def clear_earlier(self, *, before_folder: Callable[[], object]) -> None:
        """Deletes what saves of earlier generations left uncommitted, if the store has an inventory, then the claims of
        these generations. `before_folder` is called before each folder of a step is looked through.

        Raises StorageError; what is left is cleared when this is called again, or by the next manager.
        """
        earlier = [number for number in _generation_numbers(self.store) if number < self.number]
        if self.earlier_prefixes and isinstance(self.store, HasInventory):
            for folder in _step_folders(self.store):
                before_folder()
                _clear(self.store, folder, self.earlier_prefixes)
        for number in earlier:
            self.store.delete(_claim_name(number))


def claim(store: Store, *, time: float) -> Generation:
    """Claims the next generation of a root. Raises StorageError if the claim cannot be written,
    CheckpointSaveError (superseded) if other managers claim each number first.
    """
    prefix = uuid.uuid4().hex[:8]
    content = msgspec.json.encode(Claim(prefix, socket.gethostname(), os.getpid(), time))
    for _ in range(_ATTEMPTS):
        number = max(_generation_numbers(store), default=0) + 1
        try:
            store.write(_claim_name(number), one_block(content), replace=False)
        except CheckpointExistsError:
            # A request is retried when its answer is lost, and may then find its own object.
            found = _read_claim(store, number)
            if found is None or found.save_id_prefix != prefix:
                continue
        return Generation(store, number, prefix, _earlier_prefixes(store, number))
    raise CheckpointSaveError(
        f"{_ATTEMPTS} times another manager claimed {store} first; nothing was changed: let one job at a time train "
        "in a root",
        kind="superseded",
        path=str(store),
    )


def _generation_numbers(store: Store) -> list[int]:
    stems = (name.removesuffix(".json") for name in store.list(GENERATIONS_FOLDER) if name.endswith(".json"))
    return [int(stem) for stem in stems if stem.isdecimal()]


def _claim_name(number: int) -> str:
    return f"{GENERATIONS_FOLDER}/{number:08d}.json"


def _read_claim(store: Store, number: int) -> Claim | None:
    """Returns the claim of a generation; None if it is gone, damaged or too long."""
    try:
        return msgspec.json.decode(read_whole(store, _claim_name(number), max_bytes=_MAX_BYTES), type=Claim)
    except (CheckpointNotFoundError, UnsafeCheckpointError, msgspec.DecodeError, RecursionError):
        return None


def _earlier_prefixes(store: Store, number: int) -> tuple[str, ...]:
    claims = (_read_claim(store, earlier) for earlier in _generation_numbers(store) if earlier < number)
    return tuple(claim.save_id_prefix for claim in claims if claim is not None and claim.save_id_prefix)


def _claimant(store: Store, number: int) -> str:
    try:
        found = _read_claim(store, number)
    except CheckpointError:
        found = None
    if found is None:
        return "an unknown process"
    return f"pid {found.pid} on {found.host}, at {datetime.fromtimestamp(int(found.time), UTC):%Y-%m-%d %H:%M:%S} UTC,"


def _step_folders(store: Store) -> Iterator[str]:
    names = (name for name, num_bytes in store.list("").items() if num_bytes is None)
    return (name for name in names if layout.parse_step(name) is not None)


def _clear(store: Store, folder: str, prefixes: tuple[str, ...]) -> None:
    """Deletes what saves whose ids have these prefixes left uncommitted in the folder of a step."""
    for leftover in garbage.find_leftovers(store, folder).found:
        if leftover.save_id.startswith(prefixes):
            garbage.remove(store, leftover)
            _withdraw_manifest(store, leftover)


def _withdraw_manifest(store: Store, leftover: garbage.Leftover) -> None:
    """Deletes the manifest of a save that committed while its data was being deleted, if files are missing now: the
    checkpoint would not load. The process of that save reports it as superseded.
    """
    name = join_name(leftover.folder, layout.MANIFEST_NAME)
    if leftover.save_id and layout.committed_save_id(store, leftover.folder) == leftover.save_id:
        manifest = layout.read_manifest(store, leftover.folder)
        try:
            layout.check_files(store, leftover.folder, manifest, range(len(manifest.files)))
        except CheckpointError as error:
            if error.kind not in {"missing_file", "truncated"}:
                raise
            store.delete(name)
