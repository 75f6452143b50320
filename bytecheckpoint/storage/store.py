"""What a store is: named, immutable byte objects under one root. Backends implement it, the writer, the reader and
the layout lean on it, and nothing above knows which backend it has.

An object is there whole or not at all. There is no renaming, no appending and no folder to make: object storage is no
file system, and a file system can do all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

from bytecheckpoint.storage.backends.posix_errors import missing_file, too_long
from bytecheckpoint.storage.paths import join_name


class Block(NamedTuple):
    """A run of bytes of an object that is being written."""

    byte_offset: int
    byte_length: int
    content: Callable[[], AbstractContextManager[memoryview]]
    """Called and entered once, from any thread, when the store is ready to take the bytes. Gives them as one flat view
    of exactly `byte_length` bytes, which holds until the context is left: the memory is used again after that.

    A store enters the blocks of an object one at a time and in rising order, so that a ring of memory can stand behind
    them: block k + 1 only when block k has given its bytes. It may have several entered, and leaves them in any order.
    """


class Access(NamedTuple):
    """What reading from a store costs, roughly: enough to choose between one long read and several short ones."""

    latency_s: float
    """From a request to its first byte, in seconds."""
    bytes_per_s: float
    """Of one request."""

    @property
    def gap_bytes(self) -> int:
        """So many bytes are read in the time that another request takes to begin."""
        return int(self.latency_s * self.bytes_per_s)


FillHook = Callable[[int], None]
"""Told how many bytes of a buffer, from its start, are there: who looks at them at once finds them in the processor's
cache."""


class Store(Protocol):
    """Named objects under a root. Names are relative, with forward slashes. Methods may be called from any thread.

    Every method translates what its backend raises: StorageError (permission, unavailable, unsupported),
    CheckpointSaveError (no_space, storage), and what is said below.
    """

    @property
    def access(self) -> Access:
        """What reads cost here."""

    def write(self, name: str, blocks: Sequence[Block], *, replace: bool) -> None:
        """Creates an object out of blocks that follow one another from byte 0, durably: when this returns, it
        survives a power cut. No reader ever sees a part of it, and when a block's `content` raises, entered or left,
        nothing appears.

        Raises CheckpointExistsError (exists) where the name is taken, unless `replace`, which switches atomically. A
        store may raise it even so where another writer has replaced the object while this one tried to.
        """

    def read_into(self, name: str, byte_offset: int, buffer: memoryview, *, on_filled: FillHook | None = None) -> None:
        """Fills a writable buffer of bytes with the object's bytes from `byte_offset` on.

        `on_filled` is called, from any thread but one call at a time, as often as suits the store, or never.

        Raises CheckpointNotFoundError (missing_file) or, where the object ends too early, CheckpointCorruptError
        (truncated).
        """

    def list(self, folder: str) -> Mapping[str, int | None]:
        """The names directly in a folder ("" is the root): an object's size in bytes, None for a folder. Always
        fresh, never from a cache. A folder that does not exist is empty.
        """

    def delete(self, name: str) -> None:
        """Removes an object; one that is not there is no error."""


@runtime_checkable
class HasEndpoint(Protocol):
    """A store whose URL does not say all about where it is."""

    @property
    def endpoint(self) -> str:
        """The service, account or host, without credentials; empty where the URL says it."""


@runtime_checkable
class SupportsReadBytes(Protocol):
    """A store that gets what is read in memory of its own, as client libraries give it: `read_into` then takes twice as
    much memory as its buffer has. Who has to keep within a limit asks for the bytes themselves, counts them, and needs
    a buffer only when they are there.
    """

    def read_bytes(self, name: str, byte_offset: int, byte_length: int) -> bytes:
        """So many bytes of the object, from `byte_offset` on, in one request. Raises what `read_into` raises."""


def endpoint_of(store: Store) -> str:
    """What two stores differ in that have one URL and are not the same; mostly nothing."""
    return store.endpoint if isinstance(store, HasEndpoint) else ""


def full_location(store: Store, folder: str) -> str:
    """Where a folder of a store is: the same for the same place only. For messages, too."""
    path, endpoint = join_name(str(store), folder), endpoint_of(store)
    return f"{path} at {endpoint}" if endpoint else path


@runtime_checkable
class RemoteStore(Store, Protocol):
    """A store of which it is not known, before it is asked, whether it can be written to."""

    def check_writable(self) -> None:
        """Raises what a write would raise, within seconds where nobody answers. Leaves nothing there."""


@runtime_checkable
class SupportsReadWhole(Store, Protocol):
    """A store that reads an object of unknown length as it is at one moment."""

    def read_whole(self, name: str, *, max_bytes: int) -> bytes:
        """All bytes of an object. Where the object is replaced meanwhile, these are the old or the new one's.

        Raises CheckpointNotFoundError (missing_file) and, for an object of more than `max_bytes`,
        UnsafeCheckpointError (limits_exceeded).
        """


@runtime_checkable
class SupportsByteLength(Store, Protocol):
    """A store whose listings may be older than its objects, as those of network file systems."""

    def byte_length(self, name: str) -> int | None:
        """The length of an object, from opening it; None where there is none."""


def read_whole(store: Store, name: str, *, max_bytes: int) -> bytes:
    """`SupportsReadWhole.read_whole`, or for other stores the length that a listing gives, and then so many bytes."""
    if isinstance(store, SupportsReadWhole):
        return store.read_whole(name, max_bytes=max_bytes)
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


@runtime_checkable
class UnconditionalStore(Store, Protocol):
    """A store that replaces an object without a condition on what is there. After a replacement, only a look at the
    object tells that it is the new one.
    """

    def check_replaceable(self) -> None:
        """Raises StorageError (unsupported) where the store cannot replace an object in one step."""
