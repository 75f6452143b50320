"""An optimizer in a checkpoint, found by the names that its parameters have in the state. Knows no live optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

from bytecheckpoint.adapters.checkpoint_view import CheckpointView, StoredTensor, StoredTree
from bytecheckpoint.adapters.expectation import Problem
from bytecheckpoint.adapters.native.parameter_names import MODEL_FQN, ParameterNames
from bytecheckpoint.adapters.native.subclass_flatten import is_facts
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.manifest.plain_wire import join_fqn

BY_POSITION = "by_position"
"""Key of a tree whose parameters are called "0", "1", ... as they follow one another in the groups: torch's own way."""


class StoredGroup(NamedTuple):
    """The hyperparameters that some parameters were saved with."""

    fqn: str
    """FQN of the values, in the checkpoint."""
    values: Mapping[str, Any]


def is_optimizer_tree(tree: Any) -> TypeGuard[Mapping[str, Any]]:
    """Returns True for a dict in the form in which an optimizer is saved, and so for plain data of the same form."""
    if not isinstance(tree, dict) or not {"state", "groups"} <= tree.keys():
        return False
    state, groups = tree["state"], tree["groups"]
    has_form = isinstance(state, dict) and isinstance(groups, dict)
    return has_form and all(
        isinstance(group, dict) and {"params", "values"} <= group.keys() for group in groups.values()
    )


def are_groups(tree: Any) -> bool:
    """Returns True if a tree is surely an optimizer's: data of other objects may have the same keys."""
    groups = tree["groups"] if is_optimizer_tree(tree) else {}
    return bool(groups) and all(group.keys() == {"params", "values"} for group in groups.values())


def split_state_path(path: str, known: Collection[str]) -> tuple[str, str]:
    """Splits `<parameter>.<state key>`; both may have dots, and the longest `known` name is the parameter. Returns
    ("", "") if none is known.
    """
    name, _, key = path.rpartition(".")
    while name and name not in known:
        name, _, head = name.rpartition(".")
        key = f"{head}.{key}"
    return (name, key) if name else ("", "")


class StoredOptimizer:
    """An optimizer in a checkpoint. Parameters are asked for by the names that they have in the state."""

    def __init__(
        self,
        fqn: str,
        saved: StoredTree,
        checkpoint: CheckpointView,
        groups: Sequence[Sequence[ParameterNames]],
        *,
        has_order: bool,
    ) -> None:
        """`groups` are the names of the parameters in each group of the live optimizer, in its order. `has_order` is
        True if an optimizer of the unwrapped model has them in the same order.
        """
        self._fqn = fqn
        self._checkpoint = checkpoint
        self._tree: Mapping[str, Any] = saved.tree
        self._tree_fqn = saved.fqn
        self._group_by_name = {
            name: StoredGroup(join_fqn(saved.fqn, f"groups.{first}.values"), group["values"])
            for first, group in saved.tree["groups"].items()
            for name in group["params"]
        }
        self._sources = checkpoint.tensor_sources
        self._tensors: dict[str, dict[str, tuple[str, StoredTensor]]] = {}
        self._tensor_keys: dict[str, set[str]] = {}
        """Name of a parameter -> the keys of its state that are or hold tensors, whatever include and exclude say."""
        self._find_tensors()
        self._known_names: dict[tuple[str, ...], list[str]] = {}
        """FQNs of a parameter in the state -> the result of `_names`, which is called for each parameter many times."""
        self._by_state_fqn: dict[str, str] = {}
        """FQN of a parameter in the state -> the name that it was saved under."""
        self._by_tensor: dict[str, str] = {}
        """Checkpoint FQN under which a parameter's elements lie -> the name that it was saved under."""
        self._is_by_position = BY_POSITION in saved.tree
        self._lengths = [len(group) for group in groups if group]
        self._stored_lengths = [len(group["params"]) for group in saved.tree["groups"].values() if group["params"]]
        self._has_order = has_order
        if not self._is_by_position:
            self._find_by_name()
        elif has_order and self._lengths == self._stored_lengths:
            names = chain.from_iterable(groups)
            self._by_state_fqn = {fqn: str(at) for at, of_parameter in enumerate(names) for fqn in of_parameter.fqns}

    def _find_tensors(self) -> None:
        state_fqn = join_fqn(self._tree_fqn, "state")
        # Of an optimizer with an empty name, earlier versions put `.state.` before the names of the state.
        for container in (state_fqn,) if self._tree_fqn else (state_fqn, f".{state_fqn}"):
            for source in self._checkpoint.saved_names.below(container):
                name, key = split_state_path(source[len(container) + 1 :], self._group_by_name)
                if name:
                    self._tensor_keys.setdefault(name, set()).add(key.partition(".")[0])
                if name and self._checkpoint.takes(source):
                    tensor = self._checkpoint.rename(source), self._checkpoint.saved[source]
                    self._tensors.setdefault(name, {})[key] = tensor

    def _find_by_name(self) -> None:
        for name in self._group_by_name:
            for state_fqn in self._state_fqns(name):
                self._by_state_fqn.setdefault(state_fqn, name)
            if self._source(name) in self._checkpoint.saved:
                self._by_tensor.setdefault(self._checkpoint.saved[self._source(name)].fqn, name)

    @cached_property
    def has_subclasses(self) -> bool:
        """True if the stored state has a tensor subclass."""
        return any(map(is_facts, leaves(self._tree["state"], "")))

    def _source(self, name: str) -> str:
        """Returns the checkpoint FQN of the parameter that was saved under this name: the name as it is if the
        parameter was outside of the model, or the model in the checkpoint lacks it.
        """
        in_model = join_fqn(MODEL_FQN, name)
        is_in_model = in_model in self._checkpoint.saved and name not in self._tree.get("outside_model", ())
        return in_model if is_in_model else name

    def _state_fqns(self, name: str) -> list[str]:
        """Returns the FQNs that a stored parameter may have in the live state. key_map renames it once: by its name in
        the module, or else by the names of its state in the optimizer.
        """
        source, rename = self._source(name), self._checkpoint.rename
        sources = [source] if source in self._checkpoint.saved else [join_fqn(MODEL_FQN, name), name]
        own = f"{self._fqn}." if self._fqn else ""
        renamed = [new for new in map(rename, sources) if new.removeprefix(own) not in sources]
        if renamed:
            # Hazard: a load that puts all names below the model puts one below it that is never stored, too.
            return [*renamed, sources[0]] if rename(name) == sources[0] else renamed
        prefix = f"{own}state."
        for key, (fqn, _) in self._tensors.get(name, {}).items():
            new = fqn[len(prefix) : -len(key) - 1]
            if fqn.startswith(prefix) and fqn.endswith(f".{key}") and new != name:
                return [join_fqn(MODEL_FQN, new), new]
        return sources

    def _names(self, names: ParameterNames) -> list[str]:
        """Returns every name under which a live parameter was saved; several if it is tied now and was not then."""
        known = self._known_names.get(names.fqns)
        if known is None:
            found = [self._by_state_fqn.get(fqn) for fqn in names.fqns]
            elsewhere = self._tree.get("elsewhere", {})
            for fqn in names.fqns:
                source = self._sources.get(fqn, fqn)
                tensor = self._checkpoint.saved.get(source)
                found += [elsewhere.get(source), None if tensor is None else self._by_tensor.get(tensor.fqn)]
            known = list(dict.fromkeys(name for name in found if name is not None))
            self._known_names[names.fqns] = known
        return known

    def has(self, fqn: str) -> bool:
        """Returns True if a parameter was saved that may have this FQN in the live state."""
        return fqn in self._by_state_fqn

    def claims(self, names: ParameterNames) -> Iterator[str]:
        """Yields the FQNs, in the live state, of everything that was saved of a parameter's optimizer state."""
        return chain.from_iterable(map(self._claims_under, self._names(names)))

    def _claims_under(self, name: str) -> Iterator[str]:
        yield from (fqn for fqn, _ in self._tensors.get(name, {}).values())
        plain = leaves(self._tree["state"].get(name, {}), join_fqn(self._tree_fqn, f"state.{name}"))
        yield from map(self._checkpoint.rename, plain)

    def excluded_claims(self, parameters: Collection[ParameterNames]) -> Iterator[str]:
        """Yields the `claims` of the live optimizer's `parameters` that `exclude` leaves out, and of stored parameters
        that it leaves out under all of their names and the live optimizer lacks.
        """
        yield from chain.from_iterable(map(self.claims, filter(self.is_excluded, parameters)))
        saved = self._checkpoint.saved
        lacking = self._group_by_name.keys() - set(chain.from_iterable(map(self._names, parameters)))
        # There may be an optimizer for each parameter, which mostly lacks none: then not all tensors are looked at.
        sources = saved.items() if lacking else ()
        taken = {tensor.fqn for source, tensor in sources if not self._checkpoint.excludes(source)}
        for name in lacking:
            tensor = saved.get(self._source(name))
            if tensor is not None and tensor.fqn not in taken:
                yield from self._claims_under(name)

    def shared_claims(self) -> Iterator[str]:
        """Yields the FQNs, in the live state, of stored values that belong to no single parameter."""
        for key in self._tree.keys() - {"state"}:
            yield from map(self._checkpoint.rename, leaves(self._tree[key], join_fqn(self._tree_fqn, key)))
        if not self._tree["state"]:
            yield self._checkpoint.rename(join_fqn(self._tree_fqn, "state"))

    def is_excluded(self, names: ParameterNames) -> bool:
        """Returns True if `exclude` leaves out the parameter itself under all of its names."""
        sources = [self._sources[fqn] for fqn in names.fqns if fqn in self._sources]
        return all(map(self._checkpoint.excludes, sources or map(self._checkpoint.globbed_name, names.fqns)))

    def parameter_shape(self, names: ParameterNames) -> tuple[int, ...] | None:
        """Returns the shape of the stored parameter; None if no module in the checkpoint has it."""
        tensors = (self._checkpoint.saved.get(self._source(name)) for name in self._names(names))
        return next((tensor.shape for tensor in tensors if tensor is not None), None)

    def parameter_dtype(self, names: ParameterNames) -> str | None:
        """Returns the dtype of the stored parameter; None if the checkpoint has none under the parameter's own name."""
        tensors = (self._checkpoint.saved.get(self._sources.get(fqn, fqn)) for fqn in names.fqns)
        return next((tensor.dtype for tensor in tensors if tensor is not None), None)

    def fits(self, names: ParameterNames, shape: tuple[int, ...]) -> bool:
        """Returns True unless the checkpoint shows that the parameter had another shape when its state was saved."""
        if self._is_by_position:  # the checkpoint does not say which tensors the parameters are
            shapes = [found for _, (_, _, found) in self.tensors(names).values() if len(found) == len(shape)]
            # SOAP has factors beside tensors like the parameter, Adafactor only rows and columns.
            is_among = shape in shapes and all({1, *shape}.issuperset(each) for each in shapes)
            return not shapes or is_among or tuple(map(max, zip(*shapes, strict=True))) == shape
        return self.parameter_shape(names) in {None, shape}

    def misfits(self, names: ParameterNames, shape: tuple[int, ...]) -> Iterator[Problem]:
        """Yields a problem for each tensor, other than a scalar, in the stored state of a parameter. Call it for a
        parameter that had another shape in the checkpoint than now, `shape`.
        """
        for fqn, tensor in self.tensors(names).values():
            if tensor.shape:
                stored_as = list(tensor.shape if self._is_by_position else self.parameter_shape(names) or ())
                text = f"{fqn}: of a parameter of shape {stored_as} in the checkpoint, {list(shape)} in the state"
                yield Problem("shape", fqn, text)

    @cached_property
    def keys_of_factors(self) -> frozenset[tuple[str, bool]]:
        """State keys of tensors in dicts and lists that have another shape than some parameter they belong to: they are
        like no parameter, also where the shapes agree, as those of SOAP's factors and of a square matrix do. Each with
        True for matrices, and False for vectors, which optimizers that factor matrices often do not factor.
        """
        found: set[tuple[str, bool]] = set()
        for name, tensors in self._tensors.items():
            parameter = self._checkpoint.saved.get(self._source(name))
            nested = ((key, stored.shape) for key, (_, stored) in tensors.items() if "." in key and stored.shape)
            if parameter is not None:
                found |= {(key, len(parameter.shape) > 1) for key, shape in nested if shape != parameter.shape}
        return frozenset(found)

    def number_problems(self) -> list[Problem]:
        """Returns the reasons why stored parameters without names cannot be matched by position to the live ones."""
        if not self._is_by_position or (self._has_order and self._lengths == self._stored_lengths):
            return []
        if not self._has_order:
            text = (
                "its parameters have no names in the checkpoint, and the flat memory in the state has another order, "
                "so that they cannot be told apart; save it with names (torch.distributed.checkpoint.state_dict, "
                "or an optimizer made from named_parameters())"
            )
        elif sum(self._lengths) == len(self._group_by_name):
            text = (
                f"its parameters have no names in the checkpoint, and stand in groups of {self._stored_lengths}, in "
                f"the state in groups of {self._lengths}, so that they may be in another order; make the optimizer "
                "with the same param_groups as the one that was saved"
            )
        else:
            text = (
                f"it has {len(self._group_by_name)} parameters without names in the checkpoint and "
                f"{sum(self._lengths)} in the state, so that they cannot be told apart"
            )
        return [Problem("conflict", self._fqn, f"{self._fqn}: {text}")]

    def group(self, names: ParameterNames) -> StoredGroup | None:
        return next((self._group_by_name[name] for name in self._names(names)), None)

    def takes(self, group: StoredGroup, key: str) -> bool:
        """Returns True if include and exclude let this hyperparameter of the group through."""
        return self._takes_all(group.values.get(key), join_fqn(group.fqn, key))

    def tensors(self, names: ParameterNames) -> Mapping[str, tuple[str, StoredTensor]]:
        """Returns the state tensors of a parameter that include and exclude let through: state key, with dots for one
        in a dict or list -> its FQN in `CheckpointView.tensors`, and the stored tensor.
        """
        return next((self._tensors[name] for name in self._names(names) if name in self._tensors), {})

    def plain(self, names: ParameterNames) -> dict[str, tuple[str, Any]]:
        """Returns the plain data in a parameter's state, without keys of which include or exclude leave out a part:
        state key -> its checkpoint FQN, and the tree that is its value.
        """
        name = next((name for name in self._names(names) if name in self._tree["state"]), None)
        if name is None:
            return {}
        prefix = join_fqn(self._tree_fqn, f"state.{name}")
        values = {key: (join_fqn(prefix, key), value) for key, value in self._tree["state"][name].items()}
        return {key: (fqn, value) for key, (fqn, value) in values.items() if self._takes_all(value, fqn)}

    def keys_to_load(self, names: ParameterNames) -> set[str]:
        """Returns the keys of a parameter's state of which all or a part is to be loaded."""
        return {key.partition(".")[0] for key in (*self.tensors(names), *self.plain(names))}

    def whole_keys(self, names: ParameterNames) -> set[str]:
        """Returns those of `keys_to_load` of whose values include and exclude leave out no part."""
        return {*(key for key in self.tensors(names) if "." not in key), *self.plain(names)}

    def stored_keys(self, names: ParameterNames) -> set[str]:
        """Returns the keys of a parameter's state in the checkpoint, whatever include and exclude say."""
        keys = ((self._tree["state"].get(name, ()), self._tensor_keys.get(name, ())) for name in self._names(names))
        return set().union(*chain.from_iterable(keys))

    def had_none(self, names: ParameterNames) -> bool:
        """Returns True if the optimizer kept nothing for the parameter when it was saved, as before its first step, and
        include and exclude let its state through: a load removes what it keeps now.
        """
        if self.tensors(names) or self.group(names) is None or self.stored_keys(names):  # nearly always the first
            return False
        return any(self._checkpoint.takes(join_fqn(self._tree_fqn, f"state.{name}")) for name in self._names(names))

    @property
    def takes_all(self) -> bool:
        """True if include and exclude leave out nothing of the checkpoint."""
        return self._checkpoint.takes_all

    def facts(self) -> dict[str, Any]:
        """Returns the other data that the framework of the optimizer saved with it, without keys of which include or
        exclude leave out a part.
        """
        facts: Mapping[str, Any] = self._tree.get("facts", {})
        prefix = join_fqn(self._tree_fqn, "facts")
        return {key: value for key, value in facts.items() if self._takes_all(value, join_fqn(prefix, key))}

    def _takes_all(self, value: Any, fqn: str) -> bool:
        return all(map(self._checkpoint.takes, leaves(value, fqn)))
