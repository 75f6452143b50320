"""The memory that a rank shows to the ranks of its host, and the queue of short messages to it. It has no name and lies
in no folder: others open it through the process that made it, and the kernel frees it with the last process that has it
open, however that ends. So it needs no room in /dev/shm, and ranks that are killed leave nothing behind.

A message is far shorter than what a pipe takes at once, so those of several ranks do not mix; and whoever has read one
sees the memory that it is about. The meaning of messages is not known here.
"""

from __future__ import annotations

import hmac
import mmap
import os
import secrets
import select
import struct
from contextlib import suppress
from typing import NamedTuple

import msgspec

from bytecheckpoint.distributed.liveness.peer_watch import Presence

_TOKEN_BYTES = 32
_HEAD_BYTES = mmap.PAGESIZE
"""Bytes in front of the shared memory; they hold the token."""
_MESSAGE = struct.Struct("<QQQQQQ16x")
"""The layout of a Message: 64 bytes, so that pipes, which are made of pages, have no gaps."""
QUEUE_MESSAGES = (64 << 10) // _MESSAGE.size
"""Messages that a queue has room for."""


class Message(NamedTuple):
    """A message to a rank of the host, from another one or from itself."""

    kind: int
    sender: int
    """Rank within the group."""
    file: int = 0
    byte_offset: int = 0
    start: int = 0
    """First byte in the memory of the sender."""
    byte_length: int = 0


class MemoryOffer(msgspec.Struct, frozen=True, array_like=True):
    """A memory and the queue to its rank, as descriptors in the process that made them."""

    presence: Presence
    memory: int
    queue: int
    num_bytes: int
    token: bytes
    """Distinguishes the memory from what another process has under these descriptors."""


class OwnMemory:
    """The memory of this rank, and the queue of messages to it."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if there is too little memory, or AttributeError on systems that have none of this kind."""
        self._memory = os.memfd_create("bytecheckpoint")
        self._read_end, self._write_end = -1, -1
        try:
            # Unless pages are allocated now, touching one when there is no room kills the process.
            os.posix_fallocate(self._memory, 0, _HEAD_BYTES + num_bytes)
            self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self.content = _mapped(self._memory, num_bytes)
        except BaseException:
            self.close()
            raise
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        os.pwrite(self._memory, self._token, 0)
        self._end = _HEAD_BYTES + num_bytes

    def offer(self, presence: Presence) -> MemoryOffer:
        return MemoryOffer(presence, self._memory, self._write_end, self.content.nbytes, self._token)

    def map_pages(self) -> None:
        """Does what `PeerMemory.map_pages` does."""
        self.content = _with_pages(self._memory, self.content)

    def append(self, content: bytes) -> int:
        """Appends bytes to the file that holds the memory; returns their start in it, for `PeerMemory.read`. Raises
        OSError if there is no room. Only one thread may use it.
        """
        start = self._end
        while content:
            written = os.pwrite(self._memory, content, self._end)
            content, self._end = content[written:], self._end + written
        return start

    def receive(self, wait_s: float) -> Message | None:
        """Returns the next message, or None if there is none in time. Several threads may wait; None then comes early
        to those that wake for a message which another one takes.
        """
        poll = select.poll()  # a poll object is for one thread
        poll.register(self._read_end, select.POLLIN)
        if poll.poll(wait_s * 1e3):
            with suppress(BlockingIOError):  # another thread has it
                return Message(*_MESSAGE.unpack(os.read(self._read_end, _MESSAGE.size)))
        return None

    def wake(self, message: Message) -> None:
        """Puts a message into this rank's own queue, to wake a thread; drops it if that is full: none waits then."""
        with suppress(BlockingIOError):
            os.write(self._write_end, _MESSAGE.pack(*message))

    def close(self) -> None:
        """Closes the descriptors; the memory stays for the processes that have it open."""
        for descriptor in (self._memory, self._read_end, self._write_end):
            if descriptor >= 0:
                os.close(descriptor)


class PeerMemory:
    """The memory of another rank of this host, and the queue of messages to it."""

    def __init__(self, offer: MemoryOffer) -> None:
        """Raises OSError if the memory is gone, or this process may not open it."""
        folder = f"/proc/{offer.presence.pid}/fd"
        self._memory, self._queue = os.open(f"{folder}/{offer.memory}", os.O_RDWR | os.O_CLOEXEC), -1
        try:
            if not hmac.compare_digest(os.pread(self._memory, _TOKEN_BYTES, 0), offer.token):
                raise FileNotFoundError("another file has its number")
            self._queue = os.open(f"{folder}/{offer.queue}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # Opened for writing although nothing is written: torch and ctypes take only writable memory.
            self.content = _mapped(self._memory, offer.num_bytes)
        except BaseException:
            self.close()
            raise

    def map_pages(self) -> None:
        """Replaces `content` by a mapping that has all its pages, for memory that will be used: a page at a time costs
        more than the copy into it.
        """
        self.content = _with_pages(self._memory, self.content)

    def send(self, message: Message) -> bool:
        """Sends a message. Returns False, with nothing sent, if the queue is full. If the other rank has closed the
        queue, drops the message and returns True.
        """
        with suppress(BrokenPipeError):
            try:
                os.write(self._queue, _MESSAGE.pack(*message))
            except BlockingIOError:
                return False
        return True

    def read(self, start: int, byte_length: int) -> bytes:
        """Returns bytes that the other rank's `append` put at `start`. Raises FileNotFoundError for too few."""
        found = bytearray()
        while len(found) < byte_length:
            part = os.pread(self._memory, byte_length - len(found), start + len(found))
            if not part:
                raise FileNotFoundError("the other rank has appended less")
            found += part
        return bytes(found)

    def close(self) -> None:
        for descriptor in (self._memory, self._queue):
            if descriptor >= 0:
                os.close(descriptor)


def _mapped(descriptor: int, num_bytes: int, flags: int = 0) -> memoryview:
    """Maps the shared memory, without its head."""
    return memoryview(mmap.mmap(descriptor, _HEAD_BYTES + num_bytes, flags=mmap.MAP_SHARED | flags))[_HEAD_BYTES:]


def _with_pages(descriptor: int, content: memoryview) -> memoryview:
    """Returns `content`, mapped with all its pages; as it is if there is no address space for it twice."""
    with suppress(OSError):
        return _mapped(descriptor, content.nbytes, mmap.MAP_POPULATE)
    return content
