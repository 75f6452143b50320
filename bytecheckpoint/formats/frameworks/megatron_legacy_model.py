"""The whole model, from the parts in the files of Megatron's ranks: layers and experts, which each file counts from 0,
get their numbers in the model, and tensors that tensor parallelism has cut are joined. The name of a tensor tells how
it was cut; an unknown name is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bytecheckpoint.formats.file_reader import conflicting, damaged, not_readable
from bytecheckpoint.formats.manifest_builder import ManifestBuilder, is_extra_state, leaves_of
from bytecheckpoint.formats.torch_save.duplicates import Comparer, StoredCopy
from bytecheckpoint.formats.torch_save.file import SavedFile, moved
from bytecheckpoint.formats.torch_save.unpickler_globals import Instance, StoredView
from bytecheckpoint.manifest import Chunk

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

_ROWS, _COLUMNS, _GATED, _SAME = "rows", "columns", "gated", "same"

_RULES = (
    (_GATED, r"(linear_fc1|dense_h_to_4h)\.(weight|bias)\d*"),
    (_COLUMNS, r"(linear_proj|linear_fc2|dense_4h_to_h|\w*attention\.dense)\.weight\d*"),
    (_SAME, r"(linear_proj|linear_fc2|dense_4h_to_h|\w*attention\.dense)\.bias\d*"),
    (_ROWS, r"(word_embeddings|word_embeddings_for_head|output_layer|linear_qkv|query_key_value)\.(weight|bias)"),
    (_ROWS, r"(linear_q|linear_kv|query|key_value)\.(weight|bias)"),
    (_SAME, r"(\w*layer_?norm\d?|\w*_norm|norm)\.(weight|bias)"),
    (_SAME, r"(layer_norm_weight|layer_norm_bias|ln_bias|ln_weight)"),
    (_SAME, r"(position_embeddings|tokentype_embeddings|router)\.(weight|bias)"),
    (_SAME, r"(router\.expert_bias|shared_experts\.gate_weight|rotary_pos_emb\.inv_freq)"),
)
_PATTERNS = [(rule, re.compile(rf"(?:\A|\.){pattern}\Z")) for rule, pattern in _RULES]


class Rank(NamedTuple):
    """Tensor-, pipeline- and expert-parallel number of a rank."""

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
        value: dict[str, Any] = self.saved.value
        return value

    @property
    def settings(self) -> Mapping[str, Any]:
        """The arguments of Megatron, as far as the file has them."""
        args = self.value.get("args")
        return args.fields if isinstance(args, Instance) else {}


_Part = tuple[RankFile, Any]
"""A rank's file, and a value in it."""
_Stage = dict[str, list[_Part]]
"""Values of the files of a stage, by name."""


class Model:
    """The parts of the model in all files."""

    def __init__(self, files: Mapping[Rank, RankFile], builder: ManifestBuilder) -> None:
        self._files = files
        self._builder = builder
        self._num_layers: dict[str, int] = {}
        """Number of layers added so far, by the prefix of their names."""
        self._stage_of: dict[str, Rank] = {}
        """By FQN: a rank of the stage that has the tensor."""
        self._twice: _Stage = {}
        """Parts of tensors that the first and the last stage may both have, as the first of them has them."""
        self._comparer = Comparer()

    def add(self) -> None:
        """Adds all tensors as `model.<name>`, in the order of their layers: the first model chunk (virtual stage) of
        every stage, then the second of every stage, and so on.
        """
        stages = sorted({rank.pp for rank in self._files})
        model_chunks = {pp: _model_chunks_of(self._files[Rank(0, pp, 0)]) for pp in stages}
        for number in range(max(map(len, model_chunks.values()))):
            for pp in stages:
                if number < len(model_chunks[pp]):
                    self._add_model_chunk(model_chunks[pp][number], pp)
        refuse_other_counts(self._num_layers, self._files[Rank(0, 0, 0)])

    def _add_model_chunk(self, key: str, pp: int) -> None:
        """Adds the model chunk (virtual stage) under this key of a pipeline rank's files."""
        files = [file for rank, file in sorted(self._files.items()) if rank.pp == pp]
        stage = self._by_name(key, files)
        for name, parts in stage.items():
            self._add_one(name, parts, stage)
        for prefix, numbers in _numbers(_LAYER, stage, r"\1").items():
            if max(numbers) >= len(numbers):
                what = f"{len(numbers)} layers like {prefix}{max(numbers)}, and the others have no tensors"
                raise not_readable(files[0].saved.path, f"it has {what}", _ADVICE)
            self._num_layers[prefix] = self._num_layers.get(prefix, 0) + len(numbers)

    def _by_name(self, key: str, files: list[RankFile]) -> _Stage:
        """Returns the parts of each tensor of a stage by name, with experts numbered across the model. Of a tensor that
        is no expert's, returns those of the first expert-parallel ranks; the copies of the others must be equal.
        """
        values = {file.rank: _values_of(file, key) for file in files}
        first = values[files[0].rank]
        num_experts = num_local_experts(first, files[0], 1 + max(file.rank.ep for file in files))
        by_name: _Stage = {}
        for file in files:
            if values[file.rank].keys() != first.keys():
                raise damaged(file.saved.path, f"its {key!r} has other names than that of {files[0].folder}")
            for name, value in values[file.rank].items():
                expert = _EXPERT.match(name)
                if expert:
                    number = int(expert[2]) + file.rank.ep * num_experts
                    by_name.setdefault(f"{expert[1]}{number}{expert[3]}", []).append((file, value))
                elif file.rank.ep == 0 or is_extra_state(name):
                    by_name.setdefault(name, []).append((file, value))
                elif _OF_EXPERTS.search(name):
                    what = f"{name!r:.200} is of experts, and which of them is not to be seen from its name"
                    raise not_readable(file.saved.path, what, _ADVICE)
                else:  # every rank of experts has a copy
                    rank = file.rank._replace(ep=0)
                    self._refuse_difference(name, (self._files[rank], values[rank][name]), (file, value))
        return by_name

    def _refuse_difference(self, name: str, one: _Part, other: _Part) -> None:
        here, there = one[0].saved, other[0].saved
        if self._comparer.same_value((here, one[1]), (there, other[1]), name) is False:
            what = f"and {here.path} should have copies of {name!r:.200}, which differ; which one counts is not known"
            raise conflicting(there.path, what, _ADVICE)

    def _add_one(self, local_name: str, parts: list[_Part], stage: _Stage) -> None:
        """Adds a tensor or plain value of a stage, given its parts in the files of the ranks."""
        layer = _LAYER.match(local_name)
        name = f"{layer[1]}{int(layer[2]) + self._num_layers.get(layer[1], 0)}{layer[3]}" if layer else local_name
        fqn = f"{_MODEL}.{name}"
        first, view = parts[0]
        if is_extra_state(name) or not isinstance(view, StoredView):
            self._add_plain(fqn, parts)
            return
        if any(not isinstance(value, StoredView) for _, value in parts):
            raise damaged(first.saved.path, f"{name!r:.200} is a tensor in it, and something else on other ranks")
        _refuse_old_attention(name, first)
        _refuse_other_expert_split(name, first, len(parts))
        if _MAY_STAND_TWICE.search(name):
            earlier = self._twice.setdefault(fqn, parts)
            if earlier is not parts:  # the last stage has a copy of its own, for its loss
                for one, other in zip(earlier, parts, strict=True):
                    self._refuse_difference(name, one, other)
                return
        for other in parts[1:] if _rule_of(name) == _SAME else ():
            self._refuse_difference(name, parts[0], other)
        copies = [(file.saved, value) for file, value in parts]
        shape, chunks = _whole_of(name, copies, is_gated=_is_gated(local_name, view, stage))
        self._refuse_taken(fqn, first.rank)
        self._builder.add_tensor(fqn, view.dtype, shape, chunks, num_parts=2 * len(parts))

    def _refuse_taken(self, fqn: str, rank: Rank) -> None:
        other = self._stage_of.setdefault(fqn, rank)
        if fqn in self._builder.tensors:
            what = f"has {fqn!r:.200} on pipeline ranks {other.pp} and {rank.pp}, and which one counts is not known"
            raise conflicting(self._builder.path, what, _ADVICE)

    def _add_plain(self, fqn: str, parts: list[_Part]) -> None:
        """Adds plain data, such as the extra state of modules, of every rank, equal or not: that of the first rank of
        the first stage that has it as `fqn`, any other that is not None below the name of the rank's folder.
        """
        trees = self._builder.trees
        for file, value in parts:
            is_first = file is parts[0][0] and fqn not in trees
            name = fqn if is_first else f"{file.folder}.{fqn}"
            if value is not None and name in trees:
                self._builder.leave_out(name, "another model chunk of the rank has a value of this name")
            elif is_first or value is not None:
                trees[name] = file.saved.plain(value, name)


def _refuse_other_expert_split(name: str, file: RankFile, num_parts: int) -> None:
    size = file.settings.get("expert_tensor_parallel_size")
    if _OF_EXPERTS.search(name) and size is not None and size != num_parts:
        what = f"its experts are split over {size!r:.20} ranks, and the rest of the model over {num_parts}"
        raise not_readable(file.saved.path, what, _ADVICE)


def _refuse_old_attention(name: str, file: RankFile) -> None:
    version = file.value.get("checkpoint_version", 0)
    is_old = not isinstance(version, int | float) or not version >= _FIRST_VERSION_OF_ORDER
    if is_old and "attention." in name:
        what = f"it is of checkpoint version {version!r:.20}, which orders the rows of {name!r:.200} in another way"
        raise not_readable(file.saved.path, what, "load it with Megatron, which reorders them, and save it again")


def _model_chunks_of(file: RankFile) -> list[str]:
    """Returns the keys of a stage's model chunks (virtual stages), in order: `model`, or `model0`, `model1`, ...
    Raises CheckpointCorruptError (bad_manifest) if there is none.
    """
    matches = [match for match in map(MODEL_KEY.match, map(str, file.value)) if match]
    keys = [match[0] for match in sorted(matches, key=lambda match: int(match[1] or 0))]
    if not keys:
        raise damaged(file.saved.path, "it has no model")
    return keys


def _values_of(file: RankFile, key: str) -> dict[str, Any]:
    """Returns tensors and other values of a model chunk by name, also from the nested dicts that models once were."""
    model, path = file.value[key], file.saved.path
    if not isinstance(model, dict):
        raise damaged(path, f"its model is a {type(model).__name__}, and no dict")
    return leaves_of(model, "", path=path, items_of=_items_of)


def _items_of(name: str, value: Any) -> Iterable[tuple[Any, Any]] | None:
    return value.items() if isinstance(value, dict) and not is_extra_state(name) else None


def _numbers(pattern: re.Pattern[str], names: Iterable[str], kind: str) -> dict[str, set[int]]:
    """Returns the numbers of layers or experts in names that match. The keys are what `Match.expand` makes of the
    template `kind`, such as the name without its number.
    """
    by_kind: dict[str, set[int]] = {}
    for match in filter(None, map(pattern.match, names)):
        by_kind.setdefault(match.expand(kind), set()).add(int(match[2]))
    return by_kind


def num_local_experts(names: Iterable[str], file: RankFile, num_ranks: int) -> int:
    """Returns the number of experts that each expert-parallel rank has; 0 if the names are of none.

    Raises CheckpointCorruptError (bad_manifest) if modules have different numbers of experts, or all `num_ranks` ranks
    together another number than the arguments say.
    """
    by_module = _numbers(_EXPERT, names, r"\1*\3")
    num_experts = max(map(len, by_module.values()), default=0)
    for name, numbers in by_module.items():
        if max(numbers) != num_experts - 1 or len(numbers) != num_experts:
            what = f"{len(numbers)} experts, the highest {max(numbers)}, and others have {num_experts}"
            raise damaged(file.saved.path, f"its {name!r:.200} are of {what}")
    total = file.settings.get("num_experts")
    if by_module and type(total) is int and total != num_experts * num_ranks:
        what = f"{num_ranks} ranks with {num_experts} experts each, and its arguments say num_experts={total}"
        raise damaged(file.saved.path, f"there are {what}")
    return num_experts


def refuse_other_counts(num_layers: Mapping[str, int], file: RankFile) -> None:
    """Raises CheckpointCorruptError (bad_manifest) if there are not as many layers as the arguments say."""
    for prefix, count in num_layers.items():
        match = _MAIN_LAYERS.match(prefix)
        if match is None:
            continue
        name = f"{'decoder' if match[1] == 'decoder' else 'encoder'}_num_layers"
        if type(file.settings.get(name)) is not int:
            name = "num_layers"
        said = file.settings.get(name)
        if type(said) is int and said != count:
            raise damaged(file.saved.path, f"its arguments say {name}={said}, and of {prefix!r:.200} there are {count}")


def _is_gated(name: str, view: StoredView, stage: _Stage) -> bool | None:
    """Returns True if this first layer of an MLP has twice as many rows as the second has columns, False if it has as
    many, and None if neither holds or is known.
    """
    second = re.sub(r"dense_h_to_4h\.(weight|bias)", "dense_4h_to_h.weight", name)
    second = re.sub(r"linear_fc1\.(weight|bias)", "linear_fc2.weight", second)
    _, other = stage[second][0] if second in stage else (None, None)
    if second == name or not isinstance(other, StoredView) or len(other.shape) != 2:
        return None
    width = other.shape[1]
    return {width: False, 2 * width: True}.get(view.shape[0]) if view.shape else None


def _whole_of(fqn: str, parts: Sequence[StoredCopy], *, is_gated: bool | None) -> tuple[tuple[int, ...], list[Chunk]]:
    """Returns the shape and the chunks of a tensor, given the parts of all ranks in the order of ranks. `is_gated` says
    that the first linear layer of an MLP is two layers stacked: each rank has its part of the one, followed by its part
    of the other. None if that is not known.

    Raises CheckpointCorruptError (bad_manifest, unsupported_version).
    """
    saved, view = parts[0]
    if len(parts) == 1:
        return view.shape, saved.chunks(view, fqn)
    rule = _rule_of(fqn)
    if rule is None or (rule == _GATED and is_gated is None):
        what = f"{fqn!r:.200} is of no kind whose parts this release knows how to put together"
        raise not_readable(saved.path, what, _ADVICE)
    if rule == _GATED and not is_gated:
        rule = _ROWS
    _refuse_odd_parts(fqn, parts, rule)
    if rule == _SAME:
        return view.shape, saved.chunks(view, fqn)
    if rule == _GATED:
        parts = [_half(part, index) for index in (0, 1) for part in parts]
    return _joined(fqn, parts, 1 if rule == _COLUMNS else 0)


def _rule_of(fqn: str) -> str | None:
    return next((rule for rule, pattern in _PATTERNS if pattern.search(fqn)), None)


def _refuse_odd_parts(fqn: str, parts: Sequence[StoredCopy], rule: str) -> None:
    """Raises CheckpointCorruptError unless all parts have one dtype and one shape to which the rule applies."""
    first, first_view = parts[0]
    for saved, view in parts:
        if (view.dtype, view.shape) != (first_view.dtype, first_view.shape):
            here, there = (f"{each.dtype}{list(each.shape)}" for each in (view, first_view))
            raise damaged(saved.path, f"its part of {fqn!r:.200} is {here}, and {there} in {first.path}")
    shape = first_view.shape
    if len(shape) < (2 if rule == _COLUMNS else 1) or (rule == _GATED and shape[0] % 2):
        raise damaged(first.path, f"its part of {fqn!r:.200} has the shape {list(shape)}")


def _half(part: StoredCopy, index: int) -> StoredCopy:
    saved, view = part
    num_rows = view.shape[0] // 2
    start = view.item_offset + index * num_rows * view.strides[0]
    return saved, replace(view, item_offset=start, shape=(num_rows, *view.shape[1:]))


def _joined(fqn: str, parts: Sequence[StoredCopy], dim: int) -> tuple[tuple[int, ...], list[Chunk]]:
    """Returns shape and chunks of the tensor of which these parts follow one another along a dimension."""
    chunks: list[Chunk] = []
    lengths = list(parts[0][1].shape)
    at = 0
    for saved, view in parts:
        chunks += moved(saved.chunks(view, fqn), [at if index == dim else 0 for index in range(len(lengths))])
        at += view.shape[dim]
    lengths[dim] = at
    return tuple(lengths), chunks
