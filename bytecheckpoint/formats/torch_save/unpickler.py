"""Reads a pickle without pickle: `pickletools` parses it, which executes nothing, and a stack machine makes lists,
dicts, numbers and texts of it. It imports nothing, calls only what the caller gave it, and stops at its limits.

What a pickle may name is the caller's to say: see unpickler_globals.py.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from pickletools import genops
from typing import Any, Protocol

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.manifest.plain_wire import MSGPACK_INTS

MAX_PICKLE_BYTES = 1 << 26
_MAX_ON_STACK, _MAX_IN_MEMO = 1 << 20, 1 << 22
_MAX_KEY_ITEMS = 64
_MAX_INT_BYTES = 1024
_MAX_COLLIDING = 1 << 13
_PROTO = b"\x80"
"""First instruction of a pickle of protocol 2 or later."""
_OF_PROTOCOL_0 = {"UNICODE", "STRING", "PERSID"}
"""Instructions that later protocols do not have. torch itself cannot load a tensor of protocol 0."""
_ITEM_BYTES = 8
"""Size of an item of a list, a dict or a shape."""

_MARK = object()
_STUMBLES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, struct.error, Warning)
"""Errors that a damaged pickle may cause. A warning is one where the program turns warnings into errors: `pickletools`
looks for escapes in the names of globals.
"""


class PickleError(ValueError):
    """Bytes that are not a pickle, or not one that the stack machine reads. Readers turn it into a CheckpointError."""


class UnheldValueError(PickleError):
    """A value in a sound pickle that cannot be read; `advice` says what to save in its place."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(what)
        self.advice = advice


class Callee(Protocol):
    """Stand-in for a class or function that a pickle names."""

    def make(self, *args: Any) -> Any:
        """Returns the value that a call with these arguments stands for."""


FindGlobal = Callable[[str, str], Any]
"""Returns the stand-in for `module.name`: a Callee, or a value. Raises a CheckpointError for a name that is refused."""
FindPersistent = Callable[[Any], Any]
"""Returns the stand-in for a persistent id: what lies outside of the pickle."""


def read_pickle(content: bytes, *, find_global: FindGlobal, find_persistent: FindPersistent) -> Any:
    """Returns the value in a pickle. Objects that calls make may have a method `take_state(state)`, for `__setstate__`.

    Raises PickleError, and any CheckpointError of the two functions.
    """
    if len(content) > MAX_PICKLE_BYTES:
        raise PickleError(f"it has {len(content)} bytes, at most {MAX_PICKLE_BYTES} are read")
    machine = _Machine(find_global, find_persistent)
    try:
        return machine.run(content)
    except _STUMBLES as error:
        if isinstance(error, PickleError | CheckpointError):
            raise
        # `pickletools` quotes a malformed text whole.
        what = f"{type(error).__name__}: {error!s:.200}"
        raise PickleError(f"it is damaged at byte {machine.position}: {what}") from error


class _Machine:
    """Runs the instructions of a pickle on a stack and a memo."""

    def __init__(self, find_global: FindGlobal, find_persistent: FindPersistent) -> None:
        self.position = 0
        """Offset of the instruction that runs, in bytes."""
        self._find_global = find_global
        self._find_persistent = find_persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._bytes_made = 0
        """Estimate of the memory of all that calls and states have made so far, plus an amount for each crafted key,
        which is slow to add. It is limited: a few bytes of pickle may copy a large value again and again."""

    def run(self, content: bytes) -> Any:
        stack, memo, steps = self._stack, self._memo, self._steps()
        for opcode, arg, self.position in genops(content):  # type: ignore[assignment]  # None only without `tell`
            step = steps.get(opcode.code)
            if step is None:
                if opcode.name in _OF_PROTOCOL_0 and not content.startswith(_PROTO):
                    raise UnheldValueError("it is of protocol 0", "save it again with torch.save's own pickle_protocol")
                raise PickleError(f"it has the instruction {opcode.name} at byte {self.position}, which is not read")
            step(arg)
            if len(stack) > _MAX_ON_STACK or len(memo) > _MAX_IN_MEMO:
                raise PickleError(f"it has {len(stack)} values at once, and {len(memo)} to come back to")
        return stack.pop()

    def _steps(self) -> dict[str, Callable[[Any], object]]:
        """Returns the handler of each instruction; a handler gets the argument."""
        stack, memo = self._stack, self._memo
        push = stack.append
        return {
            **dict.fromkeys("\x80\x95.", lambda _: None),  # PROTO, FRAME, STOP
            **dict.fromkeys("NJKMFGTUBC\x8a\x8e", push),  # None, numbers of bounded length, latin-1 texts, bytes
            **dict.fromkeys("IL\x8b", lambda arg: push(_checked_int(arg))),
            **dict.fromkeys("X\x8c\x8d", lambda arg: push(_checked_text(arg))),
            "\x96": lambda arg: push(bytes(arg)),
            "(": lambda _: push(_MARK),
            "0": lambda _: stack.pop(),
            "1": lambda _: self._pop_to_mark(),
            "2": lambda _: push(stack[-1]),
            "\x88": lambda _: push(True),
            "\x89": lambda _: push(False),
            **dict.fromkeys("hjg", lambda arg: push(memo[arg])),
            **dict.fromkeys("qrp", self._memoize),
            "\x94": lambda _: self._memoize(len(memo)),
            "]": lambda _: push([]),
            "l": lambda _: push(self._pop_to_mark()),
            "a": lambda _: self._append([stack.pop()]),
            "e": lambda _: self._append(self._pop_to_mark()),
            ")": lambda _: push(()),
            "t": lambda _: push(tuple(self._pop_to_mark())),
            "\x85": lambda _: self._make_tuple(1),
            "\x86": lambda _: self._make_tuple(2),
            "\x87": lambda _: self._make_tuple(3),
            "}": lambda _: push({}),
            "d": self._make_dict,
            "s": lambda _: self._set_items([stack.pop(-2), stack.pop()]),
            "u": lambda _: self._set_items(self._pop_to_mark()),
            "\x8f": lambda _: push(set()),
            "\x90": lambda _: self._add_to_set(self._pop_to_mark()),
            "\x91": self._make_frozenset,
            "c": lambda arg: push(self._find_global(*arg.split(" ", 1))),
            "\x93": self._stack_global,
            "R": self._reduce,
            "\x81": self._reduce,  # NEWOBJ: a class and its arguments, as a call
            "\x92": self._new_without_keywords,  # NEWOBJ_EX
            "b": self._build,
            "Q": lambda _: push(self._find_persistent(stack.pop())),
        }

    def _pop_to_mark(self) -> list[Any]:
        """Removes the last mark and all above it. Returns the values that were above it."""
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

    def _make_dict(self, _: Any) -> None:
        items = self._pop_to_mark()
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
            target[checked_key(key)] = value

    def _add_to_set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not set:
            raise PickleError(f"it adds to a {type(target).__name__} as to a set")
        for item in items:
            self._count_key(item, len(target))
            target.add(checked_key(item))

    def _make_frozenset(self, _: Any) -> None:
        items = self._pop_to_mark()
        self._stack.append(set())
        self._add_to_set(items)
        self._stack.append(frozenset(self._stack.pop()))

    def _count_key(self, key: Any, num_others: int) -> None:
        if may_collide(key):
            self._count(_ITEM_BYTES + 2 * num_others)

    def _stack_global(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise PickleError("it names a global by something that is not text")
        self._stack.append(self._find_global(module, name))

    def _reduce(self, _: Any = None) -> None:
        args, callee = self._stack.pop(), self._stack.pop()
        if type(args) is not tuple or not hasattr(callee, "make"):
            raise PickleError(f"it calls a {type(callee).__name__}")
        made = callee.make(*args)
        self._count(_num_bytes(made))
        self._stack.append(made)

    def _count(self, num_bytes: int) -> None:
        self._bytes_made += num_bytes
        if self._bytes_made > MAX_PICKLE_BYTES:
            raise PickleError(f"it makes more than {MAX_PICKLE_BYTES} bytes of values out of those that it has")

    def _new_without_keywords(self, _: Any) -> None:
        if self._stack.pop():
            raise PickleError("it makes an object from keywords")
        self._reduce()

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if hasattr(target, "take_state"):
            target.take_state(state)
            self._count(_num_bytes(target))
        # Attributes of dicts are not data: such as `_metadata` of a state_dict.
        elif type(target) not in {OrderedDict, defaultdict}:
            raise PickleError(f"it gives attributes to a {type(target).__name__}")

    def _memoize(self, number: int) -> None:
        if self._stack[-1] is _MARK:
            raise PickleError("it keeps a mark")
        if not 0 <= number < _MAX_IN_MEMO:  # picklers count; of other numbers somebody could have chosen the hashes
            raise PickleError(f"it keeps a value in memo slot {number}, at most {_MAX_IN_MEMO} are read")
        self._memo[number] = self._stack[-1]


def _checked_int(value: int) -> int:
    if value.bit_length() > 8 * _MAX_INT_BYTES:
        num_bytes = (value.bit_length() + 7) // 8
        raise PickleError(f"it has an integer of {num_bytes} bytes, at most {_MAX_INT_BYTES} are read")
    return value


def _checked_text(text: str) -> str:
    """Returns the text itself. Raises UnicodeEncodeError for half a surrogate pair, which `pickletools` lets pass."""
    if not text.isascii():
        text.encode()
    return text


def checked_key(value: Any) -> Any:
    """Returns the value itself. Raises PickleError if hashing it could take long or end the process."""
    stack, num_items = [value], 0
    while stack:
        item = stack.pop()
        if item is _MARK:
            raise PickleError("it has a mark as a key")
        if isinstance(item, tuple):
            num_items += 1 + len(item)
            if num_items > _MAX_KEY_ITEMS:
                raise PickleError(f"it has a key of more than {_MAX_KEY_ITEMS} values")
            stack += item
    return value


def may_collide(key: Any) -> bool:
    """Returns True for a key of a type whose hashes can be made to collide, such as a tuple, a float or an int beyond
    64 bits: each such key may be compared with all others. The hash of a text is salted, that of an object its address.
    """
    if type(key) is int:
        return key not in MSGPACK_INTS
    if key is None or isinstance(key, str | bytes | bool):
        return False
    hash_of_class: Any = type(key).__hash__
    return hash_of_class is not object.__hash__


def check_keys(keys: Collection[Any]) -> None:
    """Raises PickleError if a dict of these keys could take very long to make."""
    num_colliding = sum(map(may_collide, keys))
    if num_colliding > _MAX_COLLIDING:
        raise PickleError(f"it has {num_colliding} keys that are large numbers or tuples, at most {_MAX_COLLIDING}")


def _num_bytes(made: Any) -> int:
    """Returns an estimate of the bytes that making a value has copied. A value that is not plain may have a
    `num_bytes`; else it counts 1.
    """
    if isinstance(made, str | bytes):
        return len(made)
    if isinstance(made, dict):
        return int(_ITEM_BYTES * len(made) + sum(map(may_collide, made)) ** 2)
    if type(made) in {list, tuple}:
        return _ITEM_BYTES * len(made)
    return getattr(made, "num_bytes", 1)
