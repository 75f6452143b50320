"""The model that the ranks of Megatron have parts of: what each file calls its layers and experts is numbered through,
and what tensor parallelism has cut is put together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.storage.foreign.file_bytes import damaged, not_readable, too_much
from bytecheckpoint.storage.foreign.parts import MAX_VALUES, Parts, is_extra_state, join_fqn, two_of
from bytecheckpoint.storage.foreign.pickled_values import Instance, StoredView
from bytecheckpoint.storage.foreign.plain_values import MAX_DEPTH
from bytecheckpoint.storage.foreign.saved_files import Saved
from bytecheckpoint.storage.foreign.tensor_parallel import Part, whole_of

_MODEL, MODEL_KEY = "model", re.compile(r"\Amodel(\d*)\Z")
_LAYER = re.compile(r"\A((?:.*?\.)?layers\.)(\d+)(\..*)\Z")
_EXPERT = re.compile(r"\A(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)((?:\..*)?)\Z")
_MAY_STAND_TWICE = re.compile(r"(?:\A|\.)(?:word|position)_embeddings\.weight\Z")
_FIRST_VERSION_OF_ORDER = 2.0
"""Of checkpoints: the first in which the rows of attention follow one another as they do today."""


class Rank(NamedTuple):
    """Where a rank stands."""

    tp: int
    pp: int
    ep: int


class RankFile(NamedTuple):
    """A rank's file."""

    rank: Rank
    folder: str
    saved: Saved

    @property
    def value(self) -> dict[str, Any]:
        found: dict[str, Any] = self.saved.value
        return found

    @property
    def settings(self) -> Mapping[str, Any]:
        """The arguments that Megatron ran with, as far as the file has them."""
        args = self.value.get("args")
        return args.fields if isinstance(args, Instance) else {}


_Stage = dict[str, list[tuple[RankFile, Any]]]
"""What the files of a stage have, by name."""


class Model:
    """The parts of the model in all files."""

    def __init__(self, files: Mapping[Rank, RankFile], parts: Parts) -> None:
        self._files = files
        self._parts = parts
        self._num_layers: dict[str, int] = {}
        """Of those that came before, by what their names begin with."""
        self._stage_of: dict[str, Rank] = {}

    def add(self) -> None:
        """Adds `model.<name>`, stage after stage; the chunks of a stage are as far apart as the stages are many."""
        stages = sorted({rank.pp for rank in self._files})
        chunks = {pp: _chunks_of(self._files[Rank(0, pp, 0)]) for pp in stages}
        for number in range(max(map(len, chunks.values()))):
            for pp in stages:
                if number < len(chunks[pp]):
                    self._add_chunk(chunks[pp][number], pp)

    def _add_chunk(self, key: str, pp: int) -> None:
        files = [file for rank, file in sorted(self._files.items()) if rank.pp == pp]
        by_name = self._by_name(key, files)
        for name, found in by_name.items():
            self._add_one(name, found, by_name)
        for prefix, num_layers in _layers_of(by_name).items():
            self._num_layers[prefix] = self._num_layers.get(prefix, 0) + num_layers

    def _by_name(self, key: str, files: list[RankFile]) -> _Stage:
        """What the files of a stage have of each tensor, in the order of tensor ranks, by name with its own numbers for
        layers and those of the whole model for experts.
        """
        values = {file.rank: _flat(file.value[key], file.saved.path) for file in files}
        num_experts = _num_local_experts(values[files[0].rank])
        by_name: _Stage = {}
        for file in files:
            names = values[file.rank]
            if file.rank.tp and names.keys() != values[file.rank._replace(tp=0)].keys():
                raise damaged(file.saved.path, f"its {key!r} has other names than that of the first tensor rank")
            for name, value in names.items():
                expert = _EXPERT.match(name)
                if expert:
                    number = int(expert[2]) + file.rank.ep * num_experts
                    by_name.setdefault(f"{expert[1]}{number}{expert[3]}", []).append((file, value))
                elif file.rank.ep == 0:  # the other expert ranks have copies
                    by_name.setdefault(name, []).append((file, value))
        return by_name

    def _global_name(self, name: str) -> str:
        layer = _LAYER.match(name)
        if layer is None:
            return name
        return f"{layer[1]}{int(layer[2]) + self._num_layers.get(layer[1], 0)}{layer[3]}"

    def _add_one(self, local_name: str, found: list[tuple[RankFile, Any]], stage: _Stage) -> None:
        name = self._global_name(local_name)
        fqn = f"{_MODEL}.{name}"
        first, value = found[0]
        if is_extra_state(name) or not isinstance(value, StoredView):
            self._add_plain(fqn, found)
            return
        if fqn in self._parts.tensors and _MAY_STAND_TWICE.search(name):
            return  # the last stage has a copy of its own, for its loss
        if any(not isinstance(each, StoredView) for _, each in found):
            raise damaged(first.saved.path, f"{name!r:.200} is a tensor in it, and something else on other ranks")
        if len(found) > 1:
            self._refuse_old_attention(name, first)
            self._refuse_other_cuts(name, first, len(found))
        parts = [Part(file.saved, each) for file, each in found]
        dtype, shape, chunks = whole_of(name, parts, is_gated=_is_gated(local_name, value, stage))
        self._refuse_taken(fqn, first.rank)
        self._parts.add_tensor(fqn, dtype, shape, chunks, num_parts=2 * len(parts))

    def _refuse_taken(self, fqn: str, rank: Rank) -> None:
        other = self._stage_of.setdefault(fqn, rank)
        if fqn in self._parts.tensors:
            raise CheckpointMismatchError(
                f"{self._parts.path}: pipeline ranks {other.pp} and {rank.pp} both have {fqn!r:.200}, and which one "
                "counts is not known; nothing was loaded: load it with Megatron and save it with --ckpt-format "
                "torch_dist",
                kind="conflict",
                path=self._parts.path,
            )

    def _add_plain(self, fqn: str, found: list[tuple[RankFile, Any]]) -> None:
        """Extra state of modules, of which ranks may have different ones."""
        for file, value in found:
            name = fqn if file.rank.tp == 0 else f"{file.folder}.{fqn}"
            if file.rank.tp == 0 or value is not None:
                self._parts.trees[name] = file.saved.plain(self._parts, value, name)

    def _refuse_other_cuts(self, name: str, file: RankFile, num_parts: int) -> None:
        size = file.settings.get("expert_tensor_parallel_size")
        if _EXPERT.match(name) and size is not None and size != num_parts:
            what = f"its experts are cut over {size!r:.20} ranks, and the rest of the model over {num_parts}"
            raise not_readable(file.saved.path, what, "load it with Megatron and save it with --ckpt-format torch_dist")

    def _refuse_old_attention(self, name: str, file: RankFile) -> None:
        version = file.value.get("checkpoint_version", 0)
        is_old = not isinstance(version, int | float) or version < _FIRST_VERSION_OF_ORDER
        if is_old and "attention." in name:
            what = f"it is of checkpoint version {version!r:.20}, which orders the rows of {name!r:.200} in another way"
            advice = "load it with Megatron, which reorders them, and save it again"
            raise not_readable(file.saved.path, what, advice)


def _chunks_of(file: RankFile) -> list[str]:
    """The keys of the chunks of the model that a stage has, in their order."""
    matches = [match for match in map(MODEL_KEY.match, map(str, file.value)) if match]
    keys = [match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))]
    if not keys:
        raise damaged(file.saved.path, "it has no model")
    return keys


def _flat(value: Any, path: str) -> dict[str, Any]:
    """Tensors and other leaves by name: models were nested dicts once."""
    if not isinstance(value, dict):
        raise damaged(path, f"its model is a {type(value).__name__}, and no dict")
    found: dict[str, Any] = {}
    num_values = 0

    def walk(values: dict[Any, Any], above: str, depth: int) -> None:
        nonlocal num_values
        num_values += 1 + len(values)
        if depth == 0 or num_values > MAX_VALUES:
            raise too_much(path, f"its model is nested more than {MAX_DEPTH} deep, or of {MAX_VALUES} values")
        for key, item in values.items():
            name = join_fqn(above, key)
            if isinstance(item, dict) and not is_extra_state(name):
                walk(item, name, depth - 1)
            elif name in found:
                raise two_of(path, name)
            else:
                found[name] = item

    walk(value, "", MAX_DEPTH)
    return found


def _num_local_experts(names: Mapping[str, Any]) -> int:
    return max((int(match[2]) + 1 for match in map(_EXPERT.match, names) if match), default=0)


def _layers_of(names: Mapping[str, Any]) -> dict[str, int]:
    """How many layers a chunk of the model has, by what their names begin with."""
    found: dict[str, int] = {}
    for layer in filter(None, map(_LAYER.match, names)):
        found[layer[1]] = max(found.get(layer[1], 0), int(layer[2]) + 1)
    return found


def _is_gated(name: str, view: StoredView, stage: _Stage) -> bool | None:
    """Whether the first layer of this MLP has twice the width that the second takes; None where that is not to be seen,
    and for what is no such layer.
    """
    second = re.sub(r"dense_h_to_4h\.(weight|bias)", "dense_4h_to_h.weight", name)
    second = re.sub(r"linear_fc1\.(weight|bias)", "linear_fc2.weight", second)
    found = stage.get(second)
    if second == name or found is None or not isinstance(found[0][1], StoredView) or len(found[0][1].shape) != 2:
        return None
    width = found[0][1].shape[1]
    return {width: False, 2 * width: True}.get(view.shape[0]) if view.shape else None
