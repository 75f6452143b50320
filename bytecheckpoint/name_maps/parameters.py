"""The numbers that a name map needs for one checkpoint: given by the user, found in the checkpoint, or computed from
other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError
from bytecheckpoint.name_maps.expressions import MAX_SIZE
from bytecheckpoint.name_maps.patterns import Pattern
from bytecheckpoint.name_maps.schema import STACKED, VARIANT, MapFile, Option, OptionSource

_YES, _NO = "yes", "no"


class PlainValues:
    """Values of a checkpoint's plain data and configuration, by FQN: bools, integers and texts."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._by_last: dict[str, list[tuple[str, bool | int | str]]] = {}
        for fqn, value in values.items():
            if isinstance(value, bool | int | str):
                self._by_last.setdefault(fqn.rpartition(".")[2], []).append((fqn, value))

    def find(self, name: str) -> bool | int | str | None:
        """Returns the value at this FQN, or at any FQN that ends with it after a dot. None if there is none. Raises
        CheckpointMismatchError (conflict) if there are several that differ.
        """
        matching = [
            (fqn, value)
            for fqn, value in self._by_last.get(name.rpartition(".")[2], ())
            if fqn == name or fqn.endswith(f".{name}")
        ]
        if len({value for _, value in matching}) > 1:
            texts = ", ".join(f"{fqn} {value!r:.80}" for fqn, value in matching[:4])
            raise CheckpointMismatchError(
                f"the checkpoint says different things of {name}: {texts}; nothing was loaded or written: give the "
                "option of the name map that needs it yourself",
                kind="conflict",
            )
        return matching[0][1] if matching else None


class Options:
    """Values of the options of a map for one checkpoint, each found when it is needed."""

    def __init__(
        self,
        name_map: MapFile,
        given: Mapping[str, int | str],
        plain: PlainValues,
        length: Callable[[Pattern, int], int | None],
    ) -> None:
        """`given` are the user's values; `length` returns the length of a tensor's dimension, if the checkpoint has it.

        Raises CheckpointMismatchError (conflict) for an option that the map does not have.
        """
        self._map = name_map
        self._given = given
        self._plain = plain
        self._length = length
        self._values: dict[str, int] = {}
        unknown = [name for name in given if name not in {*name_map.options, VARIANT, STACKED}]
        if unknown:
            names = ", ".join([*name_map.options, VARIANT, STACKED])
            raise self._refusal(f"{unknown[0]!r:.80} is not an option of it, those are {names}")

    def value(self, name: str) -> int:
        """Returns the value of an option of the map. Raises CheckpointMismatchError (conflict) if no value was given or
        found, or if it is no size.
        """
        if name not in self._values:
            option = self._map.options[name]
            found: object = self._given.get(name)
            if found is None:
                values = map(self._value_of, option.sources)
                found = next((value for value in values if value is not None), None)
            if found is None and option.default is not None:
                found = self._default(name, option)
            if found is None:
                raise self._missing(name, option)
            if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= MAX_SIZE:
                raise self._refusal(f"its option {name} is {found!r:.80}, not a number from 1 to {MAX_SIZE}")
            self._values[name] = found
        return self._values[name]

    def _value_of(self, source: str | OptionSource) -> object:
        if isinstance(source, str):
            return self._plain.find(source)
        if source.tensor is not None:
            return self._length(source.tensor, source.dim)
        if source.condition and self._plain.find(source.condition) is False:
            return None
        return self._plain.find(source.value)

    def _default(self, name: str, option: Option) -> int | None:
        try:
            return None if option.default is None else option.default.value(self.value)
        except CheckpointError:
            raise
        except ValueError as error:
            raise self._refusal(f"its option {name} cannot follow from others: {error}; give it yourself") from error

    def _missing(self, name: str, option: Option) -> CheckpointMismatchError:
        looked = [
            source if isinstance(source, str) else f"the tensor {source.tensor}" if source.tensor else source.value
            for source in option.sources
        ]
        about = f" ({option.about})" if option.about else ""
        where = f"; it was looked for in {', '.join(looked)}" if looked else ""
        return self._refusal(
            f"it needs {name}{about}, which the checkpoint does not say{where}: give the option {name}"
        )

    def variant(self, side: int) -> int:
        """Returns the index of the variant of names to write on this side: the user's choice, or else 0. Raises
        CheckpointMismatchError (conflict) if the user asks for one that the side does not have.
        """
        names = self._map.variants[side]
        chosen = self._given.get(VARIANT, names[0] if names else None)
        if chosen is None:
            return 0
        if str(chosen) not in names:
            raise self._refusal(
                f"{self._map.sides[side]} has no variant {chosen!r:.80}, only {', '.join(names) or 'one'}"
            )
        return names.index(str(chosen))

    def stacked(self, side: int) -> str:
        """Returns the field, such as `layer`, whose tensors are written as one on this side; "" if there is none, or
        the user wants none. Raises CheckpointMismatchError (conflict) if the user asks for it and there is none.
        """
        chosen = self._given.get(STACKED, _YES if self._map.stacked[side] else _NO)
        if chosen not in {_YES, _NO}:
            raise self._refusal(f"its option {STACKED} is {chosen!r:.80}, not {_YES} or {_NO}")
        if chosen == _YES and not self._map.stacked[side]:
            raise self._refusal(f"nothing of {self._map.sides[side]} can be stacked")
        return self._map.stacked[side] if chosen == _YES else ""

    def check_refusals(self) -> None:
        """Raises CheckpointMismatchError (conflict) if the checkpoint has a value that the map refuses."""
        for refused in self._map.refusals:
            found = self._plain.find(refused.value)
            if type(found) is type(refused.found) and found == refused.found:
                raise self._refusal(f"the checkpoint says {refused.value} = {found!r:.80}: {refused.because:.500}")

    def _refusal(self, what: str) -> CheckpointMismatchError:
        return refusal(self._map, what)


def refusal(
    name_map: MapFile, what: str, kind: Literal["conflict", "shape", "missing_key"] = "conflict"
) -> CheckpointMismatchError:
    """Returns the error for a checkpoint that this map cannot be used with."""
    return CheckpointMismatchError(
        f"the name map {name_map.path} cannot be used with this checkpoint: {what}; nothing was loaded or written",
        kind=kind,
    )


def parse_options(texts: Iterable[str]) -> dict[str, int | str]:
    """Parses options of a command: `heads=32`. Values of digits become integers. Raises ValueError for text without a
    name or a value, and for a name that is given twice.
    """
    options: dict[str, int | str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator and value):
            raise ValueError(f"{text!r:.200} is not NAME=VALUE")
        if name in options:
            raise ValueError(f"{name!r:.80} is given twice")
        is_number = value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_SIZE))
        options[name] = int(value) if is_number else value
    return options
