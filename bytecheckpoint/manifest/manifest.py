"""The manifest: a whole checkpoint except the bytes of its tensors. It knows no mesh and no framework, and no rank but
those whose own values `rank_objects` holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from bytecheckpoint.manifest.records import DataFile, TensorRecord, columns_of
from bytecheckpoint.manifest.table import TensorTable
from bytecheckpoint.manifest.validation import (
    bad_manifest,
    check_files,
    check_link,
    check_save_id,
    check_tensors,
    refuse_deep_nesting,
    shown,
)

Described = tuple[str, tuple[int, ...]]
"""Dtype and global shape of a tensor."""


class MapNotes(NamedTuple):
    """Notes about a checkpoint that is seen with other tensors, as through a name map. No manifest on a disk holds
    them.
    """

    zeros_file: int | None = None
    """The number of a file that does not exist: chunks in it are zeros, as rows that pad a vocabulary."""
    left_out: Mapping[str, str] = {}
    """FQN of plain data that is not seen -> the reason."""
    packed: Mapping[str, Described] = {}
    """FQN of a tensor without chunks -> its dtype, MXFP4, and its shape: other tensors hold its elements."""


class ManifestOutline(NamedTuple):
    """A manifest without what grows with a checkpoint, for lists of many."""

    save_id: str
    step: int | None
    foreign_format: str
    num_bytes: int
    """Bytes of all its files."""
    num_tensors: int
    metadata: Mapping[str, Any]
    provenance: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint except the bytes of its tensors."""

    save_id: str
    """Empty for a checkpoint of another format, which has no save ids; a link to one has an id of its own."""
    step: int | None = None
    foreign_format: str = ""
    """The format of files that another program wrote, as formats/detect.py names it. Empty for files of this library
    (OWN_FORMAT through a name map). Unless it is empty, chunks may share bytes: tensors can be views of one memory."""
    linked_to: str = ""
    """The folder, as absolute path or URL, below which the files are; empty where that is the checkpoint's own. A
    reader follows it only if its caller asks for that."""
    files: Sequence[DataFile] = ()
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    """By FQN. If the manifest was decoded or planned, a `TensorTable`, which makes records on demand."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """FQN of a tied tensor -> the FQN in `tensors` under which it is stored."""
    objects: Mapping[str, bytes] = field(default_factory=dict)
    """Plain data by FQN, each encoded on its own: see adapters/plain and docs/format.md."""
    rank_objects: Mapping[str, Mapping[int, bytes]] = field(default_factory=dict)
    """Plain data that differs from rank to rank: FQN -> rank -> encoded value."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The user's metadata, given to `save`."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Versions, world size and time of the save. Loading never reads it."""
    map_notes: MapNotes = field(default_factory=MapNotes)
    """Empty unless the checkpoint is seen with other tensors than it has."""

    @property
    def outline(self) -> ManifestOutline:
        lengths = [file.byte_length for number, file in enumerate(self.files) if number != self.map_notes.zeros_file]
        facts = self.save_id, self.step, self.foreign_format, sum(lengths), len(self.tensors)
        return ManifestOutline(*facts, self.metadata, self.provenance)

    @cached_property
    def table(self) -> TensorTable:
        """The tensors as columns. Records are put into columns once, on the first use of this property."""
        if isinstance(self.tensors, TensorTable):
            return self.tensors
        return TensorTable(
            list(self.tensors),
            columns_of(self.tensors),
            self.files,
            may_share_bytes=bool(self.foreign_format),
            is_checked=True,  # this process made the records
        )

    def describe(self, fqn: str) -> Described:
        """Returns the dtype and the global shape of a tensor without looking at its chunks. Raises KeyError unless
        `fqn` is in `tensors`: an alias is not.
        """
        return self.map_notes.packed.get(fqn) or self.table.describe(fqn)

    def describe_all(self) -> Mapping[str, Described]:
        """Returns dtype and global shape of every tensor, by FQN."""
        packed = self.map_notes.packed
        return {**self.table.describe_all(), **packed} if packed else self.table.describe_all()

    def describe_each(self, fqns: Sequence[str]) -> list[Described]:
        """Returns dtype and global shape of each of these tensors."""
        return list(map(self.describe, fqns)) if self.map_notes.packed else self.table.describe_each(fqns)


def check_outline(outline: ManifestOutline) -> None:
    """Checks the outline of a decoded manifest. Raises as `check_manifest` does."""
    if outline.save_id:
        check_save_id(outline.save_id)
    elif not outline.foreign_format:
        raise bad_manifest("its save id is empty")
    if outline.step is not None and not 0 <= outline.step < 1 << 63:
        raise bad_manifest(f"its step is {outline.step}, not a number from 0 to 2^63 - 1")
    refuse_deep_nesting(outline.metadata, "metadata")
    refuse_deep_nesting(outline.provenance, "provenance")


def check_manifest(manifest: Manifest) -> None:
    """Checks all of a decoded manifest but its chunks.

    Raises CheckpointCorruptError (bad_manifest) or UnsafeCheckpointError (path_escape, limits_exceeded).
    """
    check_outline(manifest.outline)
    if manifest.linked_to:
        check_link(manifest.linked_to)
    for fqn, by_rank in manifest.rank_objects.items():
        if any(rank < 0 for rank in by_rank):
            raise bad_manifest(f"it holds {shown(fqn)} for rank {min(by_rank)}")
    for alias, target in manifest.aliases.items():
        if target not in manifest.tensors:
            raise bad_manifest(f"{shown(alias)} is said to be tied to {shown(target)}, which is not a tensor in it")
        if alias in manifest.tensors:
            raise bad_manifest(f"{shown(alias)} is both a tensor of its own and tied to {shown(target)}")
    check_files(manifest.files)
    check_tensors(manifest.table.columns, list(manifest.tensors))
