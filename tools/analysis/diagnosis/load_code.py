"""Writes the lines of Python that load the parts of a checkpoint, with the names that it has there."""

from __future__ import annotations

import glob
import keyword
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bytecheckpoint.errors import and_more

from .entries import Kind, Part

_MAX_LINE = 100
_NUM_READ = 3
_READ_FIRST = ("global_step", "step", "iteration", "epoch")
_VARIABLES: Mapping[Kind, str] = {
    "model": "model",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "grad scaler": "scaler",
    "data": "loader",
}
_TAKEN = frozenset({"bcp", "torch", "storage_options", "values"})
"""Names that the lines use themselves."""
_ONLY_READ: frozenset[Kind] = frozenset({"tensors", "values", "values of ranks"})


class LoadCode(NamedTuple):
    """Lines of Python, or of a command's options, that can be used as they stand once the names in `needs` exist."""

    does: str
    """What they do, such as `load the model alone`."""
    needs: Sequence[str]
    """Names that must have a value: live objects, for data `dp_rank` and `dp_size`, and `storage_options` where they
    were given; or only `options`, for a line of a command's options."""
    lines: Sequence[str]
    imports: Sequence[str] = ("import bytecheckpoint as bcp",)


class LoadCall(NamedTuple):
    """The path of all calls, and the arguments that each of them takes beside its own."""

    path: str
    arguments: Sequence[str]
    needs: Sequence[str]
    """Names in these arguments that must have a value."""

    def lines(self, start: str, *arguments: str, end: str = ")") -> list[str]:
        """Returns a call that begins with `start`, in one line or with a line for each argument."""
        texts = [quoted(self.path), *arguments, *self.arguments]
        line = f"{start}({', '.join(texts)}{end}"
        return [line] if len(line) <= _MAX_LINE else [f"{start}(", *(f"    {text}," for text in texts), end]


class _StateEntry(NamedTuple):
    """A part as an entry of the state of a load."""

    part: Part
    keys: Sequence[str]
    """Keys that lead to it in the state."""
    value: str
    """Expression of the live object."""
    needs: Sequence[str]


def load_codes(parts: Sequence[Part], call: LoadCall) -> list[LoadCode]:
    """Returns the code for all that goes into live objects, for each model alone, and for what is only read."""
    items = _items([part for part in parts if part.into and part.kind not in _ONLY_READ])
    together = [item for item in items if not item.part.is_copy]
    models = [item for item in items if item.part.kind == "model"]
    is_all = all(part.into for part in parts if part.kind == "optimizer")
    does = "go on with the training" if is_all else "load all that loads"
    codes = [_load(does, together, call)] if models and len(together) > 1 else []
    codes += [_load(_purpose(item) if len(items) > 1 else "load it", [item], call) for item in models]
    if together and not models:
        codes.append(_without_a_model(together, call))
    codes += [_load_attribute(item.part, call) for item in models if item.part.attribute]
    codes += [_load_inner_model(item.part, call) for item in together if item.part.model_inside]
    codes += [*_set_generators(parts, call), *_read_values(parts, call), *_read_trees(parts, call)]
    codes += _read_values_of_ranks(parts, call)
    return [code._replace(needs=[*code.needs, *call.needs]) for code in codes]


def _purpose(item: _StateEntry) -> str:
    name = item.part.name
    return "load the model alone" if name in {"", "model"} else f"load {name!r} alone"


def _items(parts: Sequence[Part]) -> list[_StateEntry]:
    """Returns the parts under their keys in a state, each with a live object of a name of its own; a copy of a model
    shares the name of the model.
    """
    num_of_kind = Counter(part.kind for part in parts if not part.is_copy)
    num_in_list = Counter(_list_of(part.name) for part in parts)
    items: list[_StateEntry] = []
    needed: set[str] = set()
    for part in parts:
        usual = _VARIABLES.get(part.kind)
        is_usual = usual and (num_of_kind[part.kind] == 1 or part.is_copy or not part.name)
        variable = usual if usual and is_usual else _identifier(part.name, usual or "value")
        while not part.is_copy and variable in needed:
            variable += "_2"
        name = part.name or variable
        # Names of a module's tensors have its number even in a list of one; names of other objects do not.
        stem = "" if part.kind == "model" else _list_of(name)
        keys = [name] if not stem else [stem, name.removeprefix(f"{stem}.")][: num_in_list[stem]]
        match part.kind:
            case "random numbers":
                items.append(_StateEntry(part, keys, "bcp.RngState()", []))
            case "data":
                value = f"bcp.DataLoaderState({variable}, rank=dp_rank, size=dp_size)"
                items.append(_StateEntry(part, keys, value, [variable, "dp_rank", "dp_size"]))
            case _:
                items.append(_StateEntry(part, keys, variable, [variable]))
        needed.update(items[-1].needs)
    return items


def _list_of(name: str) -> str:
    """Returns the name of the list that an entry is an item of; "" for none."""
    stem, _, number = name.rpartition(".")
    return stem if number.isdecimal() else ""


def _identifier(name: str, prefix: str) -> str:
    """Returns the name as a name of Python; with the prefix if it is none by itself, or is taken."""
    found = re.sub(r"\W+", "_", unicodedata.normalize("NFKC", name)).strip("_")  # Python takes names in this form
    if not f"_{found}".isidentifier():
        found = re.sub(r"\W+", "_", found, flags=re.ASCII).strip("_")
    is_free = found.isidentifier() and not keyword.iskeyword(found) and found not in _TAKEN
    return found if is_free else f"{prefix}_{found}"


def _load(does: str, items: Sequence[_StateEntry], call: LoadCall, *more: str) -> LoadCode:
    rules = [rule for item in items if (rule := _rule(item.part))]
    arguments = [f"key_map=[{', '.join(rules)}]"] if rules else []
    # One says it for all: parts of one checkpoint have the same glob, or none.
    arguments += [f"exclude={quoted(item.part.excluded)}" for item in items if item.part.excluded][:1]
    arguments += ["cast=True"] if any(item.part.needs_cast for item in items) else []
    needs = [name for item in items for name in item.needs]
    entries = _entries(items)
    state = f"{{{', '.join(entries)}}}"
    if len(entries) == 1:
        return LoadCode(does, needs, call.lines("bcp.load", state, *arguments, *more))
    lines = [f"state = {state}"]
    if len(lines[0]) > _MAX_LINE:
        lines = ["state = {", *(f"    {entry}," for entry in entries), "}"]
    return LoadCode(does, needs, [*lines, *call.lines("bcp.load", "state", *arguments, *more)])


def _entries(items: Sequence[_StateEntry]) -> list[str]:
    """Returns the entries of a state, items of one list in a dict."""
    entries: dict[str, str] = {}
    list_items: dict[str, list[str]] = {}
    for item in items:
        first, *inner_keys = item.keys
        if inner_keys:
            list_items.setdefault(first, []).append(f"{quoted(inner_keys[0])}: {item.value}")
        entries[first] = f"{{{', '.join(list_items[first])}}}" if inner_keys else item.value
    return [f"{quoted(key)}: {value}" for key, value in entries.items()]


def quoted(text: str) -> str:
    """Returns a text as a literal in the quotes that formatters choose: double ones, unless they need more escapes."""
    if text.count('"') > text.count("'"):
        return repr(text)
    # With a single quote and no double ones, repr takes double quotes.
    return '"' + r"\"".join(repr(f"'{part}")[2:-1] for part in text.split('"')) + '"'


def _rule(part: Part) -> str:
    """Returns the rule of key_map that gives the tensors of a model the names of its module; "" if they have them."""
    new = f"{part.name or 'model'}."
    if part.top_names:
        return _renaming(f"^{re.escape(part.wrapper)}(?={'|'.join(part.top_names)})", new)
    prefix = f"{part.name}." if part.name else ""
    return _renaming(f"^{re.escape(prefix + part.wrapper)}", new) if part.wrapper else ""


def _renaming(pattern: str, new: str) -> str:
    """Returns a rule of key_map as code. Hazard: pattern and new name may hold any character."""
    is_raw = pattern.isprintable() and '"' not in pattern and not pattern.endswith("\\")
    old = f'r"{pattern}"' if is_raw else quoted(pattern)
    new = new.replace("\\", r"\\")
    return f"({old}, {quoted(new)})"


def _without_a_model(items: Sequence[_StateEntry], call: LoadCall) -> LoadCode:
    """Returns the code for a checkpoint without a model. An optimizer needs one, for the names of its parameters."""
    optimizers = [item.part for item in items if item.part.kind == "optimizer"]
    if not optimizers:
        return _load("load it", items, call)
    model = _StateEntry(Part(name="", kind="model", holds="", into="a module"), ["model"], "model", ["model"])
    rule = [] if optimizers[0].name else ['key_map=[("^", "optimizer.")]']
    return _load("load it, beside the model that it belongs to", [model, *items], call, *rule, "strict=False")


def _load_attribute(part: Part, call: LoadCall) -> LoadCode:
    rule = _renaming(f"^{re.escape(f'{part.name}.{part.attribute}.')}", "model.")
    lines = call.lines("bcp.load", '{"model": model}', f"key_map=[{rule}]")
    return LoadCode(f"load the module that it has as {part.attribute!r} alone", ["model"], lines)


def _load_inner_model(part: Part, call: LoadCall) -> LoadCode:
    state = f"{{{quoted(part.name)}: {{{quoted(part.model_inside or '')}: model}}}}"
    lines = call.lines("bcp.load", state, "strict=False")
    return LoadCode(f"load the model in {part.name!r} alone", ["model"], lines)


def _read_values(parts: Sequence[Part], call: LoadCall) -> list[LoadCode]:
    names = [part.name for part in parts if part.kind == "values" and "." not in part.name]
    names.sort(key=lambda name: _READ_FIRST.index(name) if name in _READ_FIRST else len(_READ_FIRST))
    variables: dict[str, str] = {}
    for name in names[:_NUM_READ]:
        variable = _identifier(name, "value")
        while variable in variables:
            variable += "_2"
        variables[variable] = name
    lines = [f"{variable} = values[{quoted(name)}]" for variable, name in variables.items()]
    opened = call.lines("values = bcp.open", end=").objects")
    return [LoadCode("read plain values", [], [*opened, *lines])] if names else []


def _set_generators(parts: Sequence[Part], call: LoadCall) -> list[LoadCode]:
    """Returns the code that sets torch's CPU generator, for each part that is the state of it and nothing else."""
    return [
        LoadCode(
            f"set torch's generator to {part.name!r}",
            [],
            [
                *call.lines("state = bcp.open", end=f")[{quoted(part.name)}]"),
                "torch.set_rng_state(torch.as_tensor(state))",
            ],
            ["import torch", "", "import bytecheckpoint as bcp"],
        )
        for part in parts
        if part.is_generator
    ]


def _read_trees(parts: Sequence[Part], call: LoadCall) -> list[LoadCode]:
    """Returns the code that reads parts which go into no live object; empty if there are none."""
    kinds: set[Kind] = {"random numbers", "tensors", "values of ranks"}
    read = [
        part
        for part in parts
        if part.kind in kinds
        and (part.into is None or part.kind == "tensors")
        and not (part.is_generator or part.is_by_rank)
    ]
    globs = [quoted(glob.escape(part.name) + ("" if list(part.tensors) == [part.name] else ".*")) for part in read]
    include = globs[0] if len(globs) == 1 else f"[{', '.join(globs)}]"
    lines = call.lines("tree = bcp.load_tree", f"include={include}")
    return [LoadCode(f"read {and_more([part.name for part in read], _NUM_READ)}", [], lines)] if read else []


def _read_values_of_ranks(parts: Sequence[Part], call: LoadCall) -> list[LoadCode]:
    codes = []
    for part in parts:
        if part.is_by_rank and part.into is None:
            lines = call.lines("by_rank = bcp.open", end=f").rank_values({quoted(part.name)})")
            codes.append(LoadCode(f"read {part.name} of each rank", [], lines))
    return codes
