"""A name map applied to the names, dtypes and shapes of a checkpoint: the tensors of the other framework, and the
stored regions that each consists of. No file is touched here, and no tensor.

A tensor that holds all layers is split first and stacked last: every operation works on the tensors of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from bytecheckpoint.dtypes import SCALE_SUFFIXES
from bytecheckpoint.errors import CheckpointError, CheckpointMismatchError, and_more
from bytecheckpoint.name_maps.matching import NameIndex, NameMatch, Translation
from bytecheckpoint.name_maps.operations import (
    LayerTensor,
    TargetTensor,
    describe_kinds,
    in_stack,
    joined,
    padded,
    refuse_too_many,
    split,
    unchanged,
)
from bytecheckpoint.name_maps.parameters import Options, PlainValues, refusal
from bytecheckpoint.name_maps.patterns import Pattern
from bytecheckpoint.name_maps.schema import MapFile, Rule
from bytecheckpoint.planner.copy_plan import CopySource, WantedTensor
from bytecheckpoint.region import whole

_NUM_SHOWN = 10

Described = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor, by FQN."""


class MapInput(NamedTuple):
    """A checkpoint that a map is applied to."""

    described: Described
    aliases: Mapping[str, str]
    """Other name of a tensor -> its FQN in `described`."""
    plain: PlainValues


class Mapped(NamedTuple):
    """A checkpoint as the other framework has it."""

    tensors: list[WantedTensor]
    aliases: dict[str, str]
    """Other name of a tensor -> its name in `tensors`."""
    in_model: Mapping[str, str]
    """Name in `tensors` or `aliases` of each parameter itself, not of its optimizer state -> the prefix of that name
    before the parameter's own: `model.` or nothing."""
    entries: Mapping[str, str]
    """Name without a prefix -> the name that its model has in a state."""
    sources: frozenset[str]
    """Names in the checkpoint, aliases among them, that the map knew. Their tensors are in `tensors` or `aliases`."""
    dropped: list[str]
    """Tensors of the checkpoint that the map leaves out."""
    unmapped: list[str]
    """Tensors of the model that the map does not know. They have their names still, as the caller wanted."""
    others: list[str]
    """Tensors of the checkpoint that belong to no model, and keep their names."""
    drop: tuple[str, ...]
    """Globs of tensors and plain data that the map leaves out."""
    sides: tuple[str, str]
    """The framework of the checkpoint and the other one."""
    translation: Translation
    """Translates names of values that are not tensors."""


def in_a_state(mapped: Mapped) -> Mapped:
    """Returns the checkpoint with the tensors of the model below its name in a state, such as `model.`.

    Raises CheckpointMismatchError (conflict) if another tensor has such a name.
    """
    new = {fqn: f"{entry}.{fqn}" for fqn, entry in mapped.entries.items()}
    new_fqns = set(new.values())
    clash = next((fqn for fqn in (*mapped.in_model, *mapped.unmapped, *mapped.others) if fqn in new_fqns), None)
    if clash is not None:
        raise CheckpointMismatchError(
            f"the checkpoint has {clash!r:.200}, and another tensor that would get that name; nothing was loaded or "
            "written: convert one of the two models first",
            kind="conflict",
        )
    return mapped._replace(
        tensors=[tensor._replace(fqn=new.get(tensor.fqn, tensor.fqn)) for tensor in mapped.tensors],
        aliases={new.get(alias, alias): new.get(fqn, fqn) for alias, fqn in mapped.aliases.items()},
        in_model={
            new.get(fqn, fqn): f"{mapped.entries[fqn]}." if fqn in new else prefix
            for fqn, prefix in mapped.in_model.items()
        },
        entries={},
    )


class MapRequest(NamedTuple):
    """The user's choices for applying a map."""

    source_side: int | None
    """The side that the checkpoint's names are of: 0 or 1; None if the names are to show it."""
    options: Mapping[str, int | str]
    keep_unmapped: bool


_Numbers = tuple[tuple[str, int], ...]
_Group = tuple[int, int, _Numbers]
"""Indices in `MapFile.arounds` and `MapFile.rules`, and numbers that tensors of one operation have in common."""


def apply_map(name_map: MapFile, contents: MapInput, request: MapRequest) -> Mapped:
    """Returns the tensors and aliases of a checkpoint as they are on the other side of the map.

    Raises CheckpointMismatchError (conflict, missing_key, unexpected_key, shape) if the map does not fit the
    checkpoint; and UnsafeCheckpointError (limits_exceeded) if the result has too many pieces.
    """
    side = _source_side(name_map, contents.described) if request.source_side is None else request.source_side
    return _Application(name_map, side, contents, request).run()


def _source_side(name_map: MapFile, described: Described) -> int:
    """Returns the side that knows more of the names. Raises CheckpointMismatchError (conflict) for equal counts."""
    counts = [
        sum(names.find(fqn) is not None for fqn in described)
        for names in (NameIndex(name_map, 0), NameIndex(name_map, 1))
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
    """A map in use on one checkpoint."""

    def __init__(self, name_map: MapFile, side: int, contents: MapInput, request: MapRequest) -> None:
        self._map = name_map
        self._side, self._target = side, 1 - side
        self._described = contents.described
        self._stored = {**{fqn: fqn for fqn in contents.described}, **contents.aliases}
        """The FQN under which each tensor is stored, by its name in the checkpoint."""
        self._keep_unmapped = request.keep_unmapped
        names = NameIndex(name_map, side)
        self._matches = {name: names.find(name) for name in self._stored}
        self._options = Options(name_map, request.options, contents.plain, self._length)
        self._options.check_refusals()
        variant, stacked = self._options.variant(self._target), self._options.stacked(self._target)
        self._num_layers = self._stack_lengths()
        self._translation = Translation(name_map, names, self._target, variant, stacked, self._num_layers)
        self._used_arounds = {match.around for match in self._matches.values() if match}
        self._roots = {pattern.parts[0] for rule in name_map.rules for part in rule.names[side] for pattern in part}
        """First parts of the names of a model."""
        self._num_pieces = 0
        self._in_model: dict[str, str] = {}
        self._entries: dict[str, str] = {}
        self._from_aliases: set[str] = set()
        """Names in the target of tensors that are made of aliases."""

    def _stack_lengths(self) -> dict[int, int]:
        """Returns by rule the number of layers in the tensors that hold all layers."""
        stacked = (
            (match.rule, self._described[self._stored[name]][1])
            for name, match in self._matches.items()
            if match and match.is_stacked
        )
        return {rule: shape[0] for rule, shape in stacked if shape}

    def run(self) -> Mapped:
        groups: dict[_Group, dict[int, LayerTensor]] = {}
        dropped: list[str] = []
        unknown: list[str] = []
        for name, match in self._matches.items():
            if match is not None:
                self._add(groups, name, match)
            elif any(fnmatchcase(name, glob) for glob in self._map.drop[self._side]):
                dropped.append(name)
            else:
                unknown.append(name)
        unmapped = [name for name in unknown if self._is_of_model(name)]
        self._check_known(unmapped, is_any_known=bool(groups))
        tensors, aliases = self._without_repetitions([*self._targets(groups), *map(self._unchanged, unknown)])
        sources = frozenset(name for name, match in self._matches.items() if match is not None)
        return Mapped(
            tensors=tensors,
            aliases=aliases,
            in_model=self._in_model,
            entries=self._entries,
            sources=sources,
            dropped=dropped,
            unmapped=unmapped,
            others=sorted(set(unknown).difference(unmapped)),
            drop=self._map.drop[self._side],
            sides=(self._map.sides[self._side], self._map.sides[self._target]),
            translation=self._translation,
        )

    def _is_of_model(self, name: str) -> bool:
        """Returns True if a tensor that the map does not know belongs to a model: the map knows others below its
        prefix, or its name begins with the first part of a name of the map. False for tensors of single ranks, which
        are named by their content.
        """
        if "@" in name.rpartition(".")[2]:
            return False
        for number, around in enumerate(self._map.arounds):
            template = around.sides[self._side]
            inner = template.find_name(name) if template.is_of_model else None
            is_used = bool(template.before) and number in self._used_arounds
            if inner and (is_used or inner.partition(".")[0] in self._roots):
                return True
        return False

    def _is_weight_known(self, scales: str) -> bool:
        return any(self._matches.get(scales.removesuffix(suffix)) is not None for suffix in SCALE_SUFFIXES)

    def _check_known(self, unmapped: Sequence[str], *, is_any_known: bool) -> None:
        """Raises CheckpointMismatchError if the map knows no name of the checkpoint, or if `unmapped` has scales of a
        weight that the map knows (conflict). For other names in `unmapped` raises it (unexpected_key) unless the caller
        keeps them.
        """
        if not is_any_known:
            raise refusal(
                self._map,
                f"it knows none of its {len(self._stored)} tensors as one of {self._map.sides[self._side]}"
                + _examples(self._stored),
            )
        scales = [name for name in unmapped if name.endswith(SCALE_SUFFIXES) and self._is_weight_known(name)]
        if scales:
            raise refusal(
                self._map,
                f"it does not know {scales[0]!r:.200}, the scales of a quantized weight that it knows: load the model "
                "under its own names with cast=True, and save it in full precision first",
            )
        if unmapped and not self._keep_unmapped:
            shown = and_more(unmapped, _NUM_SHOWN)
            raise CheckpointMismatchError(
                f"the name map {self._map.path} does not know {len(unmapped)} tensors of this model: {shown}; "
                "nothing was loaded or written: keep them under their names (keep_unmapped, --keep-unmapped) and leave "
                "out with exclude what is not wanted, or add them to a map of your own",
                kind="unexpected_key",
            )

    def _add(self, groups: dict[_Group, dict[int, LayerTensor]], name: str, match: NameMatch) -> None:
        for numbers, tensor in self._layers(name, match):
            parts = groups.setdefault((match.around, match.rule, numbers), {})
            other = parts.setdefault(match.part, tensor)
            if other is not tensor:
                raise refusal(self._map, f"{other.name!r:.200} and {tensor.name!r:.200} mean the same tensor")

    def _layers(self, name: str, match: NameMatch) -> Iterator[tuple[_Numbers, LayerTensor]]:
        """Yields the numbers in the name, and the tensor; for one that holds all layers, those of each layer."""
        fqn = self._stored[name]
        dtype, shape = self._described[fqn]
        if not match.is_stacked:
            yield match.numbers, LayerTensor(name, fqn, None, dtype, shape)
            return
        is_one_value = not shape and self._map.arounds[match.around].equal_parts
        if not shape and not is_one_value:
            what = f"{name!r:.200} has no dimensions, and one for its layers was expected"
            raise refusal(self._map, what, "shape")
        num_layers = self._num_layers.get(match.rule) if is_one_value else shape[0]
        if num_layers is None:
            raise refusal(
                self._map, f"{name!r:.200} is of all layers, and none of their weights is there", "missing_key"
            )
        self._count(num_layers)
        for layer in range(num_layers):
            numbers = tuple(sorted((*match.numbers, (self._map.stacked[self._side], layer))))
            yield numbers, LayerTensor(name, fqn, None if is_one_value else layer, dtype, shape[1:])

    def _targets(self, groups: Mapping[_Group, Mapping[int, LayerTensor]]) -> Iterator[WantedTensor]:
        """Yields the tensors of the other side, stacked where it stacks layers. Notes which of them are parameters, and
        which are made of aliases.
        """
        stacks: dict[str, dict[int, TargetTensor]] = {}
        one_values: dict[str, TargetTensor] = {}  # each for all layers
        for (around, rule, numbers), tensors in groups.items():
            equal_parts, template = self._map.arounds[around].equal_parts, self._map.arounds[around].sides[self._target]
            for part, made in enumerate(self._apply_rule(self._map.rules[rule], tensors, equal_parts=equal_parts)):
                self._count(len(made.pieces))
                fqn = self._translation.name(around, rule, part, dict(numbers))
                if any(tensor.name != tensor.fqn for tensor in tensors.values()):
                    self._from_aliases.add(fqn)
                if template.is_of_model:
                    self._in_model[fqn] = template.before
                if self._map.arounds[around].entry:
                    self._entries[fqn] = self._map.arounds[around].entry
                layer = dict(numbers).get(self._translation.stacked)
                if layer is not None and equal_parts:
                    one_values.setdefault(fqn, made)
                elif layer is None:
                    yield WantedTensor(fqn, *made)
                elif stacks.setdefault(fqn, {}).setdefault(layer, made) is not made:
                    raise refusal(self._map, f"two tensors of it come to the name {fqn!r:.200}, layer {layer}")
        for fqn, made in one_values.items():
            yield WantedTensor(fqn, *made)
        for fqn, layers in stacks.items():
            yield WantedTensor(fqn, *self._stack(fqn, layers))

    def _stack(self, fqn: str, layers: Mapping[int, TargetTensor]) -> TargetTensor:
        missing = next((index for index in range(len(layers)) if index not in layers), None)
        if missing is not None:
            what = f"{fqn!r:.200} holds layers 0 to {max(layers)}, and layer {missing} is not there"
            raise refusal(self._map, what, "missing_key")
        kinds = {(made.dtype, made.shape) for made in layers.values()}
        if len(kinds) > 1:
            raise refusal(self._map, f"layers of {fqn!r:.200} differ: {describe_kinds(kinds)}", "shape")
        dtype, shape = next(iter(kinds))
        pieces = [
            piece._replace(
                region=in_stack(piece.region, index),
                source_region=piece.source_region if piece.fqn is not None else in_stack(piece.region, index),
            )
            for index, made in sorted(layers.items())
            for piece in made.pieces
        ]
        return TargetTensor(dtype, (len(layers), *shape), pieces)

    def _apply_rule(self, rule: Rule, tensors: Mapping[int, LayerTensor], *, equal_parts: bool) -> list[TargetTensor]:
        """Returns the tensors on the other side of the map that the rule makes of `tensors`. With `equal_parts` each
        is the first of `tensors`, unchanged.
        """
        if equal_parts:
            return [unchanged(tensors[min(tensors)])] * len(rule.names[self._target])
        try:
            if rule.padding is not None:
                return [padded(rule.padding, tensors[0], self._map.sides[self._side], self._options)]
            if rule.interleave is None:
                return [unchanged(tensors[0])]
            missing = [part for part in range(len(rule.names[self._side])) if part not in tensors]
            if missing:
                present = next(iter(tensors.values())).name
                pattern = str(rule.names[self._side][missing[0]][0])
                raise refusal(self._map, f"it has {present!r:.200}, and no {pattern!r:.200} beside it", "missing_key")
            if len(rule.names[self._side]) == 1:
                return split(rule.interleave, tensors[0], len(rule.names[self._target]), self._options)
            return [joined(rule.interleave, [tensors[part] for part in sorted(tensors)], self._options)]
        except CheckpointError:
            raise
        except ValueError as error:
            name = next(iter(tensors.values())).name
            raise refusal(self._map, f"{name!r:.200}: {error} ({rule.where} of the map)", "shape") from error

    def _unchanged(self, name: str) -> WantedTensor:
        """Returns a tensor that keeps its name."""
        fqn = self._stored[name]
        if name != fqn:
            self._from_aliases.add(name)
        dtype, shape = self._described[fqn]
        return WantedTensor(name, dtype, shape, [CopySource(whole(shape), fqn, whole(shape))])

    def _without_repetitions(self, all_tensors: Sequence[WantedTensor]) -> tuple[list[WantedTensor], dict[str, str]]:
        """Returns the tensors, and aliases by name: a tensor that is made of an alias, and of the same pieces as one
        before it, becomes an alias of that one. Raises CheckpointMismatchError (conflict) if two have one name.
        """
        tensors: list[WantedTensor] = []
        aliases: dict[str, str] = {}
        names: set[str] = set()
        by_pieces: dict[tuple[object, ...], str] = {}
        for tensor in all_tensors:
            if tensor.fqn in names:
                raise refusal(self._map, f"two tensors of it come to the name {tensor.fqn!r:.200}")
            names.add(tensor.fqn)
            pieces = [piece for piece in tensor.pieces if piece.region.numel]
            key = (tensor.dtype, tensor.shape, *pieces)
            first = by_pieces.setdefault(key, tensor.fqn)
            if first == tensor.fqn or tensor.fqn not in self._from_aliases:
                tensors.append(tensor._replace(pieces=pieces))
            else:
                aliases[tensor.fqn] = first
        return tensors, aliases

    def _length(self, pattern: Pattern, dim: int) -> int | None:
        """Returns the length along `dim` of the first tensor that matches, of one layer if layers are stacked; None if
        no tensor matches or it has no `dim`. Ignores values that are one for a whole parameter.
        """
        for name, match in self._matches.items():
            if match is None or self._map.arounds[match.around].equal_parts:
                continue
            if pattern in self._map.rules[match.rule].names[self._side][match.part]:
                shape = self._described[self._stored[name]][1][1 if match.is_stacked else 0 :]
                return shape[dim] if -len(shape) <= dim < len(shape) else None
        return None

    def _count(self, num_pieces: int) -> None:
        """Counts pieces, and raises like `refuse_too_many`: a small manifest can claim a tensor of a billion layers."""
        self._num_pieces += num_pieces
        refuse_too_many(self._num_pieces)
