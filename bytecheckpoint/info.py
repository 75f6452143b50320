"""Facts of a checkpoint, a save and a load, as the public functions return them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from bytecheckpoint.manifest import Manifest, ManifestOutline
from bytecheckpoint.runtime.notebook_html import facts_html

OWN_FORMAT = "bytecheckpoint"
INTEGRATION = "bcp_integration"
"""Key in the metadata of what an integration has saved."""
LEFT_OUT = "left_out"
"""Key in the metadata of a foreign checkpoint: what its reader leaves out, and why, as a text."""
Outcome: TypeAlias = Literal["committed", "removed", "kept", "under_way"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint, or one that only the memory of the hosts holds: see `tier`."""

    path: str
    """Path or URL of its folder."""
    step: int | None
    save_id: str
    """New for every save; part of the names of its data files. Empty if another program wrote the checkpoint."""
    format: str
    """`bytecheckpoint`, or the format of another program, such as `safetensors`: docs/foreign.md lists them."""
    num_bytes: int
    """Bytes of all its data files, headers included."""
    num_tensors: int
    world_size: int | None
    """Number of ranks that saved it, or that converted or linked it; None if it does not say."""
    created_at: datetime | None
    """Time of the commit, by the clock of the committing rank."""
    metadata: Mapping[str, Any]
    """The `metadata` of the save, with additions as in `Checkpoint.metadata`."""
    reused_bytes: int = 0
    """From `save` with `SaveOptions(reuse=True)` only: bytes of data files that an earlier checkpoint had already."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """From `CheckpointManager.best` only: metrics by name, also those that were reported after the save."""
    tier: Literal["storage", "memory"] = "storage"
    """`memory` for a save that only the memory of the hosts holds: from `save(to="memory")` only."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """From `save` only: seconds of each phase on this rank. `wait` for an earlier save, `plan`, `stage`, `write` (with
    it `checksum` and `compress`, summed over its threads), `upload` if there is a local stage, `commit`, `stall`, for
    which the call blocked its thread, and `total`."""

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes of the whole checkpoint per second from the call to the commit. None unless from a save."""
        total = self.seconds.get("total")
        return self.num_bytes / total if total else None

    def _repr_html_(self) -> str:
        return _facts_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInfo:
    """A save that is not committed yet, and whose data is durable: in the local stages of all ranks, or, where a disk
    had no room, at the path.
    """

    path: str
    """Path or URL at which it will be committed."""
    step: int | None
    save_id: str
    folder: str | None
    """Folder of this rank on the disk of its host; None if that had no room at all."""
    num_bytes: int
    """Bytes of the data files of all ranks."""
    direct_ranks: Sequence[int]
    """Ranks whose disk had no room for all of their files: the files without room are at the path already."""

    def _repr_html_(self) -> str:
        return _facts_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredSave:
    """A save that `recover` found in the local stages, and its outcome."""

    path: str
    step: int | None
    save_id: str
    outcome: Outcome
    """`committed` now; `removed`, because there is nothing to finish; `kept`, because parts of it are missing here;
    `under_way`, because it is of a living process."""
    what: str
    """The reason, in words."""

    def _repr_html_(self) -> str:
        return _facts_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Result of a load for one `DataLoaderState`."""

    num_streams: int
    """Streams of all ranks; one for each rank if the loader's state is not of streams."""
    num_moved: int = 0
    """Streams that another data-parallel rank had when they were saved."""
    saved_size: int
    """Number of data-parallel ranks that saved them."""
    size: int
    """Number of data-parallel ranks that loaded them."""
    elastic: str
    """`elastic` of the DataLoaderState of the load."""
    repeated_at_most: int = 0
    """Samples, over all ranks, that come again: with `at_least_once`, on another number of ranks."""
    restarted: bool = False
    """True if the loader was left at its start: with `restart`, on another number of ranks."""

    def _repr_html_(self) -> str:
        return _facts_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedData:
    """Positions of the data loaders of all ranks after one step, as `CheckpointManager.log_data` has logged them."""

    step: int
    """Step after which they were logged."""
    base: int | None
    """Newest step that was durable then, on rank 0; None if there was none."""
    loaders: Mapping[str, Mapping[str, Any]]
    """Position of each stream by its id, by the loader's FQN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Result of a load. With strict=False, it also lists the keys that could not be loaded."""

    path: str
    step: int | None
    save_id: str
    num_tensors: int
    """Tensors of which this rank loaded all or a part."""
    num_bytes_read: int
    """Bytes that this rank read from storage."""
    num_bytes_received: int
    """Bytes that this rank received from reader ranks."""
    missing: Sequence[str] = ()
    """State FQNs that the checkpoint lacks; left as they were."""
    unexpected: Sequence[str] = ()
    """Checkpoint FQNs, renamed by key_map, that the state lacks."""
    ignored: Sequence[str] = ()
    """Top-level names of the checkpoint, renamed by key_map, that the state does not have: nothing below was loaded."""
    mismatched: Sequence[str] = ()
    """State FQNs whose shape or dtype differs, or whose values conflict, each with the reason; left as they were."""
    cast: Sequence[str] = ()
    """State FQNs that were loaded into another dtype."""
    skipped: Sequence[str] = ()
    """State FQNs that were not loaded because of include or exclude."""
    unused: Sequence[str] = ()
    """Rules of include, exclude and key_map that matched nothing, on any rank."""
    data: Mapping[str, DataReport] = field(default_factory=dict)
    """For each `DataLoaderState` that was loaded, by its FQN, how its streams were dealt out."""
    passed_over: Mapping[int, str] = field(default_factory=dict)
    """From `CheckpointManager.restore` only: newer steps that could not be restored, each with the reason."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """From `resume` only: data files that all ranks together read from `memory` of the host that wanted them, from a
    `peer`, from `parity`, from a `local` stage and from `storage`."""
    seconds: float = 0.0
    """Seconds from the call to its end, on this rank."""
    random_restores: Sequence[Callable[[], None]] | None = field(default=None, repr=False, compare=False)
    """Calls that `restore_rng` makes; None if the state has no random number generators."""

    def restore_rng(self) -> None:
        """Sets the random number generators of the loaded state once more: those of `RngState`, and those in
        `RankLocal`.

        Loaders draw from them when they are first read, after the load: a base seed for their workers, the order of an
        epoch. Call this on every rank when the first batch has been fetched, before the first step, and the step draws
        what it would have drawn without the interruption. A rank that the save did not have keeps what it has, but for
        `RngState(elastic="fold")`.

        Raises ValueError if the state of the load had no random number generators.
        """
        if self.random_restores is None:
            raise ValueError(
                "the state of this load had no random number generators, so none can be restored; put "
                '{"rng": bcp.RngState()} into the state of saves and loads'
            )
        for restore in self.random_restores:
            restore()

    def _repr_html_(self) -> str:
        return _facts_html(self)


def _facts_html(facts: CheckpointInfo | LocalInfo | RecoveredSave | DataReport | LoadReport) -> str:
    """Returns the fields of a record as a table, for notebooks."""
    shown = {each.name: getattr(facts, each.name) for each in fields(facts) if each.repr}
    return facts_html(type(facts).__name__, shown)


def describe_checkpoint(manifest: Manifest | ManifestOutline, *, path: str) -> CheckpointInfo:
    """Returns the facts of a manifest as the public functions return them. What only a save or a manager knows, such as
    `seconds` and `metrics`, has its default.
    """
    outline = manifest.outline if isinstance(manifest, Manifest) else manifest
    provenance = outline.provenance
    created = provenance.get("created_at")
    world_size = provenance.get("world_size")
    return CheckpointInfo(
        path=path,
        step=outline.step,
        save_id=outline.save_id,
        format=outline.foreign_format or OWN_FORMAT,
        num_bytes=outline.num_bytes,
        num_tensors=outline.num_tensors,
        world_size=world_size if isinstance(world_size, int) else None,
        created_at=_parse_time(created) if isinstance(created, str) else None,
        metadata=outline.metadata,
    )


def _parse_time(text: str) -> datetime | None:
    """Returns a time with its zone, UTC if the text has none: times are compared. None for a text that is no time."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
