"""Converts the plain data of a checkpoint for a target: the selected part, under its new names, and as the nested state
that torch saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from bytecheckpoint.adapters.data.stream_wire import is_stream_tree
from bytecheckpoint.adapters.key_map import Renamer
from bytecheckpoint.adapters.optimizers.forms import flat_optimizer_state
from bytecheckpoint.adapters.optimizers.stored_optimizer import BY_POSITION, is_optimizer_tree
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.plain.plain_types import as_plain
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.loading.select import LeftOut, Selection, SelectionRequest, optimizers_in
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef, join_fqn

_NOTHING = object()
_OF_NAMES = frozenset({"elsewhere", "outside_model"})
"""Keys of an optimizer's tree that say where its parameters were, as their names do."""
_ONLY_OF_NUMPY = "gG"
"""Codes of longdouble and clongdouble, which `item` and `tolist` leave as they are."""


class TensorStub(NamedTuple):
    """Stands in a state for a tensor of the target."""

    number: int
    """Index in `Selection.wanted`; tied weights have the same."""


class PlainData:
    """The selected part of a checkpoint's plain data."""

    def __init__(self, manifest: Manifest, selection: Selection, request: SelectionRequest) -> None:
        """Raises CheckpointMismatchError (conflict) if `rename` separates an optimizer from its parameters."""
        self._manifest = manifest
        self._selection = selection
        self._request = request
        self._rename = Renamer(list(request.rename), "")
        self.left_out: list[LeftOut] = []
        """Values that `nested` has left out."""
        self._numbers = {tensor.fqn: number for number, tensor in enumerate(selection.wanted)}
        self._refuse_torn_optimizers()

    def objects(self) -> dict[str, bytes]:
        """Returns the encoded selected trees by FQN, as in a manifest."""
        if self._request.takes_all and not self._request.rename:
            return dict(self._manifest.objects)
        return {fqn: encode_plain(tree, fqn) for fqn, tree in self._trees().items()}

    def rank_objects(self) -> dict[str, Mapping[int, bytes]]:
        """Returns the encoded selected trees that differ from rank to rank, by FQN and rank. Their FQNs are not
        renamed; references in them are to the new names of tensors.
        """
        if self._request.takes_all and not self._request.rename:
            return dict(self._manifest.rank_objects)
        found: dict[str, Mapping[int, bytes]] = {}
        for fqn, by_rank in self._manifest.rank_objects.items():
            trees = {rank: self._chosen(fqn, decode_plain(data)) for rank, data in by_rank.items()}
            selected = {rank: tree for rank, tree in trees.items() if tree is not _NOTHING}
            if selected:
                found[fqn] = {rank: encode_plain(tree, fqn) for rank, tree in selected.items()}
        return found

    def _trees(self) -> dict[str, Any]:
        """Returns the selected trees by their names in the target."""
        chosen = {fqn: self._chosen(fqn, tree) for fqn, tree in self._selection.trees.items()}
        # What has a dot belongs to a module, and goes by the names of its parameters.
        return {self._rename(fqn) if "." in fqn else fqn: tree for fqn, tree in chosen.items() if tree is not _NOTHING}

    def _chosen(self, fqn: str, value: Any) -> Any:
        """Returns the selected part of a value, with new names in references; _NOTHING if no part is selected. Raises
        CheckpointMismatchError (conflict) for a list with tensors of which only a part is selected.
        """
        if is_optimizer_tree(value):
            return value if self._has_optimizer(fqn, value) else _NOTHING
        if isinstance(value, TensorRef):
            return self._chosen_ref(fqn, value)
        if isinstance(value, dict) and value:
            items = {key: self._chosen(join_fqn(fqn, key), item) for key, item in value.items()}
            chosen = {key: item for key, item in items.items() if item is not _NOTHING}
            is_loader = self._request.to == "bcp" and is_stream_tree(value)
            if is_loader and leaves(chosen, fqn).keys() != leaves(value, fqn).keys():
                chosen.pop("owners", None)  # a load refuses it without: a loader takes all of its state, or none
            return type(value)(chosen) if chosen else _NOTHING
        if type(value) in (list, tuple) and _holds_tensor(value):
            chosen_items = [self._chosen(join_fqn(fqn, index), item) for index, item in enumerate(value)]
            kept_items = [item for item in chosen_items if item is not _NOTHING]
            if kept_items and len(kept_items) < len(chosen_items):
                done = "read" if self._request.is_in_memory else "written"
                raise CheckpointMismatchError(
                    f"{fqn!r:.200} is a list of which include, exclude and rename take only a part; nothing was "
                    f"{done}: choose and name all of it alike",
                    kind="conflict",
                )
            return type(value)(kept_items) if kept_items else _NOTHING
        return value if self._request.takes(fqn) else _NOTHING

    def _chosen_ref(self, fqn: str, ref: TensorRef) -> Any:
        names = self._selection.names
        if fqn in self._manifest.tensors or fqn in self._manifest.aliases:
            return TensorRef(fqn) if names.get(fqn) == fqn else _NOTHING  # a new name has a place of its own
        return TensorRef(names[ref.fqn]) if ref.fqn in names else _NOTHING

    def _has_optimizer(self, fqn: str, tree: Any) -> bool:
        """Returns True if any part of the optimizer is selected, or if `include` takes its own name."""
        prefix, takes = join_fqn(fqn, "state."), self._request.takes
        if any(name.startswith(prefix) for name in self._selection.names) or any(map(takes, leaves(tree, fqn))):
            return True
        return bool(self._request.include) and takes(fqn)

    def _refuse_torn_optimizers(self) -> None:
        """Raises CheckpointMismatchError (conflict) if an optimizer would no longer find its parameters."""
        renamed = {fqn for fqn, name in self._selection.names.items() if name != fqn} if self._request.rename else set()
        for fqn, tree in optimizers_in(self._selection.trees).items() if renamed else ():
            parameters = {name for group in tree["groups"].values() for name in group["params"]}
            named = parameters | {f"model.{name}" for name in parameters}
            state = join_fqn(fqn, "state.")
            # Without the name of the model, a parameter has the name by which its optimizer knows it.
            alike = {f"model.{name}" for name in parameters if self._selection.names.get(f"model.{name}") == name}
            torn = sorted(name for name in renamed - alike if name in named or name.startswith(state))
            if torn and self._has_optimizer(fqn, tree) and self._request.to != "hf":
                raise CheckpointMismatchError(
                    f"rename gives {torn[0]!r:.200} another name, by which the optimizer {fqn!r} knows its parameters; "
                    "nothing was written: leave the optimizer out with exclude, or keep the names and rename when "
                    "loading, with key_map",
                    kind="conflict",
                )

    def nested(self) -> dict[Any, Any]:
        """Returns the state as torch saves it, with stubs for tensors. Entries are dicts; an optimizer is what its
        state_dict() returns; a value of single ranks is a dict by rank. Adds to `left_out`.
        """
        placed: set[str] = set()
        root = self._shared(placed)
        for fqn, by_rank in self.rank_objects().items():
            values = {rank: self._with_stubs(decode_plain(data), fqn, placed) for rank, data in by_rank.items()}
            self._place(root, fqn, values)
        for name in [*self._numbers, *self._selection.aliases]:
            if name not in placed:
                self._place(root, name, self._stub(name))
        return root

    def shared(self) -> dict[Any, Any]:
        """Returns the plain data that all ranks share, nested, with stubs for the tensors that it refers to."""
        return self._shared(set())

    def _shared(self, placed: set[str]) -> dict[Any, Any]:
        """Returns the nested state that all ranks share. Adds the names of the tensors in it to `placed`."""
        root: dict[Any, Any] = {}
        for fqn, tree in self._trees().items():
            value = self._with_stubs(tree, fqn, placed)
            if self._is_whole_state(fqn, tree):
                root = value
            else:
                self._place(root, fqn, value)
        return root

    def _is_whole_state(self, fqn: str, tree: Any) -> bool:
        """Returns True for the only entry of a foreign checkpoint if it is an optimizer, which is saved there without a
        name. Any other entry named "" has that as its key in the state.
        """
        is_sole = bool(self._manifest.foreign_format) and len(self._manifest.objects) == 1
        return not fqn and is_sole and is_optimizer_tree(tree)

    def _stub(self, name: str) -> TensorStub:
        return TensorStub(self._numbers[self._selection.aliases.get(name, name)])

    def _with_stubs(self, value: Any, fqn: str, placed: set[str]) -> Any:
        if is_optimizer_tree(value):
            return self._optimizer(value, fqn, placed)
        if isinstance(value, TensorRef):
            name = value.fqn
            if name not in self._numbers and name not in self._selection.aliases:
                return None
            placed.add(name)
            return self._stub(name)
        if isinstance(value, dict):
            return type(value)({key: self._with_stubs(item, join_fqn(fqn, key), placed) for key, item in value.items()})
        if type(value) in (list, tuple):
            return type(value)(self._with_stubs(item, join_fqn(fqn, at), placed) for at, item in enumerate(value))
        return value if self._request.is_in_memory else as_plain(value)

    def _optimizer(self, tree: Mapping[str, Any], fqn: str, placed: set[str]) -> dict[str, Any]:
        """Returns the state_dict() of the optimizer, with parameters by name or, if they had none, by position. With
        `flatten_optimizer`, returns it on one level instead. Adds the names of its tensors to `placed`.

        Raises CheckpointMismatchError (conflict) if it is to be flat and its parameters have no names.
        """
        known = {name for group in tree["groups"].values() for name in group["params"]}

        def key_of(name: str) -> str | int:
            return int(name) if tree.get(BY_POSITION) else name

        prefix = join_fqn(fqn, "state.")
        state = {  # also tensors in lists, as LBFGS has
            key_of(name): {key: self._with_stubs(item, f"{prefix}{name}.{key}", placed) for key, item in values.items()}
            for name, values in tree["state"].items()
        }
        names = [*self._numbers, *self._selection.aliases]
        for name in [each for each in names if each.startswith(prefix) and each not in placed]:
            parameter, _, key = name.removeprefix(prefix).rpartition(".")
            while parameter and parameter not in known:
                parameter, _, head = parameter.rpartition(".")
                key = f"{head}.{key}"
            if parameter:
                state.setdefault(key_of(parameter), {})[key] = self._stub(name)
                placed.add(name)
        groups = [
            {
                **self._with_stubs(group["values"], join_fqn(fqn, f"groups.{first}.values"), placed),
                "params": [key_of(name) for name in group["params"]],
            }
            for first, group in tree["groups"].items()
        ]
        other_items = {key: value for key, value in tree.items() if key not in {"state", "groups", BY_POSITION}}
        if not self._request.flatten_optimizer:
            return {"state": state, "param_groups": groups, **other_items}
        if tree.get(BY_POSITION):
            raise CheckpointMismatchError(
                f"the parameters of the optimizer {fqn!r:.200} have no names, by which a flat one knows them; nothing "
                "was written: convert without --flatten-optimizer, or leave the optimizer out with --exclude",
                kind="conflict",
            )
        why = "a flat optimizer has no place for it"
        self.left_out += [LeftOut(join_fqn(fqn, key), 0, 0, why) for key in other_items if key not in _OF_NAMES]
        return flat_optimizer_state({"state": state, "param_groups": groups})

    def _place(self, root: dict[Any, Any], name: str, value: Any) -> None:
        """Puts a value below its entry if the checkpoint has entries, else under its whole name."""
        entry, _, inner_name = name.partition(".")
        is_entry = entry in root if self._is_flat else True
        inside = root.setdefault(entry, {}) if inner_name and is_entry else None
        if isinstance(inside, dict) and inner_name not in inside:
            inside[inner_name] = value
            return
        before = root.get(name)
        root[name] = value
        # Names with a dot may have come first, and made a dict of this name.
        for key, item in before.items() if isinstance(before, dict) else ():
            self._place(root, f"{name}.{key}", item)

    @property
    def _is_flat(self) -> bool:
        """True if names may have dots of their own, because torch or others have written them."""
        return self._manifest.foreign_format not in {"", "deepspeed"}


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, TensorRef) or (type(value) in (list, tuple) and any(map(_holds_tensor, value)))


def without_numpy(value: Any, fqn: str) -> Any:
    """Returns the value with numpy arrays as tensors (as lists where torch lacks the dtype) and numpy scalars as plain
    numbers, also those nested in its dicts, lists and tuples.

    Other values stay as they are. Raises CheckpointMismatchError (conflict), which names the value, for one of numpy's
    that can become none of these.
    """
    if isinstance(value, np.ndarray | np.generic) and value.dtype.char in _ONLY_OF_NUMPY:
        raise _not_without_numpy(value, fqn, "torch and Python have no numbers of this precision")
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        except TypeError:
            return value.tolist()
        except ValueError as error:
            raise _not_without_numpy(value, fqn, str(error)) from error
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return type(value)({key: without_numpy(item, join_fqn(fqn, key)) for key, item in value.items()})
    if type(value) in (list, tuple):
        items: Sequence[Any] = [without_numpy(item, join_fqn(fqn, index)) for index, item in enumerate(value)]
        return type(value)(items)
    return value


def _not_without_numpy(value: np.ndarray | np.generic, fqn: str, why: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{fqn!r:.200}, of numpy's {value.dtype}, cannot become a tensor or a number: {why}; nothing was written: "
        "leave it out with exclude, or convert to another format",
        kind="conflict",
    )
