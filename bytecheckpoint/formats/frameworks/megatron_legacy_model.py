"""The model that the ranks of Megatron have parts of: what each file calls its layers and experts is numbered through,
and what tensor parallelism has cut is put together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.formats.file_reader import damaged, not_readable, too_much
from bytecheckpoint.formats.frameworks.megatron_tensor_parallel import TensorPart, is_same_on_all, whole_of
from bytecheckpoint.formats.manifest_builder import MAX_VALUES, ManifestBuilder, is_extra_state, two_of
from bytecheckpoint.formats.torch_save.duplicates import Comparer
from bytecheckpoint.formats.torch_save.file import SavedFile
from bytecheckpoint.formats.torch_save.unpickler_globals import Instance, StoredView
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, join_fqn

_MODEL, MODEL_KEY = "model", re.compile(r"\Amodel(\d*)\Z")
_LAYER = re.compile(r"\A((?:.*?\.)?layers\.)(\d+)(\..*)\Z")
_EXPERT = re.compile(
    r"\A(.*\.(?:(?:experts\.)?local_experts\.|experts\.linear_fc[12]\.(?:weight|bias)))(\d+)((?:\..*)?)\Z"
)
_OF_EXPERTS = re.compile(r"(?:\A|\.)(?:local_)?experts\.")
_MAIN_LAYERS = re.compile(r"\A(?:module\.|language_model\.)*(encoder|decoder|transformer)\.layers\.\Z")
"""Layers that the arguments count."""
_MAY_STAND_TWICE = re.compile(r"(?:\A|\.)(?:word|position)_embeddings\.weight\Z")
_ADVICE = "load it with Megatron and save it with --ckpt-format torch_dist"
_FIRST_VERSION_OF_ORDER = 2.0
"""The first version of checkpoints in which the rows of attention have the order of today."""


class Rank(NamedTuple):
    """Coordinates of a rank."""

    tp: int
    pp: int
    ep: int


class RankFile(NamedTuple):
    """A rank's file."""

    rank: Rank
    folder: str
    saved: SavedFile

    @property
    def value(self) -> dict[str, Any]:
        found: dict[str, Any] = self.saved.value
        return found

    @property
    def settings(self) -> Mapping[str, Any]:
        """The arguments of Megatron, as far as the file has them."""
        args = self.value.get("args")
        return args.fields if isinstance(args, Instance) else {}


_Stage = dict[str, list[tuple[RankFile, Any]]]
"""Values of the files of a stage, by name."""


class Model:
    """The parts of the model in all files."""

    def __init__(self, files: Mapping[Rank, RankFile], builder: ManifestBuilder) -> None:
        self._files = files
        self._builder = builder
        self._num_layers: dict[str, int] = {}
        """Number of layers in the stages before, by the prefix of their names."""
        self._stage_of: dict[str, Rank] = {}
        self._found: dict[str, list[tuple[RankFile, Any]]] = {}
        """Parts of tensors that another stage may have as well."""
        self._comparer = Comparer()

    def add(self) -> None:
        """Adds `model.<name>`, stage after stage; the chunks of a stage are as far apart as the stages are many."""
        stages = sorted({rank.pp for rank in self._files})
        chunks = {pp: _chunks_of(self._files[Rank(0, pp, 0)]) for pp in stages}
        for number in range(max(map(len, chunks.values()))):
            for pp in stages:
                if number < len(chunks[pp]):
                    self._add_chunk(chunks[pp][number], pp)
        refuse_other_counts(self._num_layers, self._files[Rank(0, 0, 0)])

    def _add_chunk(self, key: str, pp: int) -> None:
        files = [file for rank, file in sorted(self._files.items()) if rank.pp == pp]
        by_name = self._by_name(key, files)
        for name, found in by_name.items():
            self._add_one(name, found, by_name)
        for prefix, num_layers in _layers_of(by_name, files[0].saved.path).items():
            self._num_layers[prefix] = self._num_layers.get(prefix, 0) + num_layers

    def _by_name(self, key: str, files: list[RankFile]) -> _Stage:
        """Returns the parts of each tensor in the files of a stage, in the order of tensor ranks, by name with the
        stage's numbers for layers and those of the whole model for experts.
        """
        values = {file.rank: _flat(file.value[key], file.saved.path) for file in files}
        first = values[files[0].rank]
        num_experts = num_local_experts(first, files[0], 1 + max(file.rank.ep for file in files))
        by_name: _Stage = {}
        for file in files:
            names = values[file.rank]
            if names.keys() != first.keys():
                raise damaged(file.saved.path, f"its {key!r} has other names than that of {files[0].folder}")
            for name, value in names.items():
                expert = _EXPERT.match(name)
                if expert:
                    number = int(expert[2]) + file.rank.ep * num_experts
                    by_name.setdefault(f"{expert[1]}{number}{expert[3]}", []).append((file, value))
                elif file.rank.ep == 0 or is_extra_state(name):
                    by_name.setdefault(name, []).append((file, value))
                else:
                    self._refuse_no_copy(name, (file, value), values[file.rank._replace(ep=0)][name])
        return by_name

    def _refuse_no_copy(self, name: str, found: tuple[RankFile, Any], value: Any) -> None:
        """Refuses a value of no expert that is not a copy: every rank of experts has one."""
        file, _ = found
        if _OF_EXPERTS.search(name):
            what = f"{name!r:.200} is of experts, and which of them is not to be seen from its name"
            raise not_readable(file.saved.path, what, _ADVICE)
        self._refuse_difference(name, (self._files[file.rank._replace(ep=0)], value), found)

    def _refuse_difference(self, name: str, one: tuple[RankFile, Any], other: tuple[RankFile, Any]) -> None:
        here, there = (file.saved for file, _ in (one, other))
        if self._comparer.same_value((here, one[1]), (there, other[1]), name) is not False:
            return
        raise CheckpointMismatchError(
            f"{there.path} and {here.path} should have copies of {name!r:.200}, and they differ; which one counts is "
            f"not known, and nothing was loaded: {_ADVICE}",
            kind="conflict",
            path=there.path,
        )

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
        if any(not isinstance(each, StoredView) for _, each in found):
            raise damaged(first.saved.path, f"{name!r:.200} is a tensor in it, and something else on other ranks")
        self._refuse_old_attention(name, first)
        self._refuse_other_cuts(name, first, len(found))
        if _MAY_STAND_TWICE.search(name):
            others = self._found.setdefault(fqn, found)
            if others is not found:  # the last stage has a copy of its own, for its loss
                for one, other in zip(others, found, strict=True):
                    self._refuse_difference(name, one, other)
                return
        parts = [TensorPart(file.saved, each) for file, each in found]
        if is_same_on_all(name):
            for other in found[1:]:
                self._refuse_difference(name, found[0], other)
        dtype, shape, chunks = whole_of(name, parts, is_gated=_is_gated(local_name, value, stage))
        self._refuse_taken(fqn, first.rank)
        self._builder.add_tensor(fqn, dtype, shape, chunks, num_parts=2 * len(parts))

    def _refuse_taken(self, fqn: str, rank: Rank) -> None:
        other = self._stage_of.setdefault(fqn, rank)
        if fqn in self._builder.tensors:
            raise CheckpointMismatchError(
                f"{self._builder.path}: pipeline ranks {other.pp} and {rank.pp} both have {fqn!r:.200}, and which one "
                f"counts is not known; nothing was loaded: {_ADVICE}",
                kind="conflict",
                path=self._builder.path,
            )

    def _add_plain(self, fqn: str, found: list[tuple[RankFile, Any]]) -> None:
        """Adds extra state of modules, of which ranks may have different ones."""
        for file, value in found:
            is_first = file is found[0][0]
            name = fqn if is_first else f"{file.folder}.{fqn}"
            if is_first or value is not None:
                self._builder.trees[name] = file.saved.plain(value, name)

    def _refuse_other_cuts(self, name: str, file: RankFile, num_parts: int) -> None:
        size = file.settings.get("expert_tensor_parallel_size")
        if _OF_EXPERTS.search(name) and size is not None and size != num_parts:
            what = f"its experts are cut over {size!r:.20} ranks, and the rest of the model over {num_parts}"
            raise not_readable(file.saved.path, what, _ADVICE)

    def _refuse_old_attention(self, name: str, file: RankFile) -> None:
        version = file.value.get("checkpoint_version", 0)
        is_old = not isinstance(version, int | float) or not version >= _FIRST_VERSION_OF_ORDER
        if is_old and "attention." in name:
            what = f"it is of checkpoint version {version!r:.20}, which orders the rows of {name!r:.200} in another way"
            advice = "load it with Megatron, which reorders them, and save it again"
            raise not_readable(file.saved.path, what, advice)


def _chunks_of(file: RankFile) -> list[str]:
    """Returns the keys of the chunks of the model that a stage has, in order."""
    matches = [match for match in map(MODEL_KEY.match, map(str, file.value)) if match]
    keys = [match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))]
    if not keys:
        raise damaged(file.saved.path, "it has no model")
    return keys


def _flat(value: Any, path: str) -> dict[str, Any]:
    """Returns tensors and other leaves by name: models were nested dicts once."""
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


def num_local_experts(names: Mapping[str, Any], file: RankFile, num_ranks: int) -> int:
    """Returns the number of experts of a rank: all modules have as many, and the arguments have the total of all ranks.

    Raises CheckpointCorruptError (bad_manifest).
    """
    found: dict[str, set[int]] = {}
    for match in filter(None, map(_EXPERT.match, names)):
        found.setdefault(f"{match[1]}*{match[3]}", set()).add(int(match[2]))
    num_experts = max((len(numbers) for numbers in found.values()), default=0)
    for name, numbers in found.items():
        if max(numbers) != num_experts - 1 or len(numbers) != num_experts:
            what = f"{len(numbers)} experts, the highest {max(numbers)}, and others have {num_experts}"
            raise damaged(file.saved.path, f"its {name!r:.200} are of {what}")
    said = file.settings.get("num_experts")
    if found and type(said) is int and said != num_experts * num_ranks:
        what = f"{num_ranks} ranks with {num_experts} experts each, and its arguments say num_experts={said}"
        raise damaged(file.saved.path, f"there are {what}")
    return num_experts


def refuse_other_counts(num_layers: Mapping[str, int], file: RankFile) -> None:
    """Raises CheckpointCorruptError (bad_manifest) if there are not as many layers as the arguments say."""
    for prefix, found in num_layers.items():
        match = _MAIN_LAYERS.match(prefix)
        if match is None:
            continue
        name = f"{'decoder' if match[1] == 'decoder' else 'encoder'}_num_layers"
        said = file.settings.get(name)
        name, said = (name, said) if type(said) is int else ("num_layers", file.settings.get("num_layers"))
        if type(said) is int and said != found:
            raise damaged(file.saved.path, f"its arguments say {name}={said}, and of {prefix!r:.200} there are {found}")


def _layers_of(names: Mapping[str, Any], path: str) -> dict[str, int]:
    """Returns the number of layers in a chunk of the model, by the prefix of their names."""
    found: dict[str, set[int]] = {}
    for layer in filter(None, map(_LAYER.match, names)):
        found.setdefault(layer[1], set()).add(int(layer[2]))
    for prefix, numbers in found.items():
        if max(numbers) >= len(numbers):
            what = f"{len(numbers)} layers like {prefix}{max(numbers)}, and the others have no tensors"
            raise not_readable(path, f"it has {what}", _ADVICE)
    return {prefix: len(numbers) for prefix, numbers in found.items()}


def _is_gated(name: str, view: StoredView, stage: _Stage) -> bool | None:
    """Returns True if the first layer of this MLP has twice the width that the second takes; None if that cannot be
    seen, and for other layers.
    """
    second = re.sub(r"dense_h_to_4h\.(weight|bias)", "dense_4h_to_h.weight", name)
    second = re.sub(r"linear_fc1\.(weight|bias)", "linear_fc2.weight", second)
    found = stage.get(second)
    if second == name or found is None or not isinstance(found[0][1], StoredView) or len(found[0][1].shape) != 2:
        return None
    width = found[0][1].shape[1]
    return {width: False, 2 * width: True}.get(view.shape[0]) if view.shape else None
