"""Builds the manifest of a foreign checkpoint: files, tensors as chunks, plain data as trees. Knows no format."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bytecheckpoint.errors import CheckpointMismatchError, and_more
from bytecheckpoint.formats.file_reader import conflicting, damaged, not_readable, too_much
from bytecheckpoint.formats.plain_values import DtypeName, SizeValue, encode_value
from bytecheckpoint.formats.torch_optimizer import as_saved_here, without_tensors
from bytecheckpoint.formats.torch_save.unpickler_globals import (
    ByteStream,
    Instance,
    PickledArray,
    PickledDtype,
    StorageRef,
    StoredView,
)
from bytecheckpoint.info import LEFT_OUT
from bytecheckpoint.manifest import Chunk, DataFile, Manifest, TensorRecord, tensor_record
from bytecheckpoint.manifest.plain_wire import MAX_DEPTH, MSGPACK_INTS, TensorRef, join_fqn
from bytecheckpoint.storage.paths import escaped, is_utf8, join_name, unreadable_name

MAX_PIECES = 1 << 20
"""Most pieces of all tensors beyond the parts that files name: a view of few bytes can have 10,000s of them."""
MAX_VALUES = 1 << 20
_ATOMS_A_VALUE = 16
"""Numbers and texts in a list that count as one value, because they cost less."""
_BYTES_A_VALUE = 256
_NUM_NAMED = 100
"""Names in a message for each reason why values are left out."""
_LIGHTNING = "pytorch-lightning_version"
"""Key of all checkpoints of Lightning."""
EXTRA_STATE = "_extra_state"
"""Key of the extra state of modules, which is an object of its own wherever it stands."""

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, DtypeName, SizeValue})

OnTensor = Callable[[str, StoredView], None]
"""Takes the FQN of a tensor of a pickle, and the tensor."""
ItemsOf = Callable[[str, Any], Iterable[tuple[Any, Any]] | None]
"""Returns the items of the container of this FQN; None for a leaf."""


@dataclass(slots=True)
class ManifestBuilder:
    """The parts of a manifest so far."""

    path: str
    """Path of the checkpoint, for messages."""
    files: list[DataFile] = field(default_factory=list)
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    trees: dict[str, Any] = field(default_factory=dict)
    """Plain data by FQN."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    step: int | None = None
    num_pieces: int = 0
    """Number of chunks so far, beyond the parts that files name."""
    left_out: dict[str, dict[str, None]] = field(default_factory=dict)
    """Reason -> names of files and of values that are left out."""

    def add_file(self, name: str, byte_length: int) -> int:
        """Adds a file, returns its number. Raises UnsafeCheckpointError (path_escape) for a name that is not UTF-8."""
        if not is_utf8(name):
            raise unreadable_name(join_name(self.path, name))
        self.files.append(DataFile(name, byte_length))
        return len(self.files) - 1

    def add_tensor(
        self, fqn: str, dtype: str, shape: Sequence[int], chunks: Sequence[Chunk], *, num_parts: int = 1
    ) -> None:
        """Adds a tensor. `num_parts` of its chunks have a name of their own in the files: only chunks beyond this
        number count towards MAX_PIECES.

        Raises CheckpointMismatchError (conflict) for a name that is taken, UnsafeCheckpointError (limits_exceeded) for
        too many pieces.
        """
        self._refuse_taken(fqn)
        self.num_pieces += max(0, len(chunks) - num_parts)
        if self.num_pieces > MAX_PIECES:
            raise too_much(self.path, f"its tensors lie in more than {MAX_PIECES} pieces, because they are strided")
        self.tensors[fqn] = tensor_record(dtype, tuple(shape), chunks)

    def add_alias(self, fqn: str, stored_fqn: str) -> None:
        """Adds `fqn` as another name of `stored_fqn`. Raises CheckpointMismatchError (conflict) if `fqn` is taken."""
        self._refuse_taken(fqn)
        self.aliases[fqn] = stored_fqn

    def take_in(self, other: ManifestBuilder, entry: str = "") -> None:
        """Adds the files, tensors and aliases of another checkpoint as an entry of this one: `entry` precedes the names
        of tensors and aliases. The other's plain data is not added. Without an entry, all names stay, and the plain
        data is added.

        Raises CheckpointMismatchError (conflict) for a name that is taken.
        """
        first = len(self.files)
        self.files += other.files
        self.num_pieces += other.num_pieces
        for fqn, record in other.tensors.items():
            chunks = [chunk._replace(file=first + chunk.file) for chunk in record.chunks]
            self.add_tensor(join_fqn(entry, fqn), record.dtype, record.shape, chunks, num_parts=len(chunks))
        for alias, fqn in other.aliases.items():
            self.add_alias(join_fqn(entry, alias), join_fqn(entry, fqn))
        if entry:
            self.trees[entry] = {fqn: TensorRef(join_fqn(entry, fqn)) for fqn in [*other.tensors, *other.aliases]}
            return
        for fqn, tree in other.trees.items():
            self._add_tree(fqn, tree)
        self._refuse_values_of_tensors()

    def set_step(self, step: Any) -> None:
        """Sets the step to a value from a file; to None if the value is anything but an int of at least 0."""
        self.step = step if type(step) is int and step >= 0 else None

    def leave_out(self, name: str, why: str) -> None:
        """Notes that the manifest will not have this file, or this value of a file, and why."""
        names = self.left_out.setdefault(why, {})
        names[escaped(name)] = None

    def _refuse_taken(self, fqn: str) -> None:
        if fqn in self.tensors or fqn in self.aliases:
            raise two_of(self.path, fqn)

    def take_apart(self, value: Any, *, on_tensor: OnTensor | None = None) -> None:
        """Adds the plain data of a whole state, with TensorRefs in place of its tensors. Each tensor is given to
        `on_tensor`; without `on_tensor`, a tensor raises CheckpointCorruptError (bad_manifest). A TensorRef in the
        state stands for a tensor that was added before: that is renamed after its place in the state. Each optimizer of
        a list, and each scheduler of Lightning's, is an entry of its own: `optimizer_states.0`.

        A value that is not a dict becomes the entry `value`; a state that is one optimizer becomes the entry "".

        Raises CheckpointMismatchError (conflict) for two values or tensors of one name, and UnsafeCheckpointError
        (limits_exceeded).
        """
        renamed: dict[str, str] = {}
        walk = _PlainWalk(self.path, on_tensor or self._refuse_tensor, renamed)
        root = value if isinstance(value, dict) else {"value": value}
        if as_saved_here(root) is not None:
            self.trees[""] = walk.plain(root, "", MAX_DEPTH)
        else:
            walk.extra = {}
            for key, item in _by_entry(root):
                name = key if type(key) is str else str(key)
                found = walk.plain(item, name, MAX_DEPTH)
                if not isinstance(found, TensorRef) or is_extra_state(name):
                    self._add_tree(name, found)
            for name, extra in walk.extra.items():
                self._add_tree(name, extra)
        moved = [(new, self.tensors.pop(old)) for old, new in renamed.items()]
        for new, record in moved:
            self._refuse_taken(new)
            self.tensors[new] = record
        self._refuse_values_of_tensors()

    def _add_tree(self, fqn: str, tree: Any) -> None:
        if fqn in self.trees:  # as of the keys 1 and "1"
            raise two_of(self.path, fqn, "values")
        self.trees[fqn] = tree

    def _refuse_values_of_tensors(self) -> None:
        for name in self.trees.keys() & (self.tensors.keys() | self.aliases.keys()):
            if not isinstance(self.trees[name], TensorRef):  # as of the keys 1 and "1"
                raise two_of(self.path, name, "values")

    def _refuse_tensor(self, fqn: str, _view: StoredView) -> None:
        raise damaged(self.path, f"{fqn!r:.200} is a tensor in the wrong place")

    def manifest(self, foreign_format: str) -> Manifest:
        reasons = [f"{and_more(list(names), _NUM_NAMED)}: {why}" for why, names in self.left_out.items()]
        return Manifest(
            save_id="",
            step=self.step,
            foreign_format=foreign_format,
            files=self.files,
            tensors=self.tensors,
            aliases=self.aliases,
            objects={fqn: encode_value(tree, path=self.path) for fqn, tree in self.trees.items()},
            metadata={**self.metadata, LEFT_OUT: "; ".join(reasons)} if reasons else self.metadata,
        )


def _by_entry(root: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    # Each optimizer of a list, and each scheduler of Lightning's, is an entry of its own.
    for key, item in root.items():
        are_dicts = type(item) is list and bool(item) and all(isinstance(each, dict) for each in item)
        is_lightning = _LIGHTNING in root and key == "lr_schedulers"
        if are_dicts and (is_lightning or all(as_saved_here(each) is not None for each in item)):
            yield from ((f"{key}.{index}", each) for index, each in enumerate(item))
        else:
            yield key, item


def two_of(path: str, fqn: str, what: str = "tensors") -> CheckpointMismatchError:
    """Returns the error for two tensors or values that would get the same name."""
    advice = "save them under names that differ, or give the path of one of its files"
    return conflicting(path, f"holds two {what} that come to the name {fqn!r:.200}", advice)


def plain_tree(value: Any, fqn: str, *, path: str, on_tensor: OnTensor) -> Any:
    """Returns a value, whose FQN is given, as plain data with a TensorRef for each tensor. Calls `on_tensor` with each.

    Raises CheckpointMismatchError (conflict), CheckpointCorruptError (bad_manifest) and UnsafeCheckpointError
    (limits_exceeded).
    """
    return _PlainWalk(path, on_tensor, {}).plain(value, fqn, MAX_DEPTH)


class _PlainWalk:
    """Walks values and limits their number: a small pickle can name the same list a billion times."""

    def __init__(self, path: str, on_tensor: OnTensor, renamed: dict[str, str]) -> None:
        """`path` is for messages. `renamed` gets, by old FQN, the new FQN of each TensorRef that has moved."""
        self._path = path
        self._on_tensor = on_tensor
        self._num_values = 0
        self._renamed = renamed
        self.extra: dict[str, Any] | None = None
        """Extra state of modules by FQN; None if it stays where it is."""

    def plain(self, value: Any, fqn: str, levels_left: int) -> Any:
        """Returns the value as plain data, with TensorRefs; `levels_left` of nesting remain, its own included."""
        self._count(1, len(fqn))
        if levels_left == 0:
            raise too_much(self._path, f"its plain data is nested more than {MAX_DEPTH} deep")
        match value:
            case StoredView():
                self._on_tensor(fqn, value)
                return TensorRef(fqn)
            case TensorRef():
                if value.fqn != fqn:
                    self._renamed[value.fqn] = fqn
                return TensorRef(fqn)
            case Instance():
                return self._dict(value.fields, fqn, levels_left)
            case PickledArray():
                return self._atom(value.array)
            case PickledDtype():
                return value.dtype.str
            case ByteStream():
                return self._atom(value.content)
            case dict():
                return self._dict(value, fqn, levels_left)
        if type(value) in {list, tuple, set, frozenset}:
            return self._sequence(value, fqn, levels_left)
        if type(value) in _ATOMS or isinstance(value, np.generic | np.ndarray):
            return self._atom(value)
        if isinstance(value, StorageRef):
            what = f"of its pickle: it has a storage without a tensor at {fqn!r:.200}"
            raise not_readable(self._path, what, "save a tensor in its place", kind="bad_manifest")
        raise damaged(self._path, f"its pickle has a {type(value).__name__} at {fqn!r:.200}, where a value should be")

    def _atom(self, value: Any) -> Any:
        self._count(0, _num_bytes(value))
        return value

    def _count(self, num_values: int, num_bytes: int) -> None:
        self._num_values += num_values + num_bytes // _BYTES_A_VALUE
        if self._num_values > MAX_VALUES:
            what = f"of more than {MAX_VALUES} values, or {MAX_VALUES * _BYTES_A_VALUE} bytes"
            raise too_much(self._path, f"its plain data is {what}")

    def _sequence(self, value: Collection[Any], fqn: str, levels_left: int) -> Any:
        if levels_left > 1 and _ATOMS.issuperset(map(type, value)):
            self._count(len(value) // _ATOMS_A_VALUE, sum(map(_num_bytes, value)))
            return value if type(value) in {list, tuple} else list(value)
        items = [self.plain(item, join_fqn(fqn, index), levels_left - 1) for index, item in enumerate(value)]
        return tuple(items) if type(value) is tuple else items

    def _dict(self, value: Mapping[Any, Any], fqn: str, levels_left: int) -> Any:
        optimizer = as_saved_here(value)
        if optimizer is not None:
            return without_tensors(self._items(optimizer, fqn, levels_left))
        return self._items(value, fqn, levels_left)

    def _items(self, value: Mapping[Any, Any], fqn: str, levels_left: int) -> dict[Any, Any]:
        """Returns the items as plain data. Extra state of modules goes to `extra` instead, unless that is None."""
        kept: dict[Any, Any] = type(value)() if isinstance(value, OrderedDict | Counter) else {}
        for key, item in value.items():
            is_kept = type(key) is str or (type(key) is int and key in MSGPACK_INTS)
            name = key if is_kept else str(key)
            child = join_fqn(fqn, name)
            found = self.plain(item, child, levels_left - 1)
            into, place = (kept, name) if self.extra is None or not is_extra_state(child) else (self.extra, child)
            if place in into:  # as of the keys None and "None"
                raise two_of(self._path, child, "values")
            into[place] = found
        return kept


def _num_bytes(value: Any) -> int:
    """Returns about the encoded size of an atom or an array in bytes; 0 for a value of a few bytes, such as a float."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    if isinstance(value, np.generic | np.ndarray):
        return value.nbytes
    return value.num_bytes if isinstance(value, SizeValue) else 0


def holds_tensor(value: Any) -> bool:
    """Returns True if a value of a pickle is a tensor, or has one at any depth."""
    seen: set[int] = set()  # a small pickle can name the same list a billion times
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, StoredView):
            return True
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Instance):
            stack.append(item.fields)
        elif isinstance(item, dict):
            stack += item.values()
        elif type(item) in {list, tuple, set, frozenset}:
            stack += item
    return False


def leaves_of(value: Any, fqn: str, *, path: str, items_of: ItemsOf) -> dict[str, Any]:
    """Returns the leaves of nested containers by FQN; `items_of` says what a container is.

    Raises UnsafeCheckpointError (limits_exceeded) for a value that is nested too deep or holds too many values, and
    CheckpointMismatchError (conflict) for two leaves of one name.
    """
    leaves: dict[str, Any] = {}
    num_values = 0

    def walk(value: Any, fqn: str, depth: int) -> None:
        nonlocal num_values
        num_values += 1  # empty containers as well, of which a small pickle can have billions
        if depth == 0 or num_values > MAX_VALUES:
            raise too_much(path, f"its data is nested more than {MAX_DEPTH} deep, or of {MAX_VALUES} values")
        items = items_of(fqn, value)
        if items is None and fqn in leaves:
            raise two_of(path, fqn)
        if items is None:
            leaves[fqn] = value
        for key, item in items or ():
            walk(item, join_fqn(fqn, key), depth - 1)

    walk(value, fqn, MAX_DEPTH)
    return leaves


def is_extra_state(fqn: str) -> bool:
    return fqn.rpartition(".")[2] == EXTRA_STATE
