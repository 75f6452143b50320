"""Experts of Mixture-of-Experts models: the files of Hugging Face hold one tensor for each matrix of each expert,
transformers 5 holds two stacks for each layer, of all its experts: gate and up, and down. This module knows names and
shapes only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from bytecheckpoint.dtypes import MXFP4, MXFP4_NUMEL, MXFP4_SUFFIXES, SCALE_SUFFIXES, weight_block
from bytecheckpoint.manifest import Manifest, tensor_record
from bytecheckpoint.name_maps.operations import in_stack
from bytecheckpoint.name_maps.rewrite_manifest import relink
from bytecheckpoint.planner.copy_plan import CopySource, WantedTensor, same_part
from bytecheckpoint.region import Region, intersect, relative, rows, whole

FUSED = "fused"
"""The choice of the names that transformers 5 has in memory; some files have them as well."""
_MLP = "mlp"


class ExpertNames(NamedTuple):
    """Names of the matrices of one expert in files."""

    gate: str
    up: str
    down: str
    block: str
    """Name in files of the module that is `mlp` in memory."""


EXPERT_NAMES: Mapping[str, ExpertNames] = {
    "qwen2_moe": ExpertNames("gate_proj", "up_proj", "down_proj", _MLP),
    "mixtral": ExpertNames("w1", "w3", "w2", "block_sparse_moe"),
}
"""`model_type` of the first family that used the names -> the names."""
_MIXTRAL_TYPES = {"mixtral", "minimax", "minimax_m2", "kimi_linear", "lfm2_moe", "phimoe"}
_FUSED_TYPES = {"gpt_oss", "llama4", "llama4_text", "qwen3_5_moe", "granitemoe", "granitemoeshared", "granitemoehybrid"}
TRANSPOSED_TYPES = {"qwen3_vl_moe", "qwen3_vl_moe_text"}
"""Families whose files hold matrices of experts transposed."""
_MATRICES = {name for names in EXPERT_NAMES.values() for name in names[:3]}
_EXPERT = re.compile(
    r"(?P<layer>(?:.+\.)?)experts\.(?P<number>0|[1-9][0-9]{0,5})\.(?P<matrix>\w+)\.weight"
    rf"(?P<suffix>|{'|'.join(SCALE_SUFFIXES)})"
)

_Described = Mapping[str, tuple[str, tuple[int, ...]]]
_Numbered = Mapping[str, Mapping[int, str]]
"""Names of stored tensors by matrix and number of the expert."""


def expert_names_of(model_type: str) -> str:
    """Returns the key in EXPERT_NAMES, or FUSED, for models with this `model_type` in their `config.json`; `qwen2_moe`
    for a type that is not known.
    """
    if model_type in _FUSED_TYPES:
        return FUSED
    return "mixtral" if model_type in _MIXTRAL_TYPES else "qwen2_moe"


def has_experts_to_fuse(manifest: Manifest) -> bool:
    """Returns True if a tensor has the name of a matrix of one expert, or of packed numbers of all. Cheap, unlike
    `with_fused_experts`.
    """
    return any(
        name.endswith(MXFP4_SUFFIXES) or _EXPERT.fullmatch(name) for name in manifest.tensors if "expert" in name
    )


def packed_weights(described: _Described) -> dict[str, tuple[int, ...]]:
    """Returns the shapes in memory of weights that files hold in MXFP4 alone, by name. The numbers have four dimensions
    in files: matrices, columns, blocks of a column, bytes of a block. The scales have the first three.
    """
    found: dict[str, tuple[int, ...]] = {}
    of_scales, of_numbers = MXFP4_SUFFIXES
    for name, (dtype, shape) in described.items():
        weight = name.removesuffix(of_numbers)
        is_packed = dtype == "uint8" and len(shape) == 4 and 2 * shape[3] == MXFP4_NUMEL
        if weight != name and is_packed and described.get(weight + of_scales) == (dtype, shape[:3]):
            found[weight] = (shape[0], shape[2] * MXFP4_NUMEL, shape[1])
    return {weight: shape for weight, shape in found.items() if weight not in described}


def with_packed_weights(manifest: Manifest) -> Manifest:
    """Returns the same checkpoint with each weight that files hold in MXFP4 as a tensor too, without chunks; the
    manifest itself if there is no such weight.
    """
    described = manifest.describe_all()
    packed = packed_weights({**described, **{alias: described[fqn] for alias, fqn in manifest.aliases.items()}})
    records = {name: tensor_record("uint8", shape, ()) for name, shape in packed.items()}
    notes = manifest.map_notes._replace(packed={name: (MXFP4, shape) for name, shape in packed.items()})
    return replace(manifest, tensors={**manifest.tensors, **records}, map_notes=notes) if packed else manifest


def with_fused_experts(manifest: Manifest) -> Manifest | None:
    """Returns the same checkpoint with stacks of all experts of a layer, as in transformers 5, in the same files. If
    files hold weights in MXFP4, returns what `with_packed_weights` does, and stacks nothing.

    Experts that cannot be stacked stay single. Returns None if none can be, or if two tensors would get one name.
    Raises the errors of `relink`.
    """
    packed = with_packed_weights(manifest)
    if packed is not manifest:
        return packed
    weights = [name for name in manifest.tensors if ".weight" in name and "experts." in name]
    described = dict(zip(weights, manifest.describe_each(weights), strict=True))
    aliased = set(manifest.aliases.values())
    block = weight_block(manifest.metadata)
    fused = [layer for layer in _layers(described, block) if aliased.isdisjoint(layer.sources)]
    if not fused:
        return None
    replaced = {name for layer in fused for name in layer.sources}
    prefixes = {layer.files_prefix: layer.memory_prefix for layer in fused if layer.files_prefix != layer.memory_prefix}
    rename = partial(_renamed, renamed=prefixes, block=EXPERT_NAMES["mixtral"].block)
    wanted = [stack for layer in fused for stack in layer.wanted]
    tensors = {rename(name): manifest.tensors[name] for name in manifest.tensors if name not in replaced}
    aliases = {rename(alias): rename(fqn) for alias, fqn in manifest.aliases.items()}
    num_names = len(manifest.tensors) - len(replaced) + len(wanted) + len(aliases)
    if len({*tensors, *aliases, *(stack.fqn for stack in wanted)}) < num_names:
        return None
    tensors |= relink(manifest, wanted).records
    return replace(manifest, tensors=tensors, aliases=aliases)


class _Layer(NamedTuple):
    """The experts of one layer, fused."""

    files_prefix: str
    """Prefix of its names in files."""
    memory_prefix: str
    """Prefix of its names in memory."""
    wanted: list[WantedTensor]
    """Its stacks, a tensor each."""
    sources: list[str]
    """FQNs of the stored tensors that the stacks are made of."""


def _layers(described: _Described, block: tuple[int, ...]) -> Iterator[_Layer]:
    """Yields the layers whose experts are numbered without gaps and are alike, and so are their scales, if any."""
    found: dict[str, dict[str, dict[str, dict[int, str]]]] = {}
    for name in described:
        match = _EXPERT.fullmatch(name)
        if match and match["matrix"] in _MATRICES:
            of_layer = found.setdefault(match["layer"], {}).setdefault(match["suffix"], {})
            of_layer.setdefault(match["matrix"], {})[int(match["number"])] = name
    for prefix, by_suffix in found.items():
        weights = by_suffix.get("", {})
        names = next((names for names in EXPERT_NAMES.values() if set(weights) <= set(names)), None)
        stacks = names and {suffix: _stacks(names, each, described) for suffix, each in by_suffix.items()}
        if names is None or not stacks or not all(stacks.values()):
            continue
        if any(suffix and not _fit(each, weights, described, names, block) for suffix, each in by_suffix.items()):
            continue
        memory_prefix = _with_block(prefix, names.block, _MLP)
        wanted = [
            _stack(f"{memory_prefix}experts.{name}{suffix}", parts, described)
            for suffix, of_suffix in stacks.items()
            for name, parts in (of_suffix or {}).items()
        ]
        sources = [name for each in by_suffix.values() for numbered in each.values() for name in numbered.values()]
        yield _Layer(prefix, memory_prefix, wanted, sources)


def _fit(
    scales: _Numbered, weights: _Numbered, described: _Described, names: ExpertNames, block: tuple[int, ...]
) -> bool:
    """Returns True if each weight has scales, and blocks of rows of gate and up stay blocks in the stack: each scale is
    for a whole block, of as many rows as `block` says or else of a power of two.
    """
    if scales.keys() != weights.keys() or any(scales[matrix].keys() != weights[matrix].keys() for matrix in weights):
        return False
    joined = [matrix for matrix in weights if matrix != names.down]
    num_rows = {(described[weights[each][0]][1][0], described[scales[each][0]][1][0]) for each in joined}

    is_needed = any(length.bit_count() > 1 for length in block)  # else the shapes tell as much

    def are_whole(rows: int, of_scales: int) -> bool:
        if not of_scales:
            return not rows
        length = block[0] if is_needed and of_scales == -(-rows // block[0]) else rows // of_scales
        return rows == length * of_scales and (length in block[:1] or length.bit_count() == 1)

    return all(are_whole(*each) for each in num_rows)


def _stacks(names: ExpertNames, matrices: _Numbered, described: _Described) -> dict[str, list[list[str]]] | None:
    """Returns, by the name of each stack in memory, for each expert the names of the stored tensors that its part of
    the stack consists of, in order. Returns None if the matrices cannot be stacked.
    """
    if names.up not in matrices or names.down not in matrices:
        return None
    numbers = range(len(matrices[names.up]))
    if any(sorted(each) != list(numbers) for each in matrices.values()):
        return None
    ups, downs = matrices[names.up], matrices[names.down]
    inner = [matrices[names.gate], ups] if names.gate in matrices else [ups]
    kinds = {described[each[number]] for each in inner for number in numbers}
    down_kinds = {described[downs[number]] for number in numbers}
    if len(kinds) != 1 or len(down_kinds) != 1:
        return None
    (dtype, shape), (down_dtype, down_shape) = kinds.pop(), down_kinds.pop()
    is_transposed = down_shape == shape[::-1] or 1 in shape  # scales of rows have one column
    if dtype != down_dtype or len(shape) != 2 or len(down_shape) != 2 or not is_transposed:
        return None
    name = "gate_up_proj" if len(inner) > 1 else "up_proj"
    return {name: [[each[number] for each in inner] for number in numbers], "down_proj": [[downs[n]] for n in numbers]}


def _stack(fqn: str, experts: Sequence[Sequence[str]], described: _Described) -> WantedTensor:
    """Returns one tensor, with the experts along dimension 0 and the tensors of an expert along dimension 1."""
    dtype, (num_rows, num_columns) = described[experts[0][0]]
    shape = (num_rows * len(experts[0]), num_columns)
    pieces = [
        CopySource(
            in_stack(rows(whole(shape), 0, part * num_rows, num_rows), number), name, whole((num_rows, num_columns))
        )
        for number, parts in enumerate(experts)
        for part, name in enumerate(parts)
    ]
    return WantedTensor(fqn, dtype, (len(experts), *shape), pieces)


def _renamed(name: str, renamed: Mapping[str, str], block: str) -> str:
    """Returns the name of a tensor. If the tensor is in the module `block`, as a router is beside the experts, and
    `renamed` has the prefix of that module, the name gets the new prefix.
    """
    at = f".{name}".find(f".{block}.")
    prefix = name[: at + len(block) + 1] if at >= 0 else ""
    return renamed[prefix] + name[len(prefix) :] if prefix in renamed else name


def _with_block(prefix: str, old: str, new: str) -> str:
    """Returns the prefix of a layer with another name for the module that holds the experts."""
    return f"{prefix[: -len(old) - 1]}{new}." if f".{prefix}".endswith(f".{old}.") else prefix


def with_separate_experts(tensors: Sequence[WantedTensor], names: ExpertNames) -> list[WantedTensor]:
    """Returns the tensors of a target with one tensor for each matrix of each expert, named as in files.

    A tensor that is not a stack of experts in the layout of transformers 5 (number of experts, rows, columns; gate
    before up; no bias beside them) stays as it is. Tensors beside a stack, such as a router, are named as in files too.
    All stay as they are if two tensors would get one name.
    """
    by_name = {tensor.fqn: tensor for tensor in tensors}
    stack_names: dict[str, set[str]] = {}
    for fqn in by_name:
        prefix, is_expert, name = fqn.rpartition("experts.")
        if is_expert and "." not in name:
            stack_names.setdefault(prefix, set()).add(name)
    separate: dict[str, list[WantedTensor]] = {}
    renamed: dict[str, str] = {}
    for prefix, stacks in stack_names.items():
        parts = _separate(prefix, stacks, by_name, names)
        if parts is not None:
            separate |= parts
            renamed[prefix] = _with_block(prefix, _MLP, names.block)
    found = [each for tensor in tensors for each in separate.get(tensor.fqn, [tensor])]
    named = [tensor._replace(fqn=_renamed(tensor.fqn, renamed, _MLP)) for tensor in found]
    return named if len({tensor.fqn for tensor in named}) == len(named) else list(tensors)


def _separate(
    prefix: str, stacks: set[str], by_name: Mapping[str, WantedTensor], names: ExpertNames
) -> dict[str, list[WantedTensor]] | None:
    """Returns the tensors of single experts, by the FQN of the stack; None if a stack of the layer cannot be split."""
    is_gated = stacks == {"gate_up_proj", "down_proj"}
    if not is_gated and stacks != {"up_proj", "down_proj"}:
        return None
    inner = by_name[f"{prefix}experts.{'gate_up_proj' if is_gated else 'up_proj'}"]
    down = by_name[f"{prefix}experts.down_proj"]
    num_parts = 2 if is_gated else 1
    if len(down.shape) != 3 or inner.shape != (down.shape[0], num_parts * down.shape[2], down.shape[1]):
        return None
    matrices = [names.gate, names.up] if is_gated else [names.up]
    cuts = [(inner, _cut(prefix, inner, matrices)), (down, _cut(prefix, down, [names.down]))]
    return {tensor.fqn: cut for tensor, cut in cuts if cut} if all(cut for _, cut in cuts) else None


def _cut(prefix: str, tensor: WantedTensor, matrices: Sequence[str]) -> list[WantedTensor]:
    """Returns the matrices of all experts of one stack; [] if its pieces cannot be cut like that."""
    num_experts, num_rows, num_columns = tensor.shape
    shape = (num_rows // len(matrices), num_columns)
    cut: list[WantedTensor] = []
    for number in range(num_experts):
        for position, matrix in enumerate(matrices):
            region = Region((number, position * shape[0], 0), (1, *shape))
            pieces = [_part(piece, region) for piece in tensor.pieces if intersect(piece.region, region)]
            if None in pieces:
                return []
            fqn = f"{prefix}experts.{number}.{matrix}.weight"
            cut.append(WantedTensor(fqn, tensor.dtype, shape, [piece for piece in pieces if piece is not None]))
    return cut


def _part(piece: CopySource, region: Region) -> CopySource | None:
    """Returns the part of a piece that lies in one matrix of one expert, in the coordinates of the matrix. None
    if there is none, or the piece cannot be cut because it is stored in another shape.
    """
    common = intersect(piece.region, region)
    source = common and same_part(common, piece)
    if common is None or source is None:
        return None
    inside = relative(common, region)
    target = Region(inside.offsets[1:], inside.lengths[1:])
    return CopySource(target, piece.fqn, target if piece.fqn is None else source)
