"""Values of Python's own types that msgpack lacks and that are not containers of a state: sets, dates and times, paths.
Each is written as a name and plain content, and comes back as the same type. No class is looked up by name.
"""

from __future__ import annotations

import dataclasses
import enum
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from pathlib import Path
from random import Random, SystemRandom
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from bytecheckpoint.data.elastic_loader import ElasticLoader
from bytecheckpoint.manifest.plain_wire import MSGPACK_INTS

_ITEMS = frozenset({type(None), bool, int, float, str, bytes})
"""Types of the items of a set: items of other types could be made to collide in their hashes."""


class Tagged(NamedTuple):
    """A value as it is written: the one pair of a dict encoded as pairs, as no dict with one str key ever is."""

    tag: str
    content: Any

    @property
    def texts(self) -> list[str]:
        items = self.content if type(self.content) is list else [self.content]
        return [item for item in items if type(item) is str]


def tag_value(value: Any) -> Tagged | None:
    """Returns a set, date, time, duration or path as a tag and plain content; None for any other value, and for one
    that its content would not restore exactly.
    """
    kind = type(value)
    if kind is set or kind is frozenset:
        if any(type(item) not in _ITEMS or (type(item) is int and item not in MSGPACK_INTS) for item in value):
            return None
        return Tagged(f"@{kind.__name__}", sorted(value, key=lambda item: (type(item).__name__, repr(item))))
    if kind is timedelta:
        return Tagged("@timedelta", [value.days, value.seconds, value.microseconds])
    if kind is type(Path()):
        return Tagged("@path", str(value))
    if kind in {date, time, datetime}:
        tagged = Tagged(f"@{kind.__name__}", value.isoformat())
        # A zone with a name, and the second of two equal hours, are not in the text.
        return tagged if repr(kind.fromisoformat(tagged.content)) == repr(value) else None
    return None


def is_tagged(pairs: Any) -> bool:
    """Returns True if the pairs of a dict are those of a tagged value. What was read may be no pairs at all."""
    if type(pairs) is not list or len(pairs) != 1 or type(pairs[0]) is not list or len(pairs[0]) != 2:
        return False
    return type(pairs[0][0]) is str and pairs[0][0] in _FROM_TAG


def untag_value(tag: str, content: Any) -> Any:
    """Returns the value of a tag. Raises ValueError, TypeError or OverflowError if none has this content."""
    return _FROM_TAG[tag](content)


def _items(content: Any) -> Any:
    if type(content) is not list or any(type(item) not in _ITEMS for item in content):
        raise ValueError("a set has an item that is neither a number, a text, bytes nor None")
    return content


def _text(content: Any) -> str:
    if type(content) is not str:
        raise ValueError(f"{type(content).__name__} is not text")
    return content


def _days(content: Any) -> timedelta:
    days, seconds, microseconds = content
    if any(type(number) is not int for number in content):
        raise ValueError("a duration has a number that is not an integer")
    return timedelta(days, seconds, microseconds)


_FROM_TAG: dict[str, Callable[[Any], Any]] = {
    "@set": lambda content: set(_items(content)),
    "@frozenset": lambda content: frozenset(_items(content)),
    "@timedelta": _days,
    "@path": lambda content: Path(_text(content)),
    "@date": lambda content: date.fromisoformat(_text(content)),
    "@time": lambda content: time.fromisoformat(_text(content)),
    "@datetime": lambda content: datetime.fromisoformat(_text(content)),
}


def as_plain(value: Any) -> Any:
    """Returns the value for programs that know plain data only: a set as a list, in an order that its items alone
    decide; a date, time, duration or path as text. What `tag_value` does not take, as a set of tuples, stays as it is.
    """
    tagged = tag_value(value)
    if tagged is None:
        return value
    return str(value) if tagged.tag == "@timedelta" else tagged.content


def advice_for(value: Any) -> str:
    """Returns advice: the value to save in place of an object that is refused."""
    match value:
        case Namespace() | SimpleNamespace():
            return "save vars(value), and make it anew from the dict that a load fills"
        case enum.Enum():
            return "save value.name, and look the member up in its class again"
        case torch.Generator():
            return "save bytecheckpoint.RankLocal(value), or save value.get_state() and give it to value.set_state()"
        case torch.utils.data.DataLoader():
            return (
                "a DataLoader has no position. Make its dataset of bytecheckpoint.data.Streams, with ShuffleBuffer in "
                "place of shuffle=True, or take torchdata's StatefulDataLoader, and save "
                "bytecheckpoint.DataLoaderState(value, rank=..., size=...): see docs/data.md"
            )
        case _ if issubclass(type(value), ElasticLoader):  # of the class: some values make what they are asked for
            return "save bytecheckpoint.DataLoaderState(value, rank=..., size=...): see docs/data.md"
        case np.random.Generator():
            return "save bytecheckpoint.RankLocal(value), or save value.bit_generator.state and assign it"
        case SystemRandom():
            return "leave it out: it draws from the operating system and has no state"
        case Random():
            return "save bytecheckpoint.RankLocal(value), or save value.getstate() and give it to value.setstate()"
        case deque():
            return "save list(value), and make it anew from the list that a load fills"
        case tuple() if hasattr(value, "_asdict"):
            return "save value._asdict(), and make it anew from the dict that a load fills"
        case torch.device():
            return "save str(value)"
        case defaultdict():
            return "save dict(value): a defaultdict would come back as another type, without its factory"
        case set() | frozenset():
            return "save a list: a set is taken of None, bool, numbers of 64 bits, str and bytes only"
        case datetime() | time():
            return "save value.isoformat(), or a time in datetime.timezone.utc: a zone that has a name is not kept"
        case dict():
            return "save dict(value): a dict of a type of its own would come back as another type"
        case np.ndarray() if type(value) is not np.ndarray:
            return "save the plain arrays that it is made of: they would come back as another type"
        case np.ndarray():
            return f"save what it holds as arrays of numbers, bool, text or bytes: its dtype is {value.dtype}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "save dataclasses.asdict(value), and make it anew from the dict that a load fills"
    return (
        "save plain data (numbers, strings, bytes, lists, tuples, dicts, arrays, tensors), or give the object "
        "state_dict() and load_state_dict()"
    )
