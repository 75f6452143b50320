"""Which tensors of a checkpoint a name map knows, and as what: each is a part of a rule, for certain numbers (a layer),
with something around its name (an optimizer's state).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.name_maps.parameters import refusal
from bytecheckpoint.name_maps.patterns import Pattern, shape_of_name
from bytecheckpoint.name_maps.records import MapFile


class Hit(NamedTuple):
    """What a map knows of a name."""

    around: int
    """Index into `MapFile.arounds`."""
    rule: int
    """Index into `MapFile.rules`."""
    part: int
    """Of the rule, on the side of the name."""
    numbers: tuple[tuple[str, int], ...]
    """By field, in the order of the fields' names; without that of the leading dimension where it is stacked."""
    is_stacked: bool


class _Candidate(NamedTuple):
    pattern: Pattern
    rule: int
    part: int
    is_stacked: bool


class Names:
    """The names of one side of a map."""

    def __init__(self, name_map: MapFile, side: int) -> None:
        self._map = name_map
        self._side = side
        self._candidates: dict[tuple[str, ...], list[_Candidate]] = {}
        field = name_map.stacked[side]
        for number, rule in enumerate(name_map.rules):
            for part, variants in enumerate(rule.names[side]):
                self._add_variants(variants, number, part, field)

    def _add_variants(self, variants: Sequence[Pattern], rule: int, part: int, stacked: str) -> None:
        for pattern in dict.fromkeys(variants):
            self._add(_Candidate(pattern, rule, part, is_stacked=False))
            if stacked in pattern.fields:
                self._add(_Candidate(pattern.without(stacked), rule, part, is_stacked=True))

    def _add(self, candidate: _Candidate) -> None:
        self._candidates.setdefault(shape_of_name(candidate.pattern.parts), []).append(candidate)

    def find(self, fqn: str) -> Hit | None:
        """What the map knows of an FQN; None where it knows nothing.

        Raises CheckpointMismatchError (conflict) where two rules mean it.
        """
        for number, around in enumerate(self._map.arounds):
            name = around.sides[self._side].inner(fqn)
            hits = self._hits(name.split("."), number) if name else []
            if len(hits) > 1:
                rules = " and ".join(self._map.rules[hit.rule].where for hit in hits[:2])
                raise refusal(self._map, f"{fqn!r:.200} is meant by {rules}, and one of them has to go")
            if hits:
                return hits[0]
        return None

    def _hits(self, parts: Sequence[str], around: int) -> list[Hit]:
        hits = []
        for pattern, rule, part, is_stacked in self._candidates.get(shape_of_name(parts), ()):
            numbers = pattern.match(parts)
            if numbers is not None:
                hits.append(Hit(around, rule, part, tuple(sorted(numbers.items())), is_stacked))
        return hits


class Translation(NamedTuple):
    """Names of one side to those of the other."""

    name_map: MapFile
    names: Names
    """Of the side from which names come."""
    target: int
    """The other side."""
    variant: int
    """Of the other side's names."""
    stacked: str
    """The field that the other side's names lack, "" for none."""
    num_layers: Mapping[int, int]
    """By rule, of tensors that hold all layers in one."""

    def translate(self, fqn: str) -> tuple[str, ...]:
        """All names that the other side has for a name, or for what is taken apart there; none where it is not
        known.
        """
        hit = self.names.find(fqn)
        if hit is None:
            return ()
        parts = range(len(self.name_map.rules[hit.rule].names[self.target]))
        field = self.name_map.stacked[1 - self.target]
        layers = [{field: layer} for layer in range(self.num_layers.get(hit.rule, 0))] if hit.is_stacked else [{}]
        of_layers = [dict(hit.numbers) | layer for layer in layers]
        names = (self.name(hit.around, hit.rule, part, numbers) for numbers in of_layers for part in parts)
        return tuple(dict.fromkeys(names))

    def name(self, around: int, rule: int, part: int, numbers: Mapping[str, int]) -> str:
        """The name of a part of a rule."""
        pattern = self.pattern(rule, part)
        name = (pattern.without(self.stacked) if self.stacked else pattern).fill(numbers)
        return self.name_map.arounds[around].sides[self.target].around(name)

    def pattern(self, rule: int, part: int) -> Pattern:
        variants = self.name_map.rules[rule].names[self.target][part]
        return variants[self.variant if len(variants) > 1 else 0]
