"""Summarizes a manifest as the records that `bcp show` prints: totals, tensors, files, plain objects. It reads no
data file, except for tensors in the values of single ranks; only plain objects need torch to be decoded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.errors import CheckpointNotFoundError, and_more
from bytecheckpoint.manifest import Chunk, Manifest, TensorRecord
from bytecheckpoint.manifest.plain_wire import join_fqn

from ..arguments import Opened
from ..render.number_format import shape_text, shortened
from .diagnosis.optimizer_trees import optimizers_in
from .save_layout import chunks_by_file, cut_names

_DIGITS = re.compile(r"([0-9]+)")
MAX_TEXT = 200
"""Largest number of characters of the text of a plain value in a table."""


class TensorEntry(NamedTuple):
    """A tensor, or another name of a tied one."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    """The global shape."""
    alias_of: str | None
    """The FQN under which a tied tensor is stored; None for a tensor that is stored under `fqn`."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, before compression; 0 for an alias."""
        return 0 if self.alias_of else self.num_elements * itemsize(self.dtype)

    @property
    def stored_fqn(self) -> str:
        return self.alias_of or self.fqn


@dataclass(slots=True)
class TensorTotals:
    """Sums over stored tensors; aliases do not count."""

    name: str
    num_tensors: int = 0
    num_elements: int = 0
    num_chunks: int = 0
    num_bytes: int = 0


class PlainSummary(NamedTuple):
    """A plain value."""

    fqn: str
    rank: int | None
    """The rank that saved it; None where all ranks have it in common."""
    type: str
    value: Any
    """The value itself if JSON can hold it, else text."""
    text: str


class ManifestSummary:
    """The tensors of an opened checkpoint in natural order (layer 10 after layer 9), and their totals.

    Totals are summed over the columns of the manifest: no record is made of a tensor that is not asked for.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._stored = list(manifest.tensors)
        self._num_chunks = manifest.table.columns.num_chunks

    @cached_property
    def tensors(self) -> list[TensorEntry]:
        """All tensors and their other names, in natural order."""
        return list(map(self._entry, in_natural_order(self._names)))

    def first_tensors(self, count: int) -> list[TensorEntry]:
        """Returns the first `count` of `tensors` without sorting the others."""
        return list(map(self._entry, first_in_natural_order(self._names, count)))

    @property
    def num_names(self) -> int:
        """Number of tensors and of their other names."""
        return len(self._names)

    @cached_property
    def _names(self) -> Sequence[str]:
        return (*self._stored, *self._manifest.aliases)

    def _entry(self, fqn: str) -> TensorEntry:
        alias_of = self._manifest.aliases.get(fqn)
        return TensorEntry(fqn, *self._manifest.describe(alias_of or fqn), alias_of)

    @cached_property
    def entries(self) -> list[TensorTotals]:
        """Totals by top-level name of the state, in natural order."""
        totals = self._totals(list(map(_entry_of, self._names)))
        order = NaturalOrder(total.name for total in totals)
        return sorted(totals, key=lambda total: order.key(total.name))

    @cached_property
    def dtypes(self) -> list[TensorTotals]:
        """Totals by dtype, most bytes first."""
        columns = self._manifest.table.columns
        totals = self._totals(list(map(columns.dtype_names.__getitem__, columns.dtypes.tolist())))
        return sorted(totals, key=lambda total: (-total.num_bytes, total.name))

    @cached_property
    def num_parameters(self) -> int:
        """Number of elements of all tensors but optimizer state; tied tensors count once."""
        starts = tuple(join_fqn(fqn, "") for fqn in optimizers_in(self._manifest))
        totals = self._totals(["state" if fqn.startswith(starts) else "parameters" for fqn in self._names])
        return sum(total.num_elements for total in totals if total.name == "parameters")

    @cached_property
    def num_chunks(self) -> int:
        return int(self._num_chunks.sum())

    @cached_property
    def cuts(self) -> list[TensorTotals]:
        """Totals by the way in which tensors are cut, most bytes first."""
        totals = self._totals(cut_names(self._manifest))
        return sorted(totals, key=lambda total: (-total.num_bytes, total.name))

    def _totals(self, names: Sequence[str]) -> list[TensorTotals]:
        """Sums the stored tensors up by group; `names` has the group of each, in the order of the manifest. Names after
        those of the last stored tensor are of aliases, which do not count.
        """
        groups = {name: group for group, name in enumerate(dict.fromkeys(names))}
        group_of = np.fromiter(map(groups.__getitem__, names), np.int64, len(names))[: len(self._stored)]
        sizes = self._manifest.table.sizes
        counted = np.ones_like(group_of), sizes.num_elements, self._num_chunks, sizes.byte_lengths
        sums = [_sum_by(group_of, len(groups), column) for column in counted]
        return list(map(TensorTotals, groups, *sums))

    def record(self, tensor: TensorEntry) -> TensorRecord:
        return self._manifest.tensors[tensor.stored_fqn]

    @cached_property
    def _chunks_by_fqn(self) -> dict[str, int]:
        return dict(zip(self._stored, self._num_chunks.tolist(), strict=True))

    def num_chunks_of(self, tensor: TensorEntry) -> int:
        return self._chunks_by_fqn[tensor.stored_fqn]

    def is_covered_once(self, tensor: TensorEntry) -> bool:
        """Returns True if the chunks of a tensor cover it exactly once."""
        return self._manifest.table.find_fault(tensor.stored_fqn) is None

    def chunk_json(self, chunk: Chunk) -> dict[str, Any]:
        """Returns a chunk with the name of its file."""
        return {
            **chunk.region._asdict(),
            "file": self._manifest.files[chunk.file].name,
            "byte_offset": chunk.byte_offset,
            "byte_length": chunk.byte_length,
            "codec": chunk.codec,
        }

    def select(self, patterns: Sequence[str], *, path: str) -> list[TensorEntry]:
        """Returns the tensors with one of these FQNs, or matching one of these globs, in natural order; all if there is
        no pattern. A pattern that is an FQN is not taken as a glob.

        Raises CheckpointNotFoundError (not_found) for a pattern that no tensor matches.
        """
        if not patterns:
            return self.tensors
        names = {tensor.fqn for tensor in self.tensors}
        wanted: set[str] = set()
        for pattern in patterns:
            found = {pattern} & names or {name for name in names if fnmatchcase(name, pattern)}
            if not found:
                raise no_such_tensor(path, pattern, names)
            wanted |= found
        return [tensor for tensor in self.tensors if tensor.fqn in wanted]


class NaturalOrder:
    """Sort keys of names, by which numbers in names count as numbers. Names of modules share most of their parts, so
    the parts are sorted first, and a name's key has a character for each of its parts.
    """

    def __init__(self, names: Iterable[str]) -> None:
        parts = sorted({part for name in names for part in name.split(".")}, key=_natural_key)
        self._is_text = len(parts) <= sys.maxunicode
        places = range(len(parts))
        self._places = dict(zip(parts, map(chr, places) if self._is_text else places, strict=True))

    def key(self, name: str) -> str | list[int]:
        """Returns the sort key of one of the names that were given."""
        places: Any = [self._places[part] for part in name.split(".")]
        return "".join(places) if self._is_text else places


def in_natural_order(names: Collection[str]) -> list[str]:
    """Sorts names as NaturalOrder does."""
    return sorted(names, key=NaturalOrder(names).key)


def first_in_natural_order(names: Collection[str], count: int) -> list[str]:
    """Returns the first `count` of `in_natural_order`. Sorts only the parts of names that the first ones have."""
    found: list[str] = []
    pending = [(names, 0)]
    while pending and len(found) < count:
        group_names, start = pending.pop()
        if len(group_names) == 1:
            found += group_names
            continue
        groups: dict[str, list[str]] = {}
        for name in group_names:
            if len(name) < start:  # the others begin with it and a dot
                found.append(name)
            else:
                end = name.find(".", start)
                groups.setdefault(name[start : len(name) if end < 0 else end], []).append(name)
        parts = sorted(groups, key=_natural_key, reverse=True)
        pending += [(groups[part], start + len(part) + 1) for part in parts]
    return found[:count]


def _entry_of(fqn: str) -> str:
    """Returns the name of the entry of the state to which a stored tensor belongs."""
    entry = fqn.partition(".")[0]
    if "@" not in entry:
        return entry
    from bytecheckpoint.adapters.plain.plain_data import without_content  # noqa: PLC0415 - few have such names

    return without_content(fqn).partition(".")[0]


def _sum_by(group_of: np.ndarray, num_groups: int, column: np.ndarray) -> list[int]:
    # Each number fits into an int64; the sum of made-up numbers need not.
    is_safe = column.sum(dtype=np.float64) < 1 << 62
    sums = np.zeros(num_groups, np.int64 if is_safe else object)
    np.add.at(sums, group_of, column if is_safe else column.astype(object))
    found: list[int] = sums.tolist()
    return found


def _natural_key(text: str) -> list[str | tuple[int, str]]:
    parts: list[Any] = _DIGITS.split(text)
    parts[1::2] = [(int(digits[:18]), digits) for digits in parts[1::2]]
    return parts


def no_such_tensor(path: str, pattern: str, names: Iterable[str]) -> CheckpointNotFoundError:
    """Returns the error about a name or glob that matches none of `names`; it lists near ones."""
    last = pattern.rstrip(".").rsplit(".", 1)[-1]
    names = list(names)
    if below := [name for name in names if name.startswith(f"{pattern}.")]:
        shown = and_more(in_natural_order(below), 5)
        what = f"{pattern!r} is no tensor and no plain value of {path}, but stands above {len(below):,}: {shown}"
        return CheckpointNotFoundError(what, kind="not_found", path=path)
    near = [name for name in names if pattern in name] or [name for name in names if name.endswith(last)]
    all_names = "`bcp show CKPT --limit 0` lists all tensors, with --objects plain values"
    hint = f"near matches: {and_more(in_natural_order(near), 5)}" if near else all_names
    what = f"nothing in {path} is named or matches {pattern!r}; {hint}"
    return CheckpointNotFoundError(what, kind="not_found", path=path)


def file_rows(manifest: Manifest) -> list[dict[str, Any]]:
    """Returns name, size, and numbers of checksums and chunks of each data file, in the order of the manifest."""
    return [
        {
            "name": file.name,
            "num_bytes": file.byte_length,
            "num_extents": len(file.extent_lengths),
            "num_chunks": num_chunks,
        }
        for file, num_chunks in zip(manifest.files, chunks_by_file(manifest), strict=True)
    ]


def plain_objects(opened: Opened, *, max_text: int) -> list[PlainSummary]:
    """Returns all plain values in natural order, with texts of at most `max_text` characters; values of single ranks
    come with their rank. Tensors in values of single ranks are read from the data files, other tensors are left out.
    Raises the errors of a load.
    """
    # Decoding them needs torch, and no other command does.
    from bytecheckpoint.adapters.plain.manifest_trees import stored_leaves  # noqa: PLC0415
    from bytecheckpoint.adapters.plain.plain_data import decode_plain  # noqa: PLC0415
    from bytecheckpoint.checkpoint import Checkpoint  # noqa: PLC0415
    from bytecheckpoint.loading.read import Source  # noqa: PLC0415
    from bytecheckpoint.manifest.plain_wire import TensorRef  # noqa: PLC0415
    from bytecheckpoint.options import LoadOptions  # noqa: PLC0415

    source = Source(opened.store, opened.folder, opened.manifest, LoadOptions(), is_exchanged=False, path=opened.path)
    checkpoint = Checkpoint(source)
    trees = {fqn: stored_leaves(decode_plain(data), fqn) for fqn, data in opened.manifest.objects.items()}
    values = [item for of_tree in trees.values() for item in of_tree.items() if not isinstance(item[1], TensorRef)]
    found = [_plain(fqn, None, value, max_text) for fqn, value in values]
    for fqn in opened.manifest.rank_objects:
        found += [_plain(fqn, rank, value, max_text) for rank, value in checkpoint.rank_values(fqn).items()]
    order = NaturalOrder(plain.fqn for plain in found)
    return sorted(found, key=lambda plain: (order.key(plain.fqn), -1 if plain.rank is None else plain.rank))


def _plain(fqn: str, rank: int | None, value: Any, max_text: int) -> PlainSummary:
    return PlainSummary(fqn, rank, type(value).__name__, *plain_value(value, max_text=max_text))


def plain_value(value: Any, *, max_text: int = MAX_TEXT) -> tuple[Any, str]:
    """Returns a plain value, or its text if JSON cannot hold it, and its text, of at most `max_text` characters."""
    text = _describe(value, max_text)
    return value if _is_json(value) else text, text


def _describe(value: Any, max_text: int) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", None)
    if shape and dtype is not None:
        return f"{str(dtype).removeprefix('torch.')} {shape_text(shape)}"
    return shortened(repr(value), max_text)


def _is_json(value: Any) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    if type(value) in (list, tuple):
        return all(map(_is_json, value))
    if isinstance(value, Mapping):
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str)
