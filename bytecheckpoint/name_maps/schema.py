"""Name maps as they are written: a text in TOML that says which tensors of one framework are which of another, both
ways, and by which of a few operations. docs/name_maps.md says what the fields mean. It reads no file and knows no
checkpoint.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.name_maps.expressions import SizeExpression, parse_size
from bytecheckpoint.name_maps.patterns import Around, Pattern, parse_around, parse_pattern
from bytecheckpoint.name_maps.records import (
    STACKED,
    VARIANT,
    Interleave,
    MapFile,
    Option,
    Padding,
    Refusal,
    Rule,
    Source,
    Surroundings,
)

FORMAT = 1
MAX_TEXT_BYTES = 1 << 20

_SIDE_KEYS = ("first side", "second side")
"""Stand for the names of the sides while the file is checked."""


class _Source(msgspec.Struct, forbid_unknown_fields=True, rename={"condition": "if"}):
    value: str = ""
    condition: str = ""
    tensor: str = ""
    dim: int = 0


class _Option(msgspec.Struct, forbid_unknown_fields=True, rename={"sources": "from"}):
    about: str = ""
    sources: list[str | _Source] = []
    default: int | str | None = None


class _Around(
    msgspec.Struct, forbid_unknown_fields=True, rename=dict(zip(("first", "second"), _SIDE_KEYS, strict=True))
):
    first: str
    second: str
    equal_parts: bool = False
    entry: str = ""


class _Interleave(msgspec.Struct, forbid_unknown_fields=True):
    groups: int | str = 1
    rows: list[int | str] = []


class _Padding(msgspec.Struct, forbid_unknown_fields=True):
    side: str
    rows: int | str
    without: int | str


class _Rule(msgspec.Struct, forbid_unknown_fields=True, rename=dict(zip(("first", "second"), _SIDE_KEYS, strict=True))):
    first: str | list[str]
    second: str | list[str]
    interleave: _Interleave | None = None
    padding: _Padding | None = None


class _Refusal(msgspec.Struct, forbid_unknown_fields=True, rename={"found": "is"}):
    value: str
    found: bool | int | str
    because: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    sides: list[str]
    tensors: list[_Rule]
    about: str = ""
    options: dict[str, _Option] = {}
    variants: dict[str, list[str]] = {}
    stacked: dict[str, str] = {}
    around: list[_Around] = []
    drop: dict[str, list[str]] = {}
    refuse: list[_Refusal] = []


def parse_map(text: str, path: str) -> MapFile:
    """The map in this text. Raises CheckpointMismatchError (conflict), which names the line or the field."""
    return _Parser(text, path).parse()


class _Parser:
    """One file, and what of it has been read."""

    def __init__(self, text: str, path: str) -> None:
        self._text = text
        self._path = path

    def parse(self) -> MapFile:
        file, sides = self._decode()
        self._sides = sides
        self._variants = self._by_side("variants", file.variants, ())
        self._options = {name: self._option(name, option) for name, option in file.options.items()}
        with self._at("options"):
            _refuse_circles(self._options)
        rules = [self._rule(number, rule) for number, rule in enumerate(file.tensors)]
        self._refuse_repeated(rules)
        return MapFile(
            path=self._path,
            sides=sides,
            options=self._options,
            rules=rules,
            arounds=[self._around(number, around) for number, around in enumerate(file.around)] or [_NOTHING_AROUND],
            variants=self._variants,
            stacked=self._stacked(file.stacked, rules),
            drop=self._by_side("drop", file.drop, ()),
            refusals=[Refusal(refusal.value, refusal.found, refusal.because) for refusal in file.refuse],
        )

    def _decode(self) -> tuple[_File, tuple[str, str]]:
        if len(self._text) > MAX_TEXT_BYTES:
            self._refuse(f"it has {len(self._text)} characters, at most {MAX_TEXT_BYTES} are read")
        try:
            raw = tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            self._refuse(f"it is no TOML: {error}", error)
        sides = _sides(raw.get("sides"))
        if sides is None:
            self._refuse('sides: it has to name the two sides, as in sides = ["megatron-gpt", "hf-llama"]')
        for name in ("around", "tensors"):
            raw[name] = [self._with_keys(item, sides) for item in _listed(raw.get(name, []))]
        try:
            file = msgspec.convert(raw, _File)
        except msgspec.ValidationError as error:
            self._refuse(self._explained(str(error), sides), error)
        if file.format != FORMAT:
            self._refuse(f"format: it is {file.format}, and this release reads {FORMAT}")
        return file, sides

    def _with_keys(self, item: Any, sides: Sequence[str]) -> Any:
        """The table with the names of the sides replaced by what stands for them."""
        if not isinstance(item, dict) or not set(_SIDE_KEYS).isdisjoint(item):
            return item
        keys = dict(zip(sides, _SIDE_KEYS, strict=True))
        return {keys.get(key, key): value for key, value in item.items()}

    def _explained(self, text: str, sides: Sequence[str]) -> str:
        for key, side in zip(_SIDE_KEYS, sides, strict=True):
            text = text.replace(key, side)
        return _INDEXED.sub(lambda found: self._where(found[1], int(found[2])), text.replace("`$.", "`"))

    def _where(self, name: str, number: int) -> str:
        """An entry of an array of tables as messages name it: with its line, where it is written in the usual way."""
        heads = [at for at, line in enumerate(self._text.splitlines(), 1) if line.strip() == f"[[{name}]]"]
        return f"{name}[{number}]" + (f" (line {heads[number]})" if number < len(heads) else "")

    def _by_side(
        self, name: str, found: Mapping[str, Sequence[str]], default: tuple[str, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        for side in found:
            self._side(name, side)
        first, second = (tuple(found.get(side, default)) for side in self._sides)
        return first, second

    def _side(self, where: str, side: str) -> int:
        if side not in self._sides:
            self._refuse(f"{where}: {side!r:.80} is no side, those are {self._sides[0]} and {self._sides[1]}")
        return self._sides.index(side)

    def _option(self, name: str, option: _Option) -> Option:
        where = f"options.{name}"
        with self._at(where):
            if not name.isidentifier() or name in {VARIANT, STACKED}:
                raise ValueError(f"{name!r:.80} cannot be the name of an option")
            sources = tuple(
                Source(value=source) if isinstance(source, str) else _source(source) for source in option.sources
            )
            return Option(option.about, sources, None if option.default is None else parse_size(option.default))

    def _size(self, value: int | str) -> SizeExpression:
        size = parse_size(value)
        unknown = [name for name in size.names if name not in self._options]
        if unknown:
            raise ValueError(f"{size.text!r:.200} needs {unknown[0]!r}, which is no option of this map")
        return size

    def _rule(self, number: int, rule: _Rule) -> Rule:
        where = self._where("tensors", number)
        with self._at(where):
            if rule.interleave is not None and rule.padding is not None:
                raise ValueError("interleave and padding cannot both be said of one tensor")
            interleave = None if rule.interleave is None else self._interleave(rule)
            padding = None
            if rule.padding is not None:
                sizes = self._size(rule.padding.rows), self._size(rule.padding.without)
                padding = Padding(self._side("padding", rule.padding.side), *sizes)
            names = (self._names(0, rule.first, interleave), self._names(1, rule.second, interleave))
            fields = {frozenset(pattern.fields) for side in names for part in side for pattern in part}
            if len(fields) > 1:
                raise ValueError("its names do not all have the same fields")
            return Rule(where, names, interleave, padding)

    def _interleave(self, rule: _Rule) -> Interleave:
        found = rule.interleave or _Interleave()
        are_parts = [isinstance(names, list) for names in (rule.first, rule.second)]
        if sum(are_parts) != 1:
            raise ValueError("where tensors are interleaved, one side has one name and the other a list of names")
        parts = rule.first if are_parts[0] else rule.second
        rows = tuple(map(self._size, found.rows))
        if len(parts) < 2 or (rows and len(rows) != len(parts)):
            raise ValueError(
                f"interleave.rows has {len(rows)} sizes for {len(parts)} parts: give one for each, or none"
            )
        return Interleave(are_parts.index(False), self._size(found.groups), rows)

    def _names(
        self, side: int, names: str | list[str], interleave: Interleave | None
    ) -> tuple[tuple[Pattern, ...], ...]:
        if isinstance(names, str):
            return ((parse_pattern(names),),)
        if not names:
            raise ValueError(f"it has an empty list of names for {self._sides[side]}: give one, or leave the rule out")
        patterns = tuple(map(parse_pattern, names))
        if interleave is not None:
            return tuple((pattern,) for pattern in patterns)
        if len(patterns) != len(self._variants[side]):
            raise ValueError(
                f"{self._sides[side]} has {len(patterns)} names for {len(self._variants[side])} variants: give one for "
                "each variant, or one name for all"
            )
        return (patterns,)

    def _refuse_repeated(self, rules: Sequence[Rule]) -> None:
        """Refuses names that two rules have on one side."""
        for side in (0, 1):
            seen: dict[str, str] = {}
            for rule in rules:
                texts = {pattern.text for part in rule.names[side] for pattern in part}
                again = next((text for text in texts if text in seen), None)
                if again is not None:
                    self._refuse(f"{rule.where}: {again!r:.200} is in {seen[again]} as well")
                seen |= dict.fromkeys(texts, rule.where)

    def _around(self, number: int, around: _Around) -> Surroundings:
        with self._at(self._where("around", number)):
            if around.entry and (around.first, around.second) != ("{name}", "{name}"):
                raise ValueError("an entry is for names with nothing around them: {name} on both sides")
            sides = parse_around(around.first), parse_around(around.second)
            return Surroundings(sides, around.equal_parts, around.entry)

    def _stacked(self, found: Mapping[str, str], rules: Sequence[Rule]) -> tuple[str, str]:
        fields = {field for rule in rules for field in rule.names[0][0][0].fields}
        for side, field in found.items():
            self._side("stacked", side)
            if field not in fields:
                self._refuse(f"stacked.{side}: {field!r:.80} is no field of any name")
        first, second = (found.get(side, "") for side in self._sides)
        return first, second

    @contextmanager
    def _at(self, where: str) -> Iterator[None]:
        try:
            yield
        except CheckpointMismatchError:
            raise
        except ValueError as error:
            self._refuse(f"{where}: {error}", error)

    def _refuse(self, what: str, cause: BaseException | None = None) -> NoReturn:
        raise CheckpointMismatchError(
            f"the name map {self._path} cannot be used: {what}; nothing was read or written: docs/name_maps.md says "
            "what a map holds",
            kind="conflict",
        ) from cause


_SIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_INDEXED = re.compile(r"\b(tensors|around|refuse)\[(\d{1,6})\]")
_NOTHING_AROUND = Surroundings((Around("", ""), Around("", "")), has_equal_parts=False, entry="")


def _sides(found: Any) -> tuple[str, str] | None:
    is_pair = isinstance(found, list) and len(found) == 2 and found[0] != found[1]
    if not is_pair or not all(isinstance(side, str) and _SIDE.fullmatch(side) for side in found):
        return None
    return found[0], found[1]


def _listed(found: Any) -> Any:
    """What is no list is left to the check of types."""
    return found if isinstance(found, list) else [found]


def _source(source: _Source) -> Source:
    if bool(source.value) == bool(source.tensor) or (source.tensor and source.condition):
        raise ValueError("a source has either a value, which may have an if, or a tensor and a dim")
    if source.value:
        return Source(value=source.value, condition=source.condition)
    return Source(tensor=parse_pattern(source.tensor), dim=source.dim)


def _refuse_circles(options: Mapping[str, Option]) -> None:
    left = {name: option.default.names if option.default else () for name, option in options.items()}
    unknown = [(name, needed) for name, needs in left.items() for needed in needs if needed not in options]
    for name, needed in unknown:
        raise ValueError(f"the default of {name!r:.80} needs {needed!r:.80}, which is no option of this map")
    while left:
        # What needs nothing that is left can be found; where there is no such option, they go round in a circle.
        found = [name for name, needs in left.items() if not any(needed in left for needed in needs)]
        if not found:
            raise ValueError(f"the defaults of {', '.join(left)} need one another")
        left = {name: needs for name, needs in left.items() if name not in found}
