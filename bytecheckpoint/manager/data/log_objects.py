"""The log of positions as objects of a store: one for each logged step and rank, in a folder for each branch that
training was on. Knows no loader and no thread.

    manager/data_log/00000003-0001/00000120-00002-of-00008      generation, branch; step, rank, number of ranks
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from bytecheckpoint.errors import CheckpointNotFoundError, UnsafeCheckpointError
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store, read_whole

logger = logging.getLogger("bytecheckpoint")

LOG_FOLDER = "manager/data_log"
_MAX_BYTES = 1 << 26
"""Limit in bytes for an object, and for its decompressed content: others may write to the store."""
_NAME = re.compile(r"([0-9]{8,})-([0-9]{5,})-of-([0-9]{5,})")
_FOLDER = re.compile(r"([0-9]{8,})-([0-9]{4,})")


class LogRecord(msgspec.Struct, frozen=True):
    """The positions of one rank after a step."""

    step: int
    base: int | None
    """Step that was restored, or the newest saved since that was known to be durable then; None if there was none."""
    loaders: dict[str, bytes]
    """Encoded part of this rank, by the loader's FQN."""
    version: int = 1


class LoggedNames(NamedTuple):
    """A step whose positions all ranks have logged."""

    step: int
    names: Mapping[int, str]
    """Name of the object inside the store, by rank."""


def branch_folder(generation: int, branch: int) -> str:
    """Returns the folder of a branch. Of two, the one with the greater numbers is the newer."""
    return f"{LOG_FOLDER}/{generation:08d}-{branch:04d}"


def object_name(folder: str, step: int, rank: int, num_ranks: int) -> str:
    return f"{folder}/{step:08d}-{rank:05d}-of-{num_ranks:05d}"


def branches(store: Store) -> list[str]:
    """Returns the folders of all branches, the newest first."""
    found = filter(None, map(_FOLDER.fullmatch, store.list(LOG_FOLDER)))
    newest_first = sorted(found, key=lambda match: (int(match[1]), int(match[2])), reverse=True)
    return [join_name(LOG_FOLDER, match[0]) for match in newest_first]


def earlier_objects(store: Store, generation: int) -> list[str]:
    """Returns the names of earlier managers' objects, which are needless: a new manager goes back to a checkpoint."""
    earlier = (folder for folder in branches(store) if int(folder.rpartition("/")[2].partition("-")[0]) < generation)
    return [join_name(folder, name) for folder in earlier for name in store.list(folder) if _NAME.fullmatch(name)]


def logged_steps(store: Store, folder: str) -> list[LoggedNames]:
    """Returns the steps that all ranks have logged in the folder of a branch, the newest first."""
    found: dict[tuple[int, int], dict[int, str]] = {}
    for name in store.list(folder):
        if match := _NAME.fullmatch(name):
            step, rank, num_ranks = map(int, match.groups())
            found.setdefault((step, num_ranks), {})[rank] = join_name(folder, name)
    complete = (
        LoggedNames(step, names) for (step, num_ranks), names in found.items() if len(names) == num_ranks > max(names)
    )
    return sorted(complete, key=lambda logged: logged.step, reverse=True)


def encode_record(record: LogRecord) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(record))


def read_records(store: Store, logged: LoggedNames) -> dict[int, LogRecord] | None:
    """Returns the records of all ranks; None if one was deleted meanwhile, or is damaged: then it warns in the log."""
    try:
        return {rank: _decode(read_whole(store, name, max_bytes=_MAX_BYTES)) for rank, name in logged.names.items()}
    except CheckpointNotFoundError:
        return None
    except (zlib.error, msgspec.DecodeError, RecursionError, UnsafeCheckpointError) as error:
        if isinstance(error, UnsafeCheckpointError) and error.kind != "limits_exceeded":
            raise
        logger.warning(
            "the positions of step %d in %s are damaged (%s), and count as absent", logged.step, store, error
        )
        return None


def _decode(content: bytes) -> LogRecord:
    inflate = zlib.decompressobj()
    encoded = inflate.decompress(content, _MAX_BYTES)
    if inflate.unconsumed_tail or not inflate.eof:
        raise zlib.error("its content is too long, or cut off")
    return msgspec.msgpack.decode(encoded, type=LogRecord)
