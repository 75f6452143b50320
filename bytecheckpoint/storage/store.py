"""The store protocol: named, immutable byte objects under one root. Backends implement it; writers, readers and the
layout use it without knowing the backend.

An object exists whole or not at all. The protocol has no rename, no append and no call that makes a folder, because
object storage has none; a file system can do everything in the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, Protocol, runtime_checkable

from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.runtime.threads import run_jobs
from bytecheckpoint.storage.backends.posix_errors import missing_file, too_long
from bytecheckpoint.storage.paths import join_name

_DELETIONS_IN_FLIGHT = 16


def block_of(content: bytes | memoryview, byte_offset: int) -> Block:
    """Returns bytes in memory as a block."""
    view = memoryview(content)
    return Block(byte_offset, view.nbytes, lambda: nullcontext(view))


def one_block(content: bytes | memoryview) -> list[Block]:
    """Returns bytes in memory as the blocks of an object."""
    return [block_of(content, 0)]


class Access(NamedTuple):
    """Rough cost of a read: enough to choose between one long read and several short ones."""

    latency_s: float
    """From a request to its first byte, in seconds."""
    bytes_per_s: float
    """Rate of one request."""

    @property
    def gap_bytes(self) -> int:
        """Number of bytes that are read in the time that another request takes to begin."""
        return int(self.latency_s * self.bytes_per_s)


FillHook = Callable[[int], None]
"""Called with how many bytes of a buffer, from its start, are filled: a checksum taken at once finds them in the
processor's cache."""


class Store(Protocol):
    """Named objects under a root. Names are relative, with forward slashes. Methods may be called from any thread.

    Every method translates what its backend raises: StorageError (permission, unavailable, unsupported),
    CheckpointSaveError (no_space, storage), and the errors named below. For a name that leads out of the root, methods
    raise UnsafeCheckpointError (path_escape).
    """

    @property
    def access(self) -> Access:
        """Cost of a read here."""

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        """Creates an object out of blocks that follow one another from byte 0, durably: when this returns, it
        survives a power cut. No reader ever sees a part of it, and when a block's `content` raises, on entry or on
        exit, nothing appears.

        Raises CheckpointExistsError (exists) if the name is taken. With `replace`, the new object takes the place of
        the old one, if any, in one step; the error is then raised only if another writer has replaced it meanwhile.
        """

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None) -> None:
        """Fills a writable buffer of bytes with the object's bytes from `byte_offset` on.

        `on_filled` is called, from any thread but one call at a time, as often as suits the store, or never.

        Raises CheckpointNotFoundError (missing_file) or, if the object ends too early, CheckpointCorruptError
        (truncated).
        """

    def list(self, folder: str) -> Mapping[str, int | None]:
        """Returns the content of a folder ("" is the root): the last part of each name, with an object's size in bytes
        or None for a folder, and no temporaries. Never from a cache of this process. A folder that does not exist is
        empty; an object in its place raises CheckpointNotFoundError (not_found).
        """

    def delete(self, name: str) -> None:
        """Removes an object. A missing one is not an error."""


@runtime_checkable
class HasEndpoint(Protocol):
    """A store whose location is more than its URL."""

    @property
    def endpoint(self) -> str:
        """The service, account or host, without credentials; empty if the URL alone tells the place, as for Amazon."""


@runtime_checkable
class SupportsReadBytes(Protocol):
    """A store whose client library returns bytes in new memory, so that `read_into` takes twice the memory of its
    buffer. A reader with a memory limit calls `read_bytes`, counts the result, and takes a buffer only after that.
    """

    def read_bytes(self, name: str, byte_offset: int, byte_length: int) -> bytes:
        """Returns a range of the object, from one request. Raises like `read_into`."""


PiecesHook = Callable[[Sequence[memoryview]], None]
"""Called with the buffers that were filled since the last call."""


@runtime_checkable
class SupportsReadPieces(Store, Protocol):
    """A store that reads consecutive bytes straight into many places of memory."""

    def read_pieces(self, name: str, byte_offset: int, buffers: Sequence[memoryview], *, on_filled: PiecesHook) -> None:
        """Fills writable buffers of bytes, none of them empty, with the bytes that follow one another from
        `byte_offset` on. `on_filled` is called in the caller's thread, each time with the next buffers that are full,
        until it has received all of them. Raises like `read_into`.
        """


@runtime_checkable
class RemoteStore(Store, Protocol):
    """A store that has to make a request to find out that it is not writable."""

    def check_writable(self) -> None:
        """Raises the error that a write would raise, within seconds if no server answers. Leaves no object behind."""


@runtime_checkable
class SupportsDeleteMany(Store, Protocol):
    """A store that removes many objects at less cost than one by one, such as with one request."""

    def delete_many(self, names: Sequence[str]) -> None:
        """Removes objects, in any order. Missing ones are not an error.

        Raises like `delete` for one of the objects that could not be removed; some of the others then still exist.
        """


@runtime_checkable
class SupportsInFolders(Store, Protocol):
    """A store that can look for one name in many folders at less cost than by a listing of each."""

    def in_folders(self, folders: Sequence[str], name: str) -> Sequence[bool | None]:
        """Returns, for each folder, True if it has an object of this name, else False; None if only a listing of the
        folder can tell, such as behind a link.
        """


@runtime_checkable
class SupportsListMany(Store, Protocol):
    """A store that lists many folders at less cost than one by one."""

    def list_many(self, folders: Sequence[str]) -> Sequence[Mapping[str, int | None] | None]:
        """Returns, for each folder, what `list` returns for it; None if only `list` can tell."""


@runtime_checkable
class SupportsReadWhole(Store, Protocol):
    """A store that reads an object of unknown length as it is at one moment."""

    def read_whole(self, name: str, *, max_bytes: int) -> bytes:
        """Returns all bytes of an object: the old or the new ones if it is replaced meanwhile.

        Raises CheckpointNotFoundError (missing_file) and, for an object of more than `max_bytes`,
        UnsafeCheckpointError (limits_exceeded).
        """


@runtime_checkable
class SupportsByteLength(Store, Protocol):
    """A store whose listings may be older than its objects, as on network file systems."""

    def byte_length(self, name: str) -> int | None:
        """Returns the length of an object in bytes, found by opening it; None if it does not exist."""


@runtime_checkable
class SupportsDuplicate(Store, Protocol):
    """A store that can give an object a second name, or copy it, without its bytes passing through this process."""

    def duplicate(self, source: str, name: str, *, num_bytes: int) -> None:
        """Makes `name` an object with the bytes of `source`, durably; deleting one leaves the other. The inventory
        has to show it as written now, however old `source` is: a save whose objects are all old counts as dead. No
        other writer may use `name` meanwhile: some stores would replace what it creates.

        Raises CheckpointNotFoundError (missing_file) if there is no source of `num_bytes`, CheckpointExistsError
        (exists) if the name is taken, and StorageError (unsupported) if this place can neither link nor copy.
        """


@runtime_checkable
class SupportsFilePath(Store, Protocol):
    """A store whose objects are files of this host."""

    def file_path(self, name: str) -> str:
        """Returns the path of an object, which need not exist."""


@runtime_checkable
class UnconditionalStore(Store, Protocol):
    """A store that replaces an object without a condition on the old one. If several writers replace it, only reading
    the object tells which of them was last.
    """

    def check_replaceable(self) -> None:
        """Raises StorageError (unsupported) if the store cannot replace an object in one step."""


def endpoint_of(store: Store) -> str:
    """Returns a text that distinguishes stores with the same URL; empty for most stores."""
    return store.endpoint if isinstance(store, HasEndpoint) else ""


def full_location(store: Store, folder: str) -> str:
    """Returns one text of the path and the endpoint of a folder, fit for messages. Two places never have the same."""
    path, endpoint = join_name(str(store), folder), endpoint_of(store)
    return f"{path} at {endpoint}" if endpoint else path


def read_whole(store: Store, name: str, *, max_bytes: int) -> bytes:
    """Reads an object as `SupportsReadWhole.read_whole` does. From a store without that method, reads as many bytes as
    a listing says, which are not all of one object if another writer replaces it meanwhile.
    """
    # Asking for the protocol looks at all of its members, which takes longer than reading a small file.
    read: Callable[..., bytes] | None = getattr(store, "read_whole", None)
    if read is not None:
        return read(name, max_bytes=max_bytes)
    folder, _, last = name.rpartition("/")
    num_bytes = store.list(folder).get(last)
    path = join_name(str(store), name)
    if num_bytes is None:
        raise missing_file(path)
    if num_bytes > max_bytes:
        raise too_long(path, num_bytes, max_bytes)
    content = bytearray(num_bytes)
    store.read_into(name, 0, memoryview(content))
    return bytes(content)


def list_many(store: Store, folders: Sequence[str]) -> Sequence[Mapping[str, int | None] | None]:
    """Lists like `SupportsListMany.list_many`; returns None for every folder if the store does not have that method."""
    return store.list_many(folders) if isinstance(store, SupportsListMany) else [None] * len(folders)


def listed_lengths(names: Sequence[str], list_folder: Callable[[str], Mapping[str, int | None]]) -> list[int | None]:
    """Returns the lengths of objects, None for missing ones, by one call of `list_folder` for each of their folders."""
    listings = {parent: list_folder(parent) for parent in {name.rpartition("/")[0] for name in names}}
    return [listings[parent].get(last) for parent, _, last in (name.rpartition("/") for name in names)]


def delete_many(store: Store, names: Sequence[str]) -> None:
    """Deletes like `SupportsDeleteMany.delete_many`; in a store without that method, by calls of `delete` on several
    threads.
    """
    if isinstance(store, SupportsDeleteMany):
        store.delete_many(names)
    else:
        run_jobs(store.delete, names, num_threads=_DELETIONS_IN_FLIGHT)
