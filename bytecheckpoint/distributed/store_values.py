"""Messages of any length in a key-value store that limits the length of values: long ones are put there in parts."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import count

from torch._C._distributed_c10d import Store

PART_BYTES = 1 << 20
"""A TCPStore closes the connection over a value of more than 8 MiB. An eighth of that is as fast, and only the first
parts of messages that are read together are in memory twice.
"""


def put_message(store: Store, key: str, message: bytes) -> list[str]:
    """Puts the message under `key`, which is set last, and returns all of its keys."""
    keys = keys_of(key, message)
    for number in reversed(range(len(keys))):
        part = message[number * PART_BYTES : (number + 1) * PART_BYTES]
        store.set(keys[number], part)  # type: ignore[arg-type]  # declared for str; takes and gives back bytes
    return keys


def get_message(store: Store, key: str) -> bytes:
    return _completed(store, key, store.get(key))


def get_messages(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Returns the messages of these keys; the first parts are read together if the kind of store can do that."""
    if not store.has_extended_api():  # type: ignore[attr-defined]  # torch declares it for Python only
        return [get_message(store, key) for key in keys]
    return [_completed(store, key, first) for key, first in zip(keys, store.multi_get(list(keys)), strict=True)]


def keys_of(key: str, message: bytes) -> list[str]:
    """Returns the keys of a message: its own for the first part, and one for each further part. The last part, and only
    that, is shorter than PART_BYTES; it may be empty.
    """
    return [key, *(_part_key(key, number) for number in range(1, len(message) // PART_BYTES + 1))]


def _completed(store: Store, key: str, first: bytes) -> bytes:
    """Returns the message whose first part is `first`; reads the other parts from the store."""
    if len(first) < PART_BYTES:
        return first
    message, part = BytesIO(), first  # a list to be joined would be the message twice
    for number in count(1):
        message.write(part)
        if len(part) < PART_BYTES:
            break
        part = store.get(_part_key(key, number))
    return message.getvalue()


def _part_key(key: str, number: int) -> str:
    return f"{key}/part-{number}"
