"""Divides a checkpoint into parts: its entries, and the models whose tensors stand outside of entries. It reads only
the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from bytecheckpoint.dtypes import QUANTIZED_DTYPES, SCALE_SUFFIXES
from bytecheckpoint.errors import and_more
from bytecheckpoint.info import INTEGRATION, OWN_FORMAT
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import join_fqn
from bytecheckpoint.name_maps.fused_experts import packed_weights

from ..summary import ManifestSummary, TensorEntry
from .entries import (
    EXTRA_STATE,
    MODEL_NAMES,
    RANDOM,
    USUAL_NAMES,
    Kind,
    Part,
    entry_part,
    is_extra_state,
    is_model_state,
    is_scheduler,
    rank_part,
    scheduler_text,
    wrapper_of,
)
from .optimizer_trees import is_optimizer

_NAMED_BY_READER = frozenset({OWN_FORMAT, "deepspeed", "megatron"})
"""Formats in which models may have names; in all others they have none."""
_SCALED = "quantized, with scales: cast=True loads the products into a model in full precision"
_GENERATOR_BYTES = 5056
"""Length of the state of torch's generator on the host."""


def find_parts(manifest: Manifest) -> list[Part]:
    """Returns the parts of a checkpoint, models first, plain values last. Raises the errors of decoding plain data."""
    from bytecheckpoint.adapters.native.subclass_metadata import FACTS, are_facts  # noqa: PLC0415 - it needs torch
    from bytecheckpoint.adapters.plain.plain_data import decode_plain, without_content  # noqa: PLC0415 - it needs torch

    decoded = {fqn: decode_plain(data) for fqn, data in manifest.objects.items() if not is_extra_state(fqn)}
    # Facts of a tensor subclass are of the part that its tensors are in.
    entries = {fqn: tree for fqn, tree in decoded.items() if not (fqn.endswith(f".{FACTS}") and are_facts(tree))}
    trees = {name: tree for fqn, entry in entries.items() for name, tree in _divided(fqn, entry).items()}
    by_rank = manifest.rank_objects
    below: dict[str, list[TensorEntry]] = {fqn: [] for fqn in (*trees, *by_rank)}
    bare: list[TensorEntry] = []
    for tensor in ManifestSummary(manifest).tensors:
        name = without_content(tensor.fqn)
        tree = _tree_of(name, trees if name == tensor.fqn else below)
        (bare if tree is None else below[tree]).append(tensor)
    if is_scheduler(trees) and not bare:
        return [Part(name="", kind="scheduler", holds=scheduler_text(trees), into="the scheduler")]
    found = _bare_parts(bare, manifest, trees)
    found += [_with_tensors(entry_part(fqn, tree, manifest), below[fqn]) for fqn, tree in trees.items()]
    found += [
        _with_tensors(rank_part(fqn, decode_plain(next(iter(data.values())))), below[fqn])
        for fqn, data in by_rank.items()
    ]
    order = get_args(Kind)
    return sorted(found, key=lambda part: order.index(part.kind))


def _divided(fqn: str, tree: Any) -> dict[str, Any]:
    """Returns the items of a dict of optimizers or schedulers, each by its FQN; the tree itself if it is none."""
    is_of_live = isinstance(tree, dict) and tree and all(map(_is_live, tree.values()))
    return {join_fqn(fqn, key): item for key, item in tree.items()} if is_of_live else {fqn: tree}


def _is_live(tree: Any) -> bool:
    return is_optimizer(tree) or (isinstance(tree, dict) and is_scheduler(tree))


def _tree_of(fqn: str, trees: Mapping[str, Any]) -> str | None:
    """Returns the name of the entry of plain data or values of ranks that a tensor belongs to; None if it belongs to
    none.
    """
    name = fqn
    while name and name not in trees:
        name = name.rpartition(".")[0]
    return name if name in trees else None


def _with_tensors(part: Part, tensors: Sequence[TensorEntry]) -> Part:
    dtypes = sorted({tensor.dtype for tensor in tensors})
    are_scaled = part.kind == "model" and _have_scales(tensors)
    return replace(
        part,
        holds=f"weights in {and_more(dtypes, 3)}" if part.kind == "model" else part.holds,
        dtypes=dtypes,
        tensors=[tensor.fqn for tensor in tensors],
        num_tensors=len(tensors),
        num_elements=sum(tensor.num_elements for tensor in tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        needs_cast=part.needs_cast or are_scaled,
        hint=_SCALED if are_scaled else part.hint,
    )


def _have_scales(tensors: Sequence[TensorEntry]) -> bool:
    names = {tensor.fqn for tensor in tensors}
    quantized = (tensor.fqn for tensor in tensors if tensor.dtype in QUANTIZED_DTYPES)
    are_scaled = any(f"{fqn}{suffix}" in names for fqn in quantized for suffix in SCALE_SUFFIXES)
    return are_scaled or bool(packed_weights({tensor.fqn: (tensor.dtype, tensor.shape) for tensor in tensors}))


def _bare_parts(tensors: Sequence[TensorEntry], manifest: Manifest, trees: Mapping[str, Any]) -> list[Part]:
    """Returns the parts that consist of tensors outside of trees: models, with a name or without, then single tensors
    and optimizer state of Megatron.
    """
    containers = _containers(trees, {tensor.fqn for tensor in tensors}) if _is_of_live_objects(manifest) else set[str]()
    groups: dict[str, list[TensorEntry]] = {}
    for tensor in tensors:
        groups.setdefault(_entry_of(tensor.fqn, containers), []).append(tensor)
    of_states = [name for name in groups if all(each.fqn.startswith("optimizer.state.") for each in groups[name])]
    states = [groups.pop(name) for name in of_states]
    has_modules = any(
        tensor.fqn != name or name in USUAL_NAMES for name, members in groups.items() for tensor in members
    )
    top = [tensor for name, members in groups.items() for tensor in members if tensor.fqn == name]
    is_named = (manifest.foreign_format or OWN_FORMAT) in _NAMED_BY_READER and _are_named(groups, trees, manifest)
    # Where an entry of plain data is a model, no tensor at the top is a part of one.
    are_lone = is_named or not has_modules or any(map(is_model_state, trees.values()))
    lone = [tensor for tensor in top if are_lone or _is_generator(tensor)]
    lone_fqns = {tensor.fqn for tensor in lone}
    groups = {
        name: others
        for name, members in groups.items()
        if (others := [tensor for tensor in members if tensor.fqn not in lone_fqns])
    }
    parts = [_lone_part(tensor) for tensor in lone]
    parts += [_with_tensors(_megatron_optimizer(members[0].fqn), members) for members in states]
    if is_named:
        models = [_with_tensors(_model(name, members), members) for name, members in groups.items()]
    else:
        unnamed = [tensor for members in groups.values() for tensor in members]
        models = [_with_tensors(_model("", unnamed), unnamed)] if unnamed else []
        is_mixed = bool(states) or not all(isinstance(tree, dict) for tree in trees.values())
        models = [replace(part, top_names=_top_names(part) if is_mixed else ()) for part in models]
    if _has_extra_state_of_megatron(manifest):
        models = [replace(part, excluded=f"*{EXTRA_STATE}*") for part in models]
    return [*(_with_casts(models) if manifest.foreign_format == "deepspeed" else models), *parts]


def _containers(trees: Mapping[str, Any], tensors: Collection[str]) -> set[str]:
    """Returns the names of dicts and lists of the state that hold modules: those above plain data.

    Plain data below a name such as `model`, or one with a `weight` or `bias` directly below it, is taken to be of a
    module's hooks and adds no name; state of an optimizer or a scheduler always adds the names above it.
    """
    found: set[str] = set()
    for name, tree in trees.items():
        parts = name.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts))]
        if _is_live(tree) or not any(_is_of_model(each, tensors) for each in above):
            found.update(above)
    return found


def _is_of_model(name: str, tensors: Collection[str]) -> bool:
    has_parameter = any(f"{name}.{parameter}" in tensors for parameter in USUAL_NAMES)
    return has_parameter or bool(MODEL_NAMES.match(name.rpartition(".")[2]))


def _entry_of(fqn: str, containers: Collection[str]) -> str:
    """Returns the first name on the way to a tensor that is not a container's, such as that of the tensor's module."""
    end = fqn.find(".")
    while end >= 0 and fqn[:end] in containers:
        end = fqn.find(".", end + 1)
    return fqn if end < 0 else fqn[:end]


def _top_names(part: Part) -> list[str]:
    """Returns the starts of the names of a model's tensors below its wrapper, as regular expressions."""
    starts = (fqn.removeprefix(part.wrapper).partition(".") for fqn in part.tensors)
    return list(dict.fromkeys(re.escape(name) + (r"\." if dot else "$") for name, dot, _ in starts))


def _has_extra_state_of_megatron(manifest: Manifest) -> bool:
    """Returns True if there is extra state that only Megatron's modules have; Megatron's own loads may ignore it."""
    names = [fqn for fqn in manifest.objects if is_extra_state(fqn)]
    return bool(names) if manifest.foreign_format == "megatron" else any("/shard_" in fqn for fqn in names)


def _with_casts(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts, each with `needs_cast`, and with a hint if they are the two copies of one model that ZeRO 1
    and 2 save.
    """
    if {part.name for part in parts} != {"model", "module"}:
        return [replace(part, needs_cast=part.needs_cast or _is_cast(part)) for part in parts]
    hints = {"model": "a module in lower precision takes cast=True", "module": "`model` in the precision of training"}
    return [
        replace(
            part,
            hint=hints[part.name],
            is_copy=part.name == "module",
            needs_cast=_is_cast(part),
        )
        for part in parts
    ]


def _is_cast(part: Part) -> bool:
    # Buffers of integers stand beside the weights.
    return part.name == "model" and sum("float" in dtype for dtype in part.dtypes) > 1


def _is_generator(tensor: TensorEntry) -> bool:
    return tensor.dtype == "uint8" and len(tensor.shape) == 1 and bool(RANDOM.search(tensor.fqn))


def _lone_part(tensor: TensorEntry) -> Part:
    part = Part(name=tensor.fqn, kind="tensors", holds="a tensor", into="a tensor of its shape and dtype")
    if _is_generator(tensor):
        holds, is_on_host = "the state of a generator of torch", tensor.shape == (_GENERATOR_BYTES,)
        part = replace(part, kind="random numbers", holds=holds, into=None, is_generator=is_on_host)
    return _with_tensors(part, [tensor])


def _megatron_optimizer(fqn: str) -> Part:
    return Part(
        name=fqn.partition(".")[0],
        kind="optimizer",
        holds="optimizer state of Megatron",
        into=None,
        hint="it has no groups of parameters that torch would know: load it with Megatron, and save it again",
    )


def _are_named(groups: Mapping[str, Sequence[TensorEntry]], trees: Mapping[str, Any], manifest: Manifest) -> bool:
    """Returns True if these groups are models, not modules of one model. Names of parameters in an optimizer decide;
    without these, words such as `model`, or that there is only one module.
    """
    names = {tensor.fqn for members in groups.values() for tensor in members}
    for tree in trees.values():
        if is_optimizer(tree) and not tree.get("by_position"):
            trained = [name for group in tree["groups"].values() for name in group["params"]]
            if trained and any(f"{group}.{trained[0]}" in names for group in groups):
                return True
            if trained and trained[0] in names:
                # A save names the parameters of each module that is not `model` by FQN. So do the state_dicts of one
                # model that a conversion or an integration has at the top.
                is_module = "." in trained[0] and not trained[0].partition(".")[0].isdecimal()
                return is_module and _is_of_live_objects(manifest)
    if any(MODEL_NAMES.match(name.rpartition(".")[2]) for name in groups):
        return True
    modules = [name for name, members in groups.items() if any(tensor.fqn != name for tensor in members)]
    if any("." in name for name in modules):  # in a dict or a list of the state
        return True
    return len(modules) == 1 and not modules[0].isdecimal() and not groups.keys() & USUAL_NAMES


def _is_of_live_objects(manifest: Manifest) -> bool:
    """Returns True for a save of this library's own calls, neither a conversion's nor an integration's."""
    is_other = manifest.foreign_format or "converted_from" in manifest.provenance
    return not is_other and INTEGRATION not in manifest.metadata


def _model(name: str, tensors: Iterable[TensorEntry]) -> Part:
    names = [tensor.fqn.removeprefix(f"{name}.") if name else tensor.fqn for tensor in tensors]
    return Part(name=name, kind="model", holds="", into="a module", wrapper=wrapper_of(names))
