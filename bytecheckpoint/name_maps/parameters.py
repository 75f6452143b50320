"""The numbers that a name map needs, for one checkpoint: what the user says, what the checkpoint says of itself, or
what follows from others. It reads nothing: facts and shapes are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError
from bytecheckpoint.name_maps.expressions import MAX_SIZE
from bytecheckpoint.name_maps.records import STACKED, VARIANT, MapFile, Option, Source

_YES, _NO = "yes", "no"


class Facts:
    """What a checkpoint says of itself: values of plain data by FQN."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._by_last: dict[str, list[tuple[str, object]]] = {}
        for fqn, value in values.items():
            if isinstance(value, bool | int | str):
                self._by_last.setdefault(fqn.rpartition(".")[2], []).append((fqn, value))

    def find(self, name: str) -> bool | int | str | None:
        """The value at this FQN, or wherever its end stands. Raises CheckpointMismatchError (conflict) where several
        stand there that differ.
        """
        of_name = [
            (fqn, value)
            for fqn, value in self._by_last.get(name.rpartition(".")[2], ())
            if fqn == name or fqn.endswith(f".{name}")
        ]
        if len({value for _, value in of_name}) > 1:
            texts = ", ".join(f"{fqn} {value!r:.80}" for fqn, value in of_name[:4])
            raise CheckpointMismatchError(
                f"the checkpoint says different things of {name}: {texts}; nothing was loaded or written: give the "
                "option of the name map that needs it yourself",
                kind="conflict",
            )
        found = of_name[0][1] if of_name else None
        return found if isinstance(found, bool | int | str) else None


class Options:
    """The options of a map for one checkpoint, each found when it is asked for."""

    def __init__(
        self,
        name_map: MapFile,
        given: Mapping[str, int | str],
        facts: Facts,
        length: Callable[[Source], int | None],
    ) -> None:
        """`given` is what the user says; `length` gives that of a tensor, where the checkpoint has it.

        Raises CheckpointMismatchError (conflict) for an option that the map does not have.
        """
        self._map = name_map
        self._given = given
        self._facts = facts
        self._length = length
        self._known: dict[str, int] = {}
        unknown = [name for name in given if name not in {*name_map.options, VARIANT, STACKED}]
        if unknown:
            names = ", ".join([*name_map.options, VARIANT, STACKED])
            raise self._refusal(f"{unknown[0]!r:.80} is no option of it, those are {names}")

    def value(self, name: str) -> int:
        """Raises CheckpointMismatchError (conflict) where nothing says what it is, or what is said is no size."""
        if name not in self._known:
            option = self._map.options[name]
            found = self._given[name] if name in self._given else self._found(option)
            if found is None and option.default is not None:
                found = self._default(name, option)
            if found is None:
                raise self._missing(name, option)
            if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= MAX_SIZE:
                raise self._refusal(f"its option {name} is {found!r:.80}, not a number from 1 to {MAX_SIZE}")
            self._known[name] = found
        return self._known[name]

    def _found(self, option: Option) -> object:
        """What the first source that is there says."""
        return next((found for found in map(self._of_source, option.sources) if found is not None), None)

    def _of_source(self, source: Source) -> object:
        if source.tensor is not None:
            return self._length(source)
        if source.condition and self._facts.find(source.condition) is False:
            return None
        return self._facts.find(source.value)

    def _default(self, name: str, option: Option) -> int | None:
        try:
            return None if option.default is None else option.default.value(self.value)
        except CheckpointError:
            raise
        except ValueError as error:
            raise self._refusal(f"its option {name} cannot follow from others: {error}; give it yourself") from error

    def _missing(self, name: str, option: Option) -> CheckpointMismatchError:
        looked = [f"the tensor {source.tensor.text}" if source.tensor else source.value for source in option.sources]
        about = f" ({option.about})" if option.about else ""
        where = f"; it was looked for in {', '.join(looked)}" if looked else ""
        return self._refusal(
            f"it needs {name}{about}, which the checkpoint does not say{where}: give the option {name}"
        )

    def variant(self, side: int) -> int:
        """Which variant of the names of this side is to be written."""
        names = self._map.variants[side]
        chosen = self._given.get(VARIANT, names[0] if names else None)
        if chosen is None:
            return 0
        if chosen not in names:
            raise self._refusal(
                f"{self._map.sides[side]} has no variant {chosen!r:.80}, only {', '.join(names) or 'one'}"
            )
        return names.index(str(chosen))

    def stacked(self, side: int) -> str:
        """The field for which tensors of this side are to be written as one, unless the user says otherwise; "" for
        none.
        """
        chosen = self._given.get(STACKED, _YES if self._map.stacked[side] else _NO)
        if chosen not in {_YES, _NO}:
            raise self._refusal(f"its option {STACKED} is {chosen!r:.80}, not {_YES} or {_NO}")
        if chosen == _YES and not self._map.stacked[side]:
            raise self._refusal(f"nothing of {self._map.sides[side]} can be stacked")
        return self._map.stacked[side] if chosen == _YES else ""

    def check_refusals(self) -> None:
        """Raises CheckpointMismatchError (conflict) where the checkpoint says of itself what the map refuses."""
        for value, refused, because in self._map.refusals:
            found = self._facts.find(value)
            if found is not None and type(found) is type(refused) and found == refused:
                raise self._refusal(f"the checkpoint says {value} = {found!r:.80}: {because:.500}")

    def _refusal(self, what: str) -> CheckpointMismatchError:
        return refusal(self._map, what)


def refusal(
    name_map: MapFile, what: str, kind: Literal["conflict", "shape", "dtype", "missing_key"] = "conflict"
) -> CheckpointMismatchError:
    """The error for a checkpoint that this map cannot be used with."""
    return CheckpointMismatchError(
        f"the name map {name_map.path} cannot be used with this checkpoint: {what}; nothing was loaded or written",
        kind=kind,
    )


def parse_options(texts: Iterable[str]) -> dict[str, int | str]:
    """Options as a command gets them: `heads=32`. Raises ValueError for text without a name or without a value."""
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
