"""Selects the tensors of a checkpoint that a conversion takes, their names and dtypes. Looks at the manifest alone."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from bytecheckpoint.adapters.checkpoint_view import StoredTensor
from bytecheckpoint.adapters.key_map import Globs, Renamer
from bytecheckpoint.adapters.native.parameter_names import MODEL_FQN
from bytecheckpoint.adapters.native.weight_scales import names_beside
from bytecheckpoint.adapters.optimizers.stored_optimizer import is_optimizer_tree, split_state_path
from bytecheckpoint.adapters.plain.plain_data import decode_plain, is_content_fqn, without_content
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.dtypes import MXFP4, MXFP4_SUFFIXES, itemsize
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.info import LEFT_OUT
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn
from bytecheckpoint.planner.copy_plan import WantedTensor, same_tensor
from bytecheckpoint.region import whole

TargetFormat = Literal["bcp", "hf", "dcp", "torch"]

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that a conversion changes into one another; tensors of other dtypes keep theirs."""
_UNREAD = "in the files of the source"
_MULTIPLIED = "scales: the weights are written multiplied by them"
_PACKED = "packed numbers and their scales: the weights are written, their products"
_MODELS = ("model", "module")
"""Entries that hold a model; if there are both, as in DeepSpeed's folders, the first has full precision."""


@dataclass(frozen=True, kw_only=True)
class SelectionRequest:
    """The tensors that are taken of a checkpoint, and the names, dtypes and nesting that they get: the options of a
    conversion, or with `is_in_memory` of a read by name.
    """

    to: TargetFormat
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    """Globs of checkpoint FQNs."""
    rename: Sequence[tuple[str, str]] = ()
    """Patterns and replacements for re.sub, applied in order to checkpoint FQNs, as the key_map of a load."""
    keep_names: bool = False
    """Keep a prefix that all names have."""
    dtype: str | None = None
    """Target dtype of tensors that have one of FLOAT_DTYPES, and of quantized weights, multiplied by their scales."""
    experts: str = ""
    """Names for the experts of an HF target: a key of EXPERT_NAMES, FUSED, or "" for those that `config.json` asks
    for."""
    flatten_optimizer: bool = False
    """Write optimizers on one level, by the names of their parameters."""
    excluded_names: frozenset[str] = frozenset()
    """Further FQNs that are excluded: see `with_state_of_excluded`."""
    is_in_memory: bool = False
    """The tree is returned and not written: values keep their types, an optimizer is taken as a whole, and a selection
    without tensors is no error."""

    def takes(self, fqn: str) -> bool:
        """Returns True if the tensor is included and not excluded. A tensor that differs from rank to rank is also
        matched by the name of its value.
        """
        is_included = not self.include or any(map(self._included.match, {fqn, without_content(fqn)}))
        return is_included and not self.excludes(fqn)

    def excludes(self, fqn: str) -> bool:
        """Returns True if the tensor is excluded, by one of the names that `takes` knows."""
        return fqn in self.excluded_names or any(map(self._excluded.match, {fqn, without_content(fqn)}))

    @cached_property
    def _included(self) -> Globs:
        return Globs(self.include)

    @cached_property
    def _excluded(self) -> Globs:
        return Globs(self.exclude)

    @property
    def takes_all(self) -> bool:
        return not self.include and not self.exclude


class LeftOut(NamedTuple):
    """A part of the checkpoint that the target does not get."""

    name: str
    """Name of an entry of the state, or of a plain value."""
    num_tensors: int
    num_bytes: int
    """Bytes of the tensors."""
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The tensors that the target gets."""

    wanted: list[WantedTensor]
    names: Mapping[str, str]
    """Checkpoint FQN of each selected tensor, for a tied one each of its selected FQNs -> its FQN in the target."""
    aliases: Mapping[str, str]
    """Further names in the target -> the FQN there under which the tensor is written."""
    left_out: Sequence[LeftOut]
    dropped_prefix: str = ""
    """Prefix of all names of the checkpoint, with the dot."""
    trees: Mapping[str, Any] = field(default_factory=dict)
    """All plain data of the checkpoint, decoded."""


class ModelNames(NamedTuple):
    """The tensors of a mapped checkpoint that are a model's, by the name map, and the prefixes of their names."""

    prefixes: Mapping[str, str]
    """Prefix of the name in the model, `model.` or nothing, by FQN of the model's tensors."""
    kept: frozenset[str]
    """FQNs that the map does not know, and that `keep_unmapped` keeps."""

    def prefix(self, fqns: Sequence[str]) -> str:
        """Returns the prefix of the model to which these tensors belong, or "" if none belongs to one. Of several
        models, takes the one without a prefix, else `model.`, else `module.`, else the first in the alphabet.
        """
        found = {self.prefixes[fqn] for fqn in fqns if fqn in self.prefixes}
        known = ["", *(f"{name}." for name in _MODELS)]
        return next((prefix for prefix in known if prefix in found), min(found, default=""))

    def not_of_model(self, fqns: Sequence[str]) -> dict[str, str]:
        """Returns, for each FQN that is not a tensor of the model, the reason."""
        prefix = self.prefix(fqns)
        others = [fqn for fqn in fqns if self.prefixes.get(fqn) != prefix and fqn not in self.kept]
        return dict.fromkeys(others, "no part of the model, by the name map")


def with_state_of_excluded(manifest: Manifest, request: SelectionRequest) -> SelectionRequest:
    """Returns the request with further `excluded_names`: the optimizer state of each parameter whose tensor is excluded
    under all of its names, which a load leaves out as well.
    """
    if not request.exclude:
        return request
    fqns = [*manifest.tensors, *manifest.aliases]
    kept = {manifest.aliases.get(fqn, fqn) for fqn in fqns if not request.excludes(fqn)}
    excluded = {fqn for fqn in fqns if manifest.aliases.get(fqn, fqn) not in kept}
    all_fqns = set(fqns)
    names: set[str] = set()
    for fqn, tree in optimizers_in({name: decode_plain(data) for name, data in manifest.objects.items()}).items():
        known = {name for group in tree["groups"].values() for name in group["params"]}
        outside = tree.get("outside_model", ())
        of_model = {name for name in known if name not in outside and join_fqn(MODEL_FQN, name) in all_fqns}
        gone = {name for name in known if (join_fqn(MODEL_FQN, name) if name in of_model else name) in excluded}
        prefix = join_fqn(fqn, "state.")
        state = [name for name in fqns if name.startswith(prefix)]
        names |= {name for name in state if split_state_path(name.removeprefix(prefix), known)[0] in gone}
        names |= {leaf for name in gone for leaf in leaves(tree["state"].get(name, {}), f"{prefix}{name}")}
    return replace(request, excluded_names=frozenset(names))


def select(manifest: Manifest, request: SelectionRequest, names_of_map: ModelNames | None) -> Selection:
    """Returns the tensors that the target gets, with their names there, and what it does not get.
    Raises CheckpointMismatchError (conflict) if none of the checkpoint's tensors is left, unless `is_in_memory`; if two
    new names are equal or one is empty; for an HF target without `include` and name map, for several models; and, with
    `is_in_memory`, if `exclude` takes a part of an optimizer's tensors.
    """
    trees = {fqn: decode_plain(data) for fqn, data in manifest.objects.items()}
    all_fqns = [*manifest.tensors, *manifest.aliases]
    selected = [fqn for fqn in all_fqns if request.takes(fqn)]
    if request.is_in_memory and not request.takes_all:
        chosen = {*selected, *_of_whole_optimizers(all_fqns, trees, request)}
        selected = [fqn for fqn in all_fqns if fqn in chosen]
    unread = manifest.metadata.get(LEFT_OUT) if manifest.foreign_format else None
    left_out = [LeftOut(_UNREAD, 0, 0, unread)] if unread else []
    left_out += _totals(manifest, set(all_fqns) - set(selected), lambda _: "not chosen by include and exclude")
    if request.to == "hf" and not request.include:
        why = names_of_map.not_of_model(selected) if names_of_map else _not_of_a_model(manifest, selected, trees)
        left_out += _totals(manifest, why, why.__getitem__)
        selected = [fqn for fqn in selected if fqn not in why]
    if not selected and all_fqns and not request.is_in_memory:
        raise CheckpointMismatchError(
            f"none of the {len(all_fqns)} tensors is left to convert; nothing was written: widen include and exclude",
            kind="conflict",
        )
    beside = _beside(manifest, selected, set(all_fqns)) if request.dtype is not None else {}
    stored_beside = {name for names in beside.values() for name in names}
    multiplied = {fqn for fqn in selected if manifest.aliases.get(fqn, fqn) in stored_beside}
    left_out += _totals(manifest, multiplied, lambda fqn: _PACKED if fqn.endswith(MXFP4_SUFFIXES) else _MULTIPLIED)
    selected = [fqn for fqn in selected if fqn not in multiplied]
    prefix = ""
    if request.to == "hf" and not (request.keep_names or request.rename):
        prefix = names_of_map.prefix(selected) if names_of_map else _common_prefix(manifest, selected, trees)
    rename = Renamer(list(request.rename), "")
    names = {fqn: rename(fqn).removeprefix(prefix) for fqn in selected}
    _refuse_equal(names)
    stored = {fqn: manifest.aliases.get(fqn, fqn) for fqn in selected}
    first = {stored_fqn: fqn for fqn, stored_fqn in reversed(stored.items())}
    return Selection(
        wanted=[
            _wanted(manifest, fqn, names[first[fqn]], request, has_scales=fqn in beside)
            for fqn in manifest.tensors
            if fqn in first
        ],
        names=names,
        aliases={names[fqn]: names[first[name]] for fqn, name in stored.items() if first[name] != fqn},
        left_out=left_out,
        dropped_prefix=prefix,
        trees=trees,
    )


def _of_whole_optimizers(all_fqns: Sequence[str], trees: Mapping[str, Any], request: SelectionRequest) -> list[str]:
    """Returns the FQNs of all tensors of each optimizer of which anything is taken. Raises CheckpointMismatchError
    (conflict) if `exclude` takes a part of them.
    """
    found: list[str] = []
    for fqn, tree in optimizers_in(trees).items():
        of_tree = leaves(tree, fqn)
        refs = {leaf.fqn for leaf in of_tree.values() if isinstance(leaf, TensorRef)}
        prefix = join_fqn(fqn, "state.")
        tensors = [name for name in all_fqns if name in refs or name.startswith(prefix)]
        if not any(map(request.takes, (*tensors, *of_tree))):
            continue
        excluded = list(filter(request.excludes, tensors))
        if excluded:
            raise CheckpointMismatchError(
                f"exclude takes {len(excluded)} of the {len(tensors)} tensors of the optimizer {fqn!r:.200}, as "
                f"{excluded[0]!r:.200}, and not all of it; nothing was read: leave out all that is below its name, or "
                "read single tensors with bcp.open",
                kind="conflict",
            )
        found += tensors
    return found


def _beside(manifest: Manifest, fqns: Sequence[str], all_fqns: Container[str]) -> dict[str, list[str]]:
    """Returns, by the stored FQN of each quantized weight, the stored FQNs of its scales and packed numbers. Other
    tensors are left out.
    """
    stored = list({manifest.aliases.get(fqn, fqn) for fqn in fqns})
    weights = (StoredTensor(fqn, *each) for fqn, each in zip(stored, manifest.describe_each(stored), strict=True))
    found = {weight.fqn: names_beside(weight, "float32", all_fqns) for weight in weights}
    return {fqn: [manifest.aliases.get(name, name) for name in names] for fqn, names in found.items() if names}


def _wanted(
    manifest: Manifest, stored_fqn: str, name: str, request: SelectionRequest, *, has_scales: bool
) -> WantedTensor:
    dtype, shape = manifest.describe(stored_fqn)
    is_converted = request.dtype is not None and (dtype in FLOAT_DTYPES or has_scales)
    return same_tensor(name, request.dtype or dtype if is_converted else dtype, shape, stored_fqn=stored_fqn)


def _refuse_equal(names: Mapping[str, str]) -> None:
    sources: dict[str, str] = {}
    for fqn, name in names.items():
        other = sources.setdefault(name, fqn)
        if other != fqn or (fqn and not name):  # "" may be its own name
            what = (
                f"{fqn!r:.200} and {other!r:.200} would both be {name!r:.200}" if name else f"{fqn!r:.200} has no name"
            )
            raise CheckpointMismatchError(
                f"renamed, {what}; nothing was written: make the new names differ, or leave one out with exclude",
                kind="conflict",
            )


def optimizers_in(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the trees of the optimizers in a checkpoint's `trees`, nested ones included, by FQN."""
    found: dict[str, Any] = {}

    def look(fqn: str, value: Any) -> None:
        if is_optimizer_tree(value):
            found[fqn] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                look(join_fqn(fqn, key), item)

    for fqn, tree in trees.items():
        look(fqn, tree)
    return found


def has_plain_data(tree: Any) -> bool:
    """Returns True if any leaf of a tree is no tensor."""
    if isinstance(tree, dict):
        return any(map(has_plain_data, tree.values()))
    return any(map(has_plain_data, tree)) if type(tree) in (list, tuple) else not isinstance(tree, TensorRef)


def entry_of(fqn: str) -> str:
    """Returns the top-level name of the state that an FQN begins with."""
    return fqn.partition(".")[0]


def _not_of_a_model(manifest: Manifest, fqns: Sequence[str], trees: Mapping[str, Any]) -> dict[str, str]:
    """Returns the reason for each FQN that is no tensor of the model. Raises `conflict` if there are several models."""
    prefixes = tuple(join_fqn(fqn, "state.") for fqn in optimizers_in(trees))
    why = {fqn: "state of an optimizer" for fqn in fqns if fqn.startswith(prefixes)}
    why |= {fqn: "differs from rank to rank" for fqn in fqns if is_content_fqn(fqn)}
    entries = sorted({entry_of(fqn) for fqn in fqns if fqn not in why and "." in fqn})
    model = next((name for name in _MODELS if name in entries and _is_entry(name, manifest, trees)), None)
    if model is None:
        return why
    others = [name for name in entries if name != model and name not in trees]
    if others and not manifest.foreign_format:
        raise CheckpointMismatchError(
            f"besides {model!r} the checkpoint has tensors of {', '.join(map(repr, others[:5]))}, and an HF target is "
            f"one model; nothing was written: choose with --include, as --include '{model}.*'",
            kind="conflict",
        )
    return why | {fqn: f"no part of {model!r}" for fqn in fqns if fqn not in why and not fqn.startswith(f"{model}.")}


def _is_entry(name: str, manifest: Manifest, trees: Mapping[str, Any]) -> bool:
    """Returns True if this name is an entry, so that names that begin with it and a dot are in the entry. In formats of
    others, except DeepSpeed's, only names with plain data are entries: else the dot is part of a name.
    """
    return name in trees or manifest.foreign_format in {"", "deepspeed"}


def _common_prefix(manifest: Manifest, fqns: Sequence[str], trees: Mapping[str, Any]) -> str:
    """Returns the name of the entry that all these FQNs are below, with a dot; "" if there is none."""
    entries = {entry_of(fqn) for fqn in fqns}
    if len(entries) != 1 or not all("." in fqn for fqn in fqns):
        return ""
    (entry,) = entries
    return f"{entry}." if _is_entry(entry, manifest, trees) else ""


def _totals(
    manifest: Manifest, fqns: Sequence[str] | Mapping[str, str] | set[str], why: Callable[[str], str]
) -> list[LeftOut]:
    """Returns what is left out: for each entry and reason, the number and the bytes of the tensors."""
    groups: dict[tuple[str, str], list[str]] = {}
    for fqn in sorted(fqns):
        if manifest.describe(manifest.aliases.get(fqn, fqn))[0] == MXFP4:  # the tensors that it is made of count
            continue
        groups.setdefault((entry_of(fqn), why(fqn)), []).append(fqn)
    return [LeftOut(name, len(each), _num_bytes(manifest, each), reason) for (name, reason), each in groups.items()]


def _num_bytes(manifest: Manifest, fqns: Sequence[str]) -> int:
    described = manifest.describe_each([fqn for fqn in fqns if fqn not in manifest.aliases])
    return sum(whole(shape).numel * itemsize(dtype) for dtype, shape in described)
