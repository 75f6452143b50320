"""A pickle read without pickle: a machine of its own, which makes lists, dicts, numbers and texts, and asks its caller
what stands for a global. It imports nothing, calls nothing but what the caller gave it, and stops at its limits.

What a pickle may hold is the caller's to say: see unpickler_globals.py.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection
from typing import Any, Protocol

from bytecheckpoint.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 26
_MAX_ON_STACK, _MAX_IN_MEMO = 1 << 20, 1 << 22
_MAX_KEY_ITEMS = 64
_MAX_INT_BYTES = 1024
_MAX_CRAFTED_KEYS = 1 << 13
_INT64 = range(-(1 << 63), 1 << 64)
_ITEM_BYTES = 8
"""Of a list, a dict or a shape."""

_MARK = object()


class PickleError(ValueError):
    """The bytes are no pickle, or none that this machine reads. Never leaves the readers."""


class Callee(Protocol):
    """What stands for a class or function that a pickle names."""

    def make(self, *args: Any) -> Any:
        """What a call of it with these arguments is read as."""


class TakesState(Protocol):
    """What was made, where the pickle has more to say of it."""

    def take_state(self, state: Any) -> None:
        """What stands for `__setstate__`."""


FindGlobal = Callable[[str, str], Any]
"""Gives what stands for `module.name`: a Callee, or a value. Raises a CheckpointError for what is refused."""
FindPersistent = Callable[[Any], Any]
"""Gives what stands for what lies outside of the pickle."""


def read_pickle(content: bytes, *, find_global: FindGlobal, find_persistent: FindPersistent) -> Any:
    """The value in a pickle. Raises PickleError, and what the two functions raise."""
    value, _ = read_pickle_at(content, 0, find_global=find_global, find_persistent=find_persistent)
    return value


def read_pickle_at(
    content: bytes, start: int, *, find_global: FindGlobal, find_persistent: FindPersistent
) -> tuple[Any, int]:
    """The value in the pickle that begins at `start`, and where it ends."""
    if len(content) - start > MAX_PICKLE_BYTES:
        raise PickleError(f"it has {len(content) - start} bytes, at most {MAX_PICKLE_BYTES} are read")
    machine = _Machine(content, start, find_global, find_persistent)
    try:
        return machine.run(), machine.position
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, struct.error) as error:
        if isinstance(error, PickleError | CheckpointError):
            raise
        raise PickleError(f"it is damaged at byte {machine.position}: {type(error).__name__}: {error}") from error


class _Machine:
    """A stack, a memo and a position."""

    def __init__(self, content: bytes, start: int, find_global: FindGlobal, find_persistent: FindPersistent) -> None:
        self.position = start
        self._content = content
        self._find_global = find_global
        self._find_persistent = find_persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._bytes_made = 0
        """By calls, about: each takes a few bytes of pickle, and may copy what it is given."""
        self._steps: list[Callable[[], None] | None] = [None] * 256
        for code, step in self._opcodes().items():
            self._steps[code] = step

    def run(self) -> Any:
        content, steps, stack = self._content, self._steps, self._stack
        while True:
            code = content[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                return stack.pop()
            step = steps[code]
            if step is None:
                raise PickleError(f"it has the instruction {code:#04x} at byte {self.position - 1}, which is not read")
            step()
            if len(stack) > _MAX_ON_STACK or len(self._memo) > _MAX_IN_MEMO:
                raise PickleError(f"it has {len(stack)} values at once, and {len(self._memo)} to come back to")

    def _opcodes(self) -> dict[int, Callable[[], None]]:
        return {ord(code): step for code, step in {**self._literals(), **self._containers()}.items()}

    def _literals(self) -> dict[str, Callable[[], None]]:
        """Values that stand in the pickle, and what concerns the stack and the memo alone."""
        push = self._stack.append
        return {
            "\x80": lambda: self._skip(1),  # PROTO
            "\x95": lambda: self._skip(8),  # FRAME
            "(": lambda: push(_MARK),
            "0": self._pop_one,
            "1": lambda: self._discard(self._popped()),
            "2": lambda: push(self._stack[-1]),
            "N": lambda: push(None),
            "\x88": lambda: push(True),
            "\x89": lambda: push(False),
            "I": lambda: push(self._decimal()),
            "J": lambda: push(self._number("<i")),
            "K": lambda: push(self._number("<B")),
            "M": lambda: push(self._number("<H")),
            "L": lambda: push(int(self._line().rstrip("L"))),
            "\x8a": lambda: push(self._long(self._number("<B"))),
            "\x8b": lambda: push(self._long(self._number("<i"))),
            "F": lambda: push(float(self._line())),
            "G": lambda: push(self._number(">d")),
            "T": lambda: push(self._take(self._number("<i")).decode("latin-1")),
            "U": lambda: push(self._take(self._number("<B")).decode("latin-1")),
            "X": lambda: push(self._take(self._number("<I")).decode()),
            "\x8c": lambda: push(self._take(self._number("<B")).decode()),
            "\x8d": lambda: push(self._take(self._number("<Q")).decode()),
            "B": lambda: push(self._take(self._number("<I"))),
            "C": lambda: push(self._take(self._number("<B"))),
            "\x8e": lambda: push(self._take(self._number("<Q"))),
            "\x96": lambda: push(self._take(self._number("<Q"))),
            "h": lambda: push(self._memo[self._number("<B")]),
            "j": lambda: push(self._memo[self._number("<I")]),
            "g": lambda: push(self._memo[self._decimal()]),
            "q": lambda: self._keep(self._number("<B")),
            "r": lambda: self._keep(self._number("<I")),
            "p": lambda: self._keep(self._decimal()),
            "\x94": lambda: self._keep(len(self._memo)),
        }

    def _containers(self) -> dict[str, Callable[[], None]]:
        """What is made of values, and of globals."""
        push = self._stack.append
        return {
            "]": lambda: push([]),
            "l": lambda: push(self._popped()),
            "a": lambda: self._append([self._stack.pop()]),
            "e": lambda: self._append(self._popped()),
            ")": lambda: push(()),
            "t": lambda: push(tuple(self._popped())),
            "\x85": lambda: self._make_tuple(1),
            "\x86": lambda: self._make_tuple(2),
            "\x87": lambda: self._make_tuple(3),
            "}": lambda: push({}),
            "d": self._make_dict,
            "s": lambda: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            "u": lambda: self._set_items(self._popped()),
            "\x8f": lambda: push(set()),
            "\x90": lambda: self._add_to_set(self._popped()),
            "\x91": self._make_frozenset,
            "c": lambda: push(self._find_global(self._line(), self._line())),
            "\x93": self._stack_global,
            "R": self._reduce,
            "\x81": self._reduce,  # NEWOBJ: a class and its arguments, as a call
            "\x92": self._new_with_keywords,
            "b": self._build,
            "Q": lambda: push(self._find_persistent(self._stack.pop())),
        }

    def _skip(self, num_bytes: int) -> None:
        self.position += num_bytes

    def _take(self, num_bytes: int) -> bytes:
        start, self.position = self.position, self.position + num_bytes
        if num_bytes < 0 or self.position > len(self._content):
            raise PickleError(f"it ends within {num_bytes} bytes from byte {start} on")
        return self._content[start : self.position]

    def _number(self, form: str) -> Any:
        (number,) = struct.unpack_from(form, self._content, self.position)
        self.position += struct.calcsize(form)
        return number

    def _line(self) -> str:
        end = self._content.index(b"\n", self.position)
        return self._take(end + 1 - self.position)[:-1].decode()

    def _decimal(self) -> int | bool:
        text = self._line()
        return text == "01" if text in {"00", "01"} else int(text)

    def _long(self, num_bytes: int) -> int:
        if num_bytes > _MAX_INT_BYTES:
            raise PickleError(f"it has an integer of {num_bytes} bytes, at most {_MAX_INT_BYTES} are read")
        return int.from_bytes(self._take(num_bytes), "little", signed=True)

    def _pop_one(self) -> None:
        self._stack.pop()

    def _discard(self, items: list[Any]) -> None:
        """What was pushed since the last mark is not needed."""

    def _popped(self) -> list[Any]:
        """What was pushed since the last mark, which goes as well."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise PickleError("it goes back to a mark that it has not set")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _make_tuple(self, length: int) -> None:
        items = tuple(self._stack[-length:])
        if len(items) < length:
            raise PickleError("it takes more values than it has made")
        del self._stack[-length:]
        self._stack.append(items)

    def _make_dict(self) -> None:
        items = self._popped()
        self._stack.append({})
        self._set_items(items)

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError(f"it appends to a {type(target).__name__}")
        target += items

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in {dict, OrderedDict, defaultdict}:
            raise PickleError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._count_key(key, len(target))
            target[check_key(key)] = value

    def _add_to_set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not set:
            raise PickleError(f"it adds to a {type(target).__name__} as to a set")
        for item in items:
            self._count_key(item, len(target))
            target.add(check_key(item))

    def _make_frozenset(self) -> None:
        items = self._popped()
        self._stack.append(set())
        self._add_to_set(items)
        self._stack.append(frozenset(self._stack.pop()))

    def _count_key(self, key: Any, num_others: int) -> None:
        if is_crafted(key):
            self._bytes_made += _ITEM_BYTES + 2 * num_others
            self._refuse_too_many_bytes()

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise PickleError("it names a global by something that is no text")
        self._stack.append(self._find_global(module, name))

    def _reduce(self) -> None:
        args, callee = self._stack.pop(), self._stack.pop()
        if type(args) is not tuple or not hasattr(callee, "make"):
            raise PickleError(f"it calls a {type(callee).__name__}")
        made = callee.make(*args)
        self._count(made)
        self._stack.append(made)

    def _count(self, made: Any) -> None:
        self._bytes_made += _num_bytes(made)
        self._refuse_too_many_bytes()

    def _refuse_too_many_bytes(self) -> None:
        if self._bytes_made > MAX_PICKLE_BYTES:
            raise PickleError(f"it makes more than {MAX_PICKLE_BYTES} bytes of values out of those that it has")

    def _new_with_keywords(self) -> None:
        keywords = self._stack.pop()
        if keywords:
            raise PickleError("it makes an object from keywords")
        self._reduce()

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if hasattr(target, "take_state"):
            target.take_state(state)
            self._count(target)
        elif type(target) not in {
            OrderedDict,
            defaultdict,
        }:  # whose attributes are no data: `_metadata` of a state_dict
            raise PickleError(f"it gives attributes to a {type(target).__name__}")

    def _keep(self, number: int) -> None:
        if self._stack[-1] is _MARK:
            raise PickleError("it keeps a mark")
        self._memo[number] = self._stack[-1]


def check_key(value: Any) -> Any:
    """The value itself, where hashing it is cheap and cannot end the process."""
    rest, num_items = [value], 0
    while rest:
        item = rest.pop()
        if item is _MARK:
            raise PickleError("it has a mark as a key")
        if isinstance(item, tuple):
            num_items += 1 + len(item)
            if num_items > _MAX_KEY_ITEMS:
                raise PickleError(f"it has a key of more than {_MAX_KEY_ITEMS} values")
            rest += item
    return value


def is_crafted(key: Any) -> bool:
    """Whether somebody could have chosen the hash of a key: numbers and tuples can be made that all have the same, and
    each is compared with all others then. Texts have a secret in theirs, and objects of their own their address.
    """
    if type(key) is int:
        return key not in _INT64
    if key is None or isinstance(key, str | bytes | bool):
        return False
    hash_of_class: Any = type(key).__hash__
    return hash_of_class is not object.__hash__


def check_keys(keys: Collection[Any]) -> None:
    """Raises PickleError where a dict of these keys could take forever to make."""
    num_crafted = sum(map(is_crafted, keys))
    if num_crafted > _MAX_CRAFTED_KEYS:
        raise PickleError(f"it has {num_crafted} keys that are large numbers or tuples, at most {_MAX_CRAFTED_KEYS}")


def _num_bytes(made: Any) -> int:
    """What a value may have copied, about. What is no plain value says it itself."""
    if isinstance(made, str | bytes):
        return len(made)
    if type(made) in {OrderedDict, Counter}:
        return int(_ITEM_BYTES * len(made) + sum(map(is_crafted, made)) ** 2)
    if type(made) in {list, tuple}:
        return _ITEM_BYTES * len(made)
    return getattr(made, "num_bytes", 1)
