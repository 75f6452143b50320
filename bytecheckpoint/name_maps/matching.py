"""Names of tensors looked up in a name map: each is a part of a rule, for certain numbers (a layer), in a template (an
optimizer's state).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.name_maps.parameters import refusal
from bytecheckpoint.name_maps.patterns import Pattern, shape_of_name
from bytecheckpoint.name_maps.schema import MapFile


class NameMatch(NamedTuple):
    """The place of a name in a map."""

    around: int
    """Index into `MapFile.arounds`, the templates that a parameter's name stands in."""
    rule: int
    """Index into `MapFile.rules`."""
    part: int
    """Index of the part of the rule, on the side of the name."""
    numbers: tuple[tuple[str, int], ...]
    """Field and number, in the order of the fields' names; without the field of a stacked tensor's leading
    dimension."""
    is_stacked: bool


class _PatternEntry(NamedTuple):
    pattern: Pattern
    rule: int
    part: int
    is_stacked: bool


class NameIndex:
    """The names of one side of a map."""

    def __init__(self, name_map: MapFile, side: int) -> None:
        self._map = name_map
        self._side = side
        self._entries: dict[tuple[str, ...], list[_PatternEntry]] = {}
        stacked = name_map.stacked[side]
        parts = (
            (number, part, dict.fromkeys(variants))
            for number, rule in enumerate(name_map.rules)
            for part, variants in enumerate(rule.names[side])
        )
        for number, part, variants in parts:
            for pattern in variants:
                self._add(_PatternEntry(pattern, number, part, is_stacked=False))
                if stacked in pattern.fields:
                    self._add(_PatternEntry(pattern.without(stacked), number, part, is_stacked=True))

    def _add(self, entry: _PatternEntry) -> None:
        self._entries.setdefault(shape_of_name(entry.pattern.parts), []).append(entry)

    def find(self, fqn: str) -> NameMatch | None:
        """Returns the rule that names an FQN, with its place there; None if the map does not know the FQN.

        Raises CheckpointMismatchError (conflict) if two rules name it.
        """
        for number, around in enumerate(self._map.arounds):
            name = around.sides[self._side].find_name(fqn)
            found = self._matches(name.split("."), number) if name else []
            if len(found) > 1:
                rules = " and ".join(self._map.rules[match.rule].where for match in found[:2])
                raise refusal(self._map, f"{fqn!r:.200} is meant by {rules}, and one of them has to go")
            if found:
                return found[0]
        return None

    def _matches(self, parts: Sequence[str], around: int) -> list[NameMatch]:
        matches = []
        for pattern, rule, part, is_stacked in self._entries.get(shape_of_name(parts), ()):
            numbers = pattern.match(parts)
            if numbers is not None:
                matches.append(NameMatch(around, rule, part, tuple(sorted(numbers.items())), is_stacked))
        return matches


class Translation(NamedTuple):
    """Translates names of one side, on request, to names of the other."""

    name_map: MapFile
    names: NameIndex
    """The names of the side that is translated."""
    target: int
    """The other side."""
    variant: int
    """The number of the variant of the other side's names."""
    stacked: str
    """The field that the other side's names lack, "" for none."""
    num_layers: Mapping[int, int]
    """By rule, the number of layers in tensors that hold all layers."""

    def translate(self, fqn: str) -> tuple[str, ...]:
        """Returns all names that the other side has for a name, several if the tensor is split there; an empty tuple if
        the map does not know it.
        """
        match = self.names.find(fqn)
        if match is None:
            return ()
        parts = range(len(self.name_map.rules[match.rule].names[self.target]))
        field = self.name_map.stacked[1 - self.target]
        layers = [{field: layer} for layer in range(self.num_layers.get(match.rule, 0))] if match.is_stacked else [{}]
        by_layer = [dict(match.numbers) | layer for layer in layers]
        names = (self.name(match.around, match.rule, part, numbers) for numbers in by_layer for part in parts)
        return tuple(dict.fromkeys(names))

    def name(self, around: int, rule: int, part: int, numbers: Mapping[str, int]) -> str:
        """Returns the name that a part of a rule has on the other side."""
        variants = self.name_map.rules[rule].names[self.target][part]
        pattern = variants[self.variant if len(variants) > 1 else 0]
        name = (pattern.without(self.stacked) if self.stacked else pattern).fill(numbers)
        return self.name_map.arounds[around].sides[self.target].fill(name)
