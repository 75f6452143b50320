"""A name map applied to a checkpoint: from the names, dtypes and shapes of its tensors to those of the other framework,
and from which regions of the stored ones each is made. No file is touched here, and no tensor.

A tensor that holds all layers is taken apart first, and put together last: every operation works on those of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, and_more
from bytecheckpoint.name_maps.matching import Hit, Names, Translation
from bytecheckpoint.name_maps.operations import (
    Made,
    Part,
    as_it_is,
    in_stack,
    joined,
    padded,
    refuse_too_many,
    show_kinds,
    split,
)
from bytecheckpoint.name_maps.parameters import Facts, Options, refusal
from bytecheckpoint.name_maps.records import MapFile, Rule, Source, Surroundings
from bytecheckpoint.planner.copy_plan import CopySource, WantedTensor
from bytecheckpoint.region import whole

_NUM_SHOWN = 10

Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor, by FQN."""


class Contents(NamedTuple):
    """What a map has to know of a checkpoint."""

    described: Described
    aliases: Mapping[str, str]
    """Other names of these tensors."""
    facts: Facts


class Mapped(NamedTuple):
    """A checkpoint as the other framework has it."""

    tensors: list[WantedTensor]
    aliases: dict[str, str]
    """Other names of these tensors."""
    in_model: Mapping[str, str]
    """Of these names, those of parameters themselves, and not of an optimizer's state: what stands before each that the
    other framework does not have, `model.` or nothing."""
    entries: Mapping[str, str]
    """Of these names, those before which nothing stands: the name that their model has in a state."""
    sources: frozenset[str]
    """Names in the checkpoint, aliases among them, that the map knew: what they name stands in `tensors` or
    `aliases`."""
    dropped: list[str]
    """Tensors of the checkpoint that the map says are left out."""
    kept: list[str]
    """Tensors of the model that the map does not know, and that keep their names because that was asked for."""
    others: list[str]
    """Tensors of the checkpoint that are none of a model, and keep their names."""
    drop: tuple[str, ...]
    """Globs of what the map says is left out, plain data too."""
    sides: tuple[str, str]
    """From which framework to which."""
    translation: Translation
    """What names become that are no tensor's."""


def in_a_state(mapped: Mapped) -> Mapped:
    """The same with the model below the name that it has in a state."""
    new = {fqn: f"{entry}.{fqn}" for fqn, entry in mapped.entries.items()}
    names = set(new.values())
    taken = next((fqn for fqn in (*mapped.in_model, *mapped.kept, *mapped.others) if fqn in names), None)
    if taken is not None:
        raise CheckpointMismatchError(
            f"the checkpoint has {taken!r:.200}, and another tensor that would get that name; nothing was loaded or "
            "written: convert one of the two models first",
            kind="conflict",
        )
    return mapped._replace(
        tensors=[tensor._replace(fqn=new.get(tensor.fqn, tensor.fqn)) for tensor in mapped.tensors],
        aliases={new.get(alias, alias): new.get(fqn, fqn) for alias, fqn in mapped.aliases.items()},
        in_model={
            new.get(fqn, fqn): f"{mapped.entries[fqn]}." if fqn in new else before
            for fqn, before in mapped.in_model.items()
        },
        entries={},
    )


class Asked(NamedTuple):
    """How a map is to be applied."""

    source_side: int | None
    """0 or 1, or None: the side that the names of the checkpoint are of."""
    options: Mapping[str, int | str]
    keep_unmapped: bool


_Numbers = tuple[tuple[str, int], ...]
_Group = tuple[int, int, _Numbers]
"""Around, rule and numbers of tensors that an operation takes together."""


def apply_map(name_map: MapFile, contents: Contents, asked: Asked) -> Mapped:
    """What the tensors of a checkpoint, and its aliases, are on the other side of the map.

    Raises CheckpointMismatchError: conflict, missing_key, unexpected_key, shape or dtype where the map does not fit the
    checkpoint; and UnsafeCheckpointError (limits_exceeded) where that would be too many pieces.
    """
    side = _source_side(name_map, contents.described) if asked.source_side is None else asked.source_side
    return _Application(name_map, side, contents, asked).run()


def _source_side(name_map: MapFile, described: Described) -> int:
    """The side that knows more of the names."""
    counts = [
        sum(names.find(fqn) is not None for fqn in described) for names in (Names(name_map, 0), Names(name_map, 1))
    ]
    if counts[0] == counts[1]:
        raise refusal(
            name_map,
            f"{counts[0]} of {len(described)} names are of {name_map.sides[0]}, and {counts[1]} of "
            f"{name_map.sides[1]}: it cannot be told which it is{_examples(described)}",
        )
    return int(counts[1] > counts[0])


def _examples(names: Mapping[str, object]) -> str:
    return f" (its first names: {', '.join(list(names)[:3])})" if names else ""


class _Application:
    """A map that is applied to one checkpoint."""

    def __init__(self, name_map: MapFile, side: int, contents: Contents, asked: Asked) -> None:
        self._map = name_map
        self._side, self._target = side, 1 - side
        self._described = contents.described
        self._stored = {**{fqn: fqn for fqn in contents.described}, **contents.aliases}
        """By name in the checkpoint, the FQN under which it is stored."""
        self._keeps = asked.keep_unmapped
        names = Names(name_map, side)
        self._hits = {name: names.find(name) for name in self._stored}
        self._options = Options(name_map, asked.options, contents.facts, self._length)
        self._options.check_refusals()
        variant, stacked = self._options.variant(self._target), self._options.stacked(self._target)
        self._num_layers = self._stack_lengths()
        self._translation = Translation(name_map, names, self._target, variant, stacked, self._num_layers)
        self._used_arounds = {hit.around for hit in self._hits.values() if hit}
        self._roots = {pattern.parts[0] for rule in name_map.rules for part in rule.names[side] for pattern in part}
        """What the names of a model begin with."""
        self._num_pieces = 0
        self._in_model: dict[str, str] = {}
        self._entries: dict[str, str] = {}
        self._tied: set[str] = set()
        """Names in the target of what is made of aliases."""

    def _stack_lengths(self) -> dict[int, int]:
        """By rule, how many layers the tensors have that hold all of them."""
        stacked = (
            (hit.rule, self._described[self._stored[name]][1])
            for name, hit in self._hits.items()
            if hit and hit.is_stacked
        )
        return {rule: shape[0] for rule, shape in stacked if shape}

    def run(self) -> Mapped:
        groups: dict[_Group, dict[int, Part]] = {}
        left: list[str] = []
        for name, hit in self._hits.items():
            if hit is None:
                left.append(name)
            else:
                self._add(groups, name, hit)
        dropped = [name for name in left if any(fnmatchcase(name, glob) for glob in self._map.drop[self._side])]
        are_dropped = set(dropped)
        unknown = [name for name in left if name not in are_dropped]
        kept = [name for name in unknown if self._is_of_model(name)]
        self._check_known(kept, is_any_known=bool(groups))
        tensors, aliases = self._without_repetitions([*self._targets(groups), *map(self._as_it_is, unknown)])
        sources = frozenset(name for name, hit in self._hits.items() if hit is not None)
        return Mapped(
            tensors=tensors,
            aliases=aliases,
            in_model=self._in_model,
            entries=self._entries,
            sources=sources,
            dropped=dropped,
            kept=kept,
            others=sorted(set(unknown).difference(kept)),
            drop=self._map.drop[self._side],
            sides=(self._map.sides[self._side], self._map.sides[self._target]),
            translation=self._translation,
        )

    def _is_of_model(self, name: str) -> bool:
        """Whether a name is below the entry of a model that the map knows, or begins as the map's names do; but for
        tensors of single ranks, which are named by their content.
        """
        if "@" in name.rpartition(".")[2]:
            return False
        for number, surroundings in enumerate(self._map.arounds):
            around = surroundings.sides[self._side]
            inner = around.inner(name) if around.is_of_model else None
            if inner and (inner.partition(".")[0] in self._roots or (around.before and number in self._used_arounds)):
                return True
        return False

    def _check_known(self, unknown: Sequence[str], *, is_any_known: bool) -> None:
        if not is_any_known:
            raise refusal(
                self._map,
                f"it knows none of its {len(self._stored)} tensors as one of {self._map.sides[self._side]}"
                + _examples(self._stored),
            )
        if unknown and not self._keeps:
            shown = and_more(unknown, _NUM_SHOWN)
            raise CheckpointMismatchError(
                f"the name map {self._map.path} does not know {len(unknown)} tensors of this model: {shown}; "
                "nothing was loaded or written: keep them under their names (keep_unmapped, --keep-unmapped) and leave "
                "out with exclude what is not wanted, or add them to a map of your own",
                kind="unexpected_key",
            )

    def _add(self, groups: dict[_Group, dict[int, Part]], name: str, hit: Hit) -> None:
        for numbers, tensor in self._parts(name, hit):
            parts = groups.setdefault((hit.around, hit.rule, numbers), {})
            other = parts.setdefault(hit.part, tensor)
            if other is not tensor:
                raise refusal(self._map, f"{other.name!r:.200} and {tensor.name!r:.200} mean the same tensor")

    def _parts(self, name: str, hit: Hit) -> Iterator[tuple[_Numbers, Part]]:
        """What a tensor holds of each layer, where it holds all of them."""
        fqn = self._stored[name]
        dtype, shape = self._described[fqn]
        if not hit.is_stacked:
            yield hit.numbers, Part(name, fqn, None, dtype, shape)
            return
        is_one_value = not shape and self._map.arounds[hit.around].has_equal_parts
        num_layers = self._num_layers.get(hit.rule) if is_one_value else self._length_of_stack(name, shape)
        if num_layers is None:
            raise refusal(
                self._map, f"{name!r:.200} is of all layers, and none of their weights is there", "missing_key"
            )
        self._count(num_layers)
        for layer in range(num_layers):
            numbers = tuple(sorted((*hit.numbers, (self._map.stacked[self._side], layer))))
            yield numbers, Part(name, fqn, None if is_one_value else layer, dtype, shape[1:])

    def _length_of_stack(self, name: str, shape: tuple[int, ...]) -> int:
        if not shape:
            raise refusal(self._map, f"{name!r:.200} has no dimensions, and one for its layers was expected", "shape")
        return shape[0]

    def _targets(self, groups: Mapping[_Group, Mapping[int, Part]]) -> Iterator[WantedTensor]:
        stacks: dict[str, dict[int, Made]] = {}
        one_values: dict[str, Made] = {}
        """For all layers."""
        for (around, rule, numbers), tensors in groups.items():
            surroundings = self._map.arounds[around]
            for part, made in enumerate(self._made(self._map.rules[rule], tensors, surroundings)):
                self._count(len(made.pieces))
                fqn = self._translation.name(around, rule, part, dict(numbers))
                if any(tensor.name != tensor.fqn for tensor in tensors.values()):
                    self._tied.add(fqn)
                if surroundings.sides[self._target].is_of_model:
                    self._in_model[fqn] = surroundings.sides[self._target].before
                if surroundings.entry:
                    self._entries[fqn] = surroundings.entry
                layer = dict(numbers).get(self._translation.stacked)
                if layer is not None and surroundings.has_equal_parts:
                    one_values.setdefault(fqn, made)
                elif layer is None:
                    yield WantedTensor(fqn, *made)
                else:
                    stacks.setdefault(fqn, {})[layer] = made
        for fqn, made in one_values.items():
            yield WantedTensor(fqn, *made)
        for fqn, layers in stacks.items():
            yield WantedTensor(fqn, *self._stack(fqn, layers))

    def _stack(self, fqn: str, layers: Mapping[int, Made]) -> Made:
        missing = next((index for index in range(len(layers)) if index not in layers), None)
        if missing is not None:
            what = f"{fqn!r:.200} holds layers 0 to {max(layers)}, and layer {missing} is not there"
            raise refusal(self._map, what, "missing_key")
        kinds = {(made.dtype, made.shape) for made in layers.values()}
        if len(kinds) > 1:
            raise refusal(self._map, f"layers of {fqn!r:.200} differ: {show_kinds(kinds)}", "shape")
        dtype, shape = next(iter(kinds))
        pieces = [
            piece._replace(
                region=in_stack(piece.region, index),
                source_region=piece.source_region if piece.fqn is not None else in_stack(piece.region, index),
            )
            for index, made in sorted(layers.items())
            for piece in made.pieces
        ]
        return Made(dtype, (len(layers), *shape), pieces)

    def _made(self, rule: Rule, tensors: Mapping[int, Part], around: Surroundings) -> list[Made]:
        """The parts on the other side."""
        if around.has_equal_parts:
            return [as_it_is(tensors[min(tensors)])] * len(rule.names[self._target])
        try:
            if rule.interleave is None:
                return [padded(rule.padding, tensors[0], self._side, self._options)]
            missing = [part for part in range(len(rule.names[self._side])) if part not in tensors]
            if missing:
                present = next(iter(tensors.values())).name
                pattern = rule.names[self._side][missing[0]][0].text
                raise refusal(self._map, f"it has {present!r:.200}, and no {pattern!r:.200} beside it", "missing_key")
            if rule.interleave.joined == self._side:
                return split(rule.interleave, tensors[0], len(rule.names[self._target]), self._options)
            return [joined(rule.interleave, [tensors[part] for part in sorted(tensors)], self._options)]
        except CheckpointError:
            raise
        except ValueError as error:
            name = next(iter(tensors.values())).name
            raise refusal(self._map, f"{name!r:.200}: {error} ({rule.where} of the map)", "shape") from error

    def _as_it_is(self, name: str) -> WantedTensor:
        fqn = self._stored[name]
        if name != fqn:
            self._tied.add(name)
        dtype, shape = self._described[fqn]
        return WantedTensor(name, dtype, shape, [CopySource(whole(shape), fqn, whole(shape))])

    def _without_repetitions(self, found: Sequence[WantedTensor]) -> tuple[list[WantedTensor], dict[str, str]]:
        """The tensors, and as aliases those that were aliases and are made of the same pieces as another."""
        tensors: list[WantedTensor] = []
        aliases: dict[str, str] = {}
        names: set[str] = set()
        by_pieces: dict[tuple[object, ...], str] = {}
        for tensor in found:
            if tensor.fqn in names:
                raise refusal(self._map, f"two tensors of it come to the name {tensor.fqn!r:.200}")
            names.add(tensor.fqn)
            pieces = [piece for piece in tensor.pieces if piece.region.numel]
            key = (tensor.dtype, tensor.shape, *pieces)
            first = by_pieces.setdefault(key, tensor.fqn)
            if first == tensor.fqn or tensor.fqn not in self._tied:
                tensors.append(tensor._replace(pieces=pieces))
            else:
                aliases[tensor.fqn] = first
        return tensors, aliases

    def _length(self, source: Source) -> int | None:
        """That of the first tensor that has this name, whatever stands around it."""
        if source.tensor is None:
            return None
        for name, hit in self._hits.items():
            if hit is None or self._map.arounds[hit.around].has_equal_parts:
                continue
            patterns = self._map.rules[hit.rule].names[self._side][hit.part]
            if source.tensor in patterns:
                shape = self._described[self._stored[name]][1][1 if hit.is_stacked else 0 :]
                return shape[source.dim] if -len(shape) <= source.dim < len(shape) else None
        return None

    def _count(self, num_pieces: int) -> None:
        """A small manifest can claim a tensor of a billion layers."""
        self._num_pieces += num_pieces
        refuse_too_many(self._num_pieces)
