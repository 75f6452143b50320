"""Tells what an entry of a checkpoint is, by the keys in the entry, and which live object a load fills from it: a
model, an optimizer, a scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bytecheckpoint.errors import and_more
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef

from ...render.number_format import count_text, shortened
from ..summary import plain_value
from .optimizer_trees import is_optimizer

Kind = Literal[
    "model",
    "optimizer",
    "scheduler",
    "grad scaler",
    "random numbers",
    "data",
    "object",
    "tensors",
    "values of ranks",
    "values",
]

EXTRA_STATE = "_extra_state"
MODEL_NAMES = re.compile(
    r"\A(?:.*_)?(?:model|module|net|network|ema|actor|critic|policy|teacher|student|generator|discriminator|encoder|"
    r"decoder|state_dict)s?(?:_?\d+)?\Z"
)
USUAL_NAMES = frozenset({"weight", "bias"})
"""Names of parameters of a module without modules in it."""
_WRAPPERS = ("module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.")
"""Prefixes of names that wrappers add: DDP and DeepSpeed, torch.compile, Lightning's Fabric, FSDP1."""
RANDOM = re.compile(r"(?:\A|[._])(?:rng|random)(?:[._/]|\Z)", re.IGNORECASE)
_SCHEDULER = re.compile(r"(?:\A|[._])(?:lr_|opt_param_)?sched(?:uler)?s?(?:\.\d+)?\Z", re.IGNORECASE)
_MAX_TEXT = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An entry of a checkpoint, or a model that has no name there."""

    name: str
    """FQN in the checkpoint; "" for all that has no name of its own."""
    kind: Kind
    holds: str
    """Content, in words."""
    into: str | None
    """Live object that a load fills from it; None if there is none."""
    hint: str | None = None
    """Condition of the load, or the reason why there is none."""
    tensors: Sequence[str] = ()
    """FQNs of its tensors, aliases included."""
    dtypes: Sequence[str] = ()
    num_tensors: int = 0
    num_elements: int = 0
    num_bytes: int = 0
    wrapper: str = ""
    """Prefix below the name that a wrapper of the model has added to all of its tensors."""
    top_names: Sequence[str] = ()
    """Starts of the names of its tensors, as regular expressions; only for a model without a name beside which
    optimizer state, or a plain value that is no dict, lies."""
    excluded: str = ""
    """Glob of what a load must leave out."""
    needs_cast: bool = False
    """True for a model whose weights have scales, and for the `model` of DeepSpeed ZeRO whose weights are of several
    precisions: a load has to cast."""
    is_generator: bool = False
    """True for a tensor that is the state of torch's CPU generator."""
    is_by_rank: bool = False
    """True for values that each rank has saved under one name, except generators that a bcp.RngState loads."""
    is_copy: bool = False
    """True for the weights of another part in another precision."""
    attribute: str = ""
    """Name of the module that a LightningModule holds, and that has all of its tensors."""
    model_inside: str | None = None
    """Key of the only model in the state of an object."""


def entry_part(fqn: str, tree: Any, manifest: Manifest) -> Part:
    """Describes an entry by its plain data, `tree`; the manifest tells if it is of a data loader, and the format. The
    part has no tensors, dtypes or sizes yet: `find_parts` adds them.
    """
    from bytecheckpoint.adapters.data.stream_wire import is_loader_state  # noqa: PLC0415 - it needs torch

    part = Part(name=fqn, kind="values", holds=_value_text(tree), into="a value under this name")
    refs = _tensor_fqns(tree)
    if is_loader_state(manifest.objects.get(fqn, b"")):  # an item of an entry has no data of its own
        size = tree.get("size") if isinstance(tree, dict) else None
        of = count_text(size, "data-parallel rank") if type(size) is int else "ranks"
        return replace(part, kind="data", holds=f"a data loader of {of}", into="a bcp.DataLoaderState")
    if is_optimizer(tree):
        return _optimizer(part, tree)
    if RANDOM.search(fqn):
        hint = "read it, and set the generators as the program that saved it does"
        return replace(part, kind="random numbers", holds="states of generators", into=None, hint=hint)
    if not isinstance(tree, dict):
        return replace(part, kind="tensors", holds="a list with tensors", into=None) if refs else part
    if is_model_state(tree) and _has_model_names(fqn, tree):
        return _tree_model(part, [name.removeprefix(f"{fqn}.") for name in refs])
    if {"scale", "growth_factor"} <= tree.keys():
        return replace(part, kind="grad scaler", holds="a loss scale", into="a torch.amp.GradScaler")
    if not refs and (_SCHEDULER.search(fqn) or is_scheduler(tree)):
        return replace(part, kind="scheduler", holds=scheduler_text(tree), into="the scheduler")
    if fqn == "extra_state" and tree and all(re.fullmatch(r"rank_\d+", str(key)) for key in tree):
        return replace(part, kind="values of ranks", holds=count_text(len(tree), "rank"), into=None)
    return _object(part, tree, is_own=not manifest.foreign_format) if refs else part


def _tree_model(part: Part, names: Sequence[str]) -> Part:
    wrapper = wrapper_of(names)
    first = {name.partition(".")[0] for name in names}
    attribute = first.pop() if part.name == "state_dict" and len(first) == 1 and not wrapper else ""
    return replace(part, kind="model", into="a module", wrapper=wrapper, attribute=attribute)


def _optimizer(part: Part, tree: Mapping[str, Any]) -> Part:
    groups = tree["groups"].values()
    num_params = sum(len(group["params"]) for group in groups)
    is_numbered = bool(tree.get("by_position"))
    hint = "parameters have numbers: make the live one with the same param_groups" if is_numbered else None
    holds = f"state of {count_text(num_params, 'parameter')} in {count_text(len(groups), 'group')}"
    return replace(part, kind="optimizer", holds=holds, into="the optimizer of the model", hint=hint)


def _object(part: Part, tree: Mapping[str, Any], *, is_own: bool) -> Part:
    """Returns the part for a dict of several things: the state of one object, or only tensors if it is of another
    format (`is_own` is False) and has neither a model nor an optimizer in it.
    """
    models = [str(key) for key, item in tree.items() if is_model_state(item) and _has_model_names(str(key), item)]
    part = replace(part, holds=f"a state of {and_more([str(key) for key in tree], 4)}")
    if not is_own and not models and not any(map(is_optimizer, tree.values())):
        return replace(part, kind="tensors", into=None)
    sole = models[0] if len(models) == 1 else None
    hint = f"its {sole!r} loads alone as well" if sole else None
    return replace(part, kind="object", into="an object with load_state_dict()", hint=hint, model_inside=sole)


def rank_part(fqn: str, value: Any) -> Part:
    """Describes an entry of which each rank has saved a value of its own; `value` is that of any rank."""
    if isinstance(value, dict) and {"python", "numpy", "torch"} <= value.keys():
        return Part(name=fqn, kind="random numbers", holds="generators of each rank", into="a bcp.RngState")
    return Part(name=fqn, kind="values of ranks", holds=_value_text(value), into=None, is_by_rank=True)


def is_scheduler(value: Mapping[Any, Any]) -> bool:
    return "last_epoch" in value and not value.keys().isdisjoint({"_step_count", "base_lrs", "_schedulers"})


def is_model_state(tree: Any) -> bool:
    """Returns True for a dict that holds only tensors, extra state of modules, and dicts of this same form, with at
    least one tensor in it and in each dict inside.
    """
    if not isinstance(tree, dict):
        return False
    items = [item for key, item in tree.items() if not is_extra_state(str(key))]
    inner = [item for item in items if not isinstance(item, TensorRef)]
    return bool(items) and all(map(is_model_state, inner))


def _has_model_names(key: str, tree: Mapping[Any, Any]) -> bool:
    """Returns True for a dict whose name is that of a model, or whose tensors have names as in a state_dict."""
    names = [str(key) for key, item in tree.items() if isinstance(item, TensorRef)]
    return bool(MODEL_NAMES.match(key)) or any("." in name or name in USUAL_NAMES for name in names)


def _tensor_fqns(value: Any) -> list[str]:
    if isinstance(value, TensorRef):
        return [value.fqn]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [fqn for item in items for fqn in _tensor_fqns(item)]


def scheduler_text(tree: Mapping[str, Any]) -> str:
    last = tree.get("last_epoch")
    return f"last_epoch={last}" if type(last) is int else and_more([str(key) for key in tree], 3)


def _value_text(value: Any) -> str:
    return shortened(plain_value(value)[1], _MAX_TEXT)


def wrapper_of(names: Sequence[str]) -> str:
    """Returns the prefix of wrappers that all of these names have; "" for none."""
    prefix = ""
    while names and (found := next((each for each in _WRAPPERS if names[0].startswith(prefix + each)), "")):
        if not all(name.startswith(prefix + found) for name in names):
            break
        prefix += found
    return prefix


def is_extra_state(fqn: str) -> bool:
    return fqn.rpartition(".")[2].startswith(EXTRA_STATE)
