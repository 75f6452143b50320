"""Records of name maps, which give the tensors of one framework the names of another, in both directions, with a few
operations; and the parser that reads them from TOML. docs/name_maps.md says what the fields mean.

Sides are counted 0 and 1, in the order in which the map names them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import msgspec

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.name_maps.expressions import SizeExpression
from bytecheckpoint.name_maps.patterns import NameTemplate, Pattern, parse_pattern, parse_template

FORMAT = 1
MAX_CHARACTERS = 1 << 20
VARIANT, STACKED = "variant", "stacked"
"""Options that every map has, where its sides have variants or can be stacked."""

_SIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class OptionSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"condition": "if"}):
    """A source of an option: a value in the plain data of the checkpoint, or the length of a tensor."""

    value: str = ""
    """FQN of a value in the plain data, or the end of one after a dot."""
    condition: str = ""
    """Name of another value: if that exists and is false, `value` is not used."""
    tensor: Pattern | None = None
    dim: int = 0
    """Dimension of the tensor whose length is the option's value."""

    def __post_init__(self) -> None:
        if bool(self.value) == bool(self.tensor) or (self.tensor and self.condition):
            raise ValueError("a source has either a value, which may have an if, or a tensor and a dim")


class Option(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"sources": "from"}):
    """A number that operations need."""

    about: str = ""
    sources: tuple[str | OptionSource, ...] = ()
    """The first that exists counts. A text is the FQN of a value, or its end after a dot."""
    default: SizeExpression | None = None


class Interleave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor on one side is several on the other: along dimension 0 it consists of groups, and each group has
    some rows of the first part, then of the second, and so on.
    """

    groups: SizeExpression = SizeExpression(1)
    rows: tuple[SizeExpression, ...] = ()
    """Rows of each part, in a group. Empty: all parts have as many."""


class Padding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor has more rows along dimension 0 on one side, which mean nothing and are zeros where they are made."""

    side: str
    """The side that has the padding."""
    rows: SizeExpression
    """Number of rows with padding."""
    without: SizeExpression
    """Number of rows without padding."""


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"found": "is"}):
    """A value that a checkpoint must not have."""

    value: str
    found: bool | int | str
    because: str


class Around(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The templates, one for each side, of names that contain a parameter's: of itself, or of its optimizer state."""

    first: NameTemplate = NameTemplate("{name}")
    second: NameTemplate = NameTemplate("{name}")
    equal_parts: bool = False
    """True if this is one value for a whole parameter, not a tensor of its shape. Of tensors with such values that are
    merged, the first counts: the values must be the same, and are not compared.
    """
    entry: str = ""
    """The name that the model gets in a state if the checkpoint has more in it. Only if both templates are `{name}`."""

    def __post_init__(self) -> None:
        if self.entry and (self.first, self.second) != ("{name}", "{name}"):
            raise ValueError("an entry is for names with nothing around them: {name} on both sides")

    @property
    def sides(self) -> tuple[NameTemplate, NameTemplate]:
        return self.first, self.second


class Rule(NamedTuple):
    """Tensors on one side that are tensors on the other."""

    where: str
    """The place of the rule in the file."""
    names: tuple[tuple[tuple[Pattern, ...], ...], tuple[tuple[Pattern, ...], ...]]
    """By side and part: the names, one for each variant of the side, or one for all variants."""
    interleave: Interleave | None
    padding: Padding | None


class MapFile(NamedTuple):
    """A name map that has no error in itself. No checkpoint was looked at."""

    path: str
    """Path of the map, as messages show it."""
    sides: tuple[str, str]
    options: Mapping[str, Option]
    rules: Sequence[Rule]
    arounds: Sequence[Around]
    variants: tuple[tuple[str, ...], tuple[str, ...]]
    """By side, the names of its variants."""
    stacked: tuple[str, str]
    """By side, the field that its names may lack: such a tensor has a leading dimension for it. Empty: none."""
    drop: tuple[tuple[str, ...], tuple[str, ...]]
    """By side, globs of what has no counterpart and is left out."""
    refusals: Sequence[Refusal]


class _RuleFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    first: str | list[str]
    second: str | list[str]
    interleave: Interleave | None = None
    padding: Padding | None = None


_FIELDS_BESIDE_SIDES = {*Around.__struct_fields__, *_RuleFields.__struct_fields__} - {"first", "second"}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of a map in TOML. Fields of type Any are converted later, one by one: some have keys named after the
    sides, and errors give the number or the name of each.
    """

    format: int
    sides: list[str]
    tensors: list[Any]
    about: str = ""
    options: dict[str, Any] = {}
    variants: dict[str, list[str]] = {}
    stacked: dict[str, str] = {}
    around: list[Any] = []
    drop: dict[str, list[str]] = {}
    refuse: list[Any] = []


def parse_map(text: str, path: str) -> MapFile:
    """Reads a map. Raises CheckpointMismatchError (conflict), which names the field, with its line where it can."""
    return _Parser(text, path).parse()


class _Parser:
    def __init__(self, text: str, path: str) -> None:
        self._text = text
        self._path = path
        self._sides = ("", "")

    def parse(self) -> MapFile:
        file = self._decode()
        self._variants = self._by_side("variants", file.variants)
        self._options = {name: self._option(name, item) for name, item in file.options.items()}
        self._refuse_circles()
        rules = [self._rule(number, item) for number, item in enumerate(file.tensors)]
        self._refuse_repeated(rules)
        around = self._two_sided(Around, NameTemplate)
        arounds = [self._converted(item, around, self._where("around", n)) for n, item in enumerate(file.around)]
        return MapFile(
            path=self._path,
            sides=self._sides,
            options=self._options,
            rules=rules,
            arounds=arounds or [Around()],
            variants=self._variants,
            stacked=self._stacked(file.stacked, rules),
            drop=self._by_side("drop", file.drop),
            refusals=[self._converted(item, Refusal, self._where("refuse", n)) for n, item in enumerate(file.refuse)],
        )

    def _decode(self) -> _File:
        if len(self._text) > MAX_CHARACTERS:
            self._refuse("", f"it has more than {MAX_CHARACTERS} characters, the most that are read")
        try:
            raw = tomllib.loads(self._text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            self._refuse("", f"it is no TOML: {error}", error)
        match raw.get("sides"):
            case [str(first), str(second)] if first != second and all(map(_SIDE.fullmatch, (first, second))):
                self._sides = first, second
                if not _FIELDS_BESIDE_SIDES.isdisjoint(self._sides):
                    self._refuse("sides", f"none can be called {' or '.join(sorted(_FIELDS_BESIDE_SIDES))}")
            case _:
                self._refuse("sides", 'it has to name the two sides, as in sides = ["megatron-gpt", "hf-llama"]')
        file = self._converted(raw, _File, "")
        if file.format != FORMAT:
            self._refuse("format", f"it is {file.format}, and this release reads {FORMAT}")
        return file

    def _two_sided(self, kind: type[_Kind], field_type: Any) -> type[_Kind]:
        """Returns a struct like `kind` with the two sides as fields: `first` and `second`, renamed."""
        fields = [(name, field_type) for name in ("first", "second")]
        rename = dict(zip(("first", "second"), self._sides, strict=True))
        struct = msgspec.defstruct(kind.__name__, fields, bases=(kind,), rename=rename, frozen=True)
        return cast("type[_Kind]", struct)

    def _converted(self, raw: Any, kind: type[_Kind], where: str) -> _Kind:
        try:
            return msgspec.convert(raw, kind, dec_hook=_parse)
        except msgspec.ValidationError as error:
            what, _, field = str(error).partition(" - at `$")
            self._refuse(f"{where}{field.removesuffix('`')}".removeprefix("."), what, error)

    def _where(self, name: str, number: int) -> str:
        """Returns the name of an entry of an array of tables, with its line if it is written in the usual way."""
        heads = [at for at, line in enumerate(self._text.splitlines(), 1) if line.strip() == f"[[{name}]]"]
        return f"{name}[{number}]" + (f" (line {heads[number]})" if number < len(heads) else "")

    def _by_side(self, name: str, table: Mapping[str, Sequence[str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        for side in table:
            self._check_side(name, side)
        return tuple(table.get(self._sides[0], ())), tuple(table.get(self._sides[1], ()))

    def _check_side(self, where: str, side: str) -> None:
        if side not in self._sides:
            self._refuse(where, f"{side!r:.80} is not a side, those are {self._sides[0]} and {self._sides[1]}")

    def _option(self, name: str, item: Any) -> Option:
        where = f"options.{name}"
        if not name.isidentifier() or name in {VARIANT, STACKED}:
            self._refuse(where, f"{name!r:.80} cannot be the name of an option")
        return self._converted(item, Option, where)

    def _refuse_circles(self) -> None:
        unresolved = {name: option.default.names if option.default else [] for name, option in self._options.items()}
        for name, needs in unresolved.items():
            for needed in needs:
                if needed not in self._options:
                    what = f"the default of {name!r:.80} needs {needed!r:.80}, which is not an option of this map"
                    self._refuse("options", what)
        while unresolved:
            # An option whose needs are all known is known as well. If there is no such option, they form a circle.
            resolved = [name for name, needs in unresolved.items() if not any(needed in unresolved for needed in needs)]
            if not resolved:
                self._refuse("options", f"the defaults of {', '.join(unresolved)} need one another")
            unresolved = {name: needs for name, needs in unresolved.items() if name not in resolved}

    def _rule(self, number: int, item: Any) -> Rule:
        where = self._where("tensors", number)
        fields = self._converted(item, self._two_sided(_RuleFields, str | list[str]), where)
        if fields.padding is not None:
            self._check_side(f"{where}.padding", fields.padding.side)
        try:
            self._check_operation(fields)
            names = self._names(0, fields), self._names(1, fields)
            if len({frozenset(pattern.fields) for side in names for part in side for pattern in part}) > 1:
                raise ValueError("its names do not all have the same fields")
        except ValueError as error:
            self._refuse(where, str(error), error)
        return Rule(where, names, fields.interleave, fields.padding)

    def _check_operation(self, rule: _RuleFields) -> None:
        interleave, padding = rule.interleave, rule.padding
        sizes: list[SizeExpression] = []
        if interleave is not None and padding is not None:
            raise ValueError("interleave and padding cannot both be said of one tensor")
        if padding is not None:
            sizes = [padding.rows, padding.without]
        if interleave is not None:
            lists = [names for names in (rule.first, rule.second) if isinstance(names, list)]
            if len(lists) != 1:
                raise ValueError("where tensors are interleaved, one side has one name and the other a list of names")
            num_rows, num_parts = len(interleave.rows), len(lists[0])
            if num_parts < 2 or num_rows not in {0, num_parts}:
                raise ValueError(
                    f"interleave.rows has {num_rows} sizes for {num_parts} parts: give one for each, or none"
                )
            sizes = [interleave.groups, *interleave.rows]
        for size in sizes:
            for name in size.names:
                if name not in self._options:
                    raise ValueError(f"{size.text!r:.200} needs {name!r}, which is not an option of this map")

    def _names(self, side: int, rule: _RuleFields) -> tuple[tuple[Pattern, ...], ...]:
        names = (rule.first, rule.second)[side]
        if isinstance(names, str):
            return ((parse_pattern(names),),)
        if not names:
            raise ValueError(f"it has an empty list of names for {self._sides[side]}: give one, or leave the rule out")
        patterns = tuple(map(parse_pattern, names))
        if rule.interleave is not None:
            return tuple((pattern,) for pattern in patterns)
        if len(patterns) != len(self._variants[side]):
            raise ValueError(
                f"{self._sides[side]} has {len(patterns)} names for {len(self._variants[side])} variants: give one for "
                "each variant, or one name for all"
            )
        return (patterns,)

    def _refuse_repeated(self, rules: Sequence[Rule]) -> None:
        """Raises CheckpointMismatchError (conflict) for a name that two rules have on one side."""
        for side in (0, 1):
            seen: dict[Pattern, str] = {}
            for rule in rules:
                patterns = {pattern for part in rule.names[side] for pattern in part}
                again = next((pattern for pattern in patterns if pattern in seen), None)
                if again is not None:
                    self._refuse(rule.where, f"{str(again)!r:.200} is in {seen[again]} as well")
                seen |= dict.fromkeys(patterns, rule.where)

    def _stacked(self, table: Mapping[str, str], rules: Sequence[Rule]) -> tuple[str, str]:
        fields = {field for rule in rules for field in rule.names[0][0][0].fields}
        for side, field in table.items():
            self._check_side("stacked", side)
            if field not in fields:
                self._refuse(f"stacked.{side}", f"{field!r:.80} is not a field of any name")
        return table.get(self._sides[0], ""), table.get(self._sides[1], "")

    def _refuse(self, where: str, what: str, cause: BaseException | None = None) -> NoReturn:
        raise CheckpointMismatchError(
            f"the name map {self._path} cannot be used: {f'{where}: ' if where else ''}{what}; nothing was read or "
            "written: docs/name_maps.md says what a map holds",
            kind="conflict",
        ) from cause


def _parse(kind: type, value: Any) -> Any:
    """Parses a text of the map for msgspec, which adds the path of the field to a ValueError."""
    if kind is SizeExpression:
        return SizeExpression(value)
    if not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{type(value).__name__}`")
    return parse_pattern(value) if kind is Pattern else parse_template(value)
