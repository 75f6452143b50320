"""What a name map is once it has been read: which tensors of one framework are which of another, and by which
operations. Sides are counted 0 and 1, in the order in which the map names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.name_maps.expressions import SizeExpression
from bytecheckpoint.name_maps.patterns import Around, Pattern

VARIANT, STACKED = "variant", "stacked"
"""Options that every map has, where its sides have variants or can be stacked."""


class Source(NamedTuple):
    """Where an option may be found: a value in the plain data of the checkpoint, or the length of a tensor."""

    value: str = ""
    condition: str = ""
    """The value is not used where the one of this name is there, and is false."""
    tensor: Pattern | None = None
    dim: int = 0


class Option(NamedTuple):
    """A number that operations need."""

    about: str
    sources: tuple[Source, ...]
    """The first that is there counts."""
    default: SizeExpression | None


class Interleave(NamedTuple):
    """One tensor on one side is several on the other: along dimension 0 it consists of groups, each of which has so
    many rows of each part, in order.
    """

    joined: int
    """The side with the one tensor: 0 or 1."""
    groups: SizeExpression
    rows: tuple[SizeExpression, ...]
    """Of each part, in a group. Empty: all parts have as many."""


class Padding(NamedTuple):
    """A tensor has more rows along dimension 0 on one side, which mean nothing and are zeros where they are made."""

    padded: int
    """That side: 0 or 1."""
    rows: SizeExpression
    without: SizeExpression


class Rule(NamedTuple):
    """Tensors on one side that are tensors on the other."""

    where: str
    """In the file."""
    names: tuple[tuple[tuple[Pattern, ...], ...], tuple[tuple[Pattern, ...], ...]]
    """Of each side, for each part, the name: one for each variant of the side, or one for all."""
    interleave: Interleave | None
    padding: Padding | None


class Refusal(NamedTuple):
    """What a checkpoint must not say of itself."""

    value: str
    found: bool | int | str
    because: str


class Surroundings(NamedTuple):
    """What stands around the name of a parameter on either side, where something of it has a name."""

    sides: tuple[Around, Around]
    has_equal_parts: bool
    """It is no tensor like the parameter, but one value for all of it, which parameters that become one have alike."""
    entry: str
    """The name of the model in a state, where there is more in the checkpoint, and nothing stands around its names."""


class MapFile(NamedTuple):
    """A name map, checked in itself."""

    path: str
    """As messages show it."""
    sides: tuple[str, str]
    options: Mapping[str, Option]
    rules: Sequence[Rule]
    arounds: Sequence[Surroundings]
    variants: tuple[tuple[str, ...], tuple[str, ...]]
    stacked: tuple[str, str]
    """Of each side, the field that its names may lack: such a tensor has a leading dimension for it. Empty: none."""
    drop: tuple[tuple[str, ...], tuple[str, ...]]
    """Of each side, globs of what has no counterpart and is left out."""
    refusals: Sequence[Refusal]
