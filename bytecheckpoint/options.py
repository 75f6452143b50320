"""All options of a save or a load, with their defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from bytecheckpoint.manifest.frames import CODECS
from bytecheckpoint.runtime.progress import Progress

_MiB = 1 << 20
_Options = TypeVar("_Options")

SNAPSHOTS = ("auto", "copy", "lazy")
DIRECT = ("auto", "off")
EXCHANGES = ("auto", "on", "off")
FINITE_CHECKS = ("off", "warn", "refuse")
MIN_SCRATCH_BYTES = 8 * _MiB
MIN_STAGING_BYTES = 32 * _MiB
"""Two blocks: one is written while the next is staged. Tensors may be larger: they are staged block by block."""
_MAX_S = 1e8
"""Three years: sockets and locks can wait that long, and a little longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Checkpoints in the memory of the hosts: see docs/memory.md. Checked on creation, as SaveOptions. All but `root`
    and `failure_domain` must be the same on all ranks.
    """

    copies: int = 2
    """Number of hosts, in different failure domains, that hold each byte. 1 survives the death of processes, 2 that of
    a host."""
    failure_domain: str | None = None
    """Label of what this host fails together with, such as its rack; the same on all ranks of a host. None for each
    host by itself."""
    parity: int = 0
    """Blocks of parity per group of hosts instead of copies, with `copies=1`: less memory, slower recovery of a host.
    0 or 1."""
    root: str | os.PathLike[str] = "/dev/shm/bytecheckpoint"  # noqa: S108  a host's memory is shared, folders in it are private
    """A folder in tmpfs that outlives the processes. Ranks that share it are on one host. Stored as a str."""
    max_bytes: int | None = None
    """Most bytes that the job may hold on one host. None for as much as the host and its container allow."""

    def __post_init__(self) -> None:
        _check_at_least("Memory", "copies", self.copies, 1)
        _check_at_least("Memory", "parity", self.parity, 0)
        if self.parity > 1 or (self.copies > 1 and self.parity):
            raise ValueError(
                f"Memory(copies={self.copies}, parity={self.parity}): parity takes the place of copies beyond the "
                "first; give copies=2, or copies=1 with parity=1"
            )
        _check_label("Memory.failure_domain", self.failure_domain)
        root = _checked_folder("Memory.root", self.root)
        if root is None or not os.path.isabs(root):  # noqa: PTH117 - it is kept as a str
            raise ValueError(f"Memory.root takes an absolute path of a folder in tmpfs, not {self.root!r}")
        object.__setattr__(self, "root", root)
        if self.max_bytes is not None:
            _check_at_least("Memory", "max_bytes", self.max_bytes, _MiB)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """Options of a save. Checked on creation: a ValueError names the field, its value and the values that it takes."""

    overwrite: bool = False
    """Replace a committed checkpoint at the same place, in one atomic step, instead of refusing. Stores without such a
    step refuse this option (docs/object-stores.md).
    """
    snapshot: Literal["auto", "copy", "lazy"] = "auto"
    """Snapshot with which an asynchronous save keeps the state as it was at the call.

    `copy` copies into staging memory before `save` returns: always safe. `lazy` copies in the background: the state
    must not change before `handle.staged()` returns. Each step of a torch optimizer of the process waits for that by
    itself, and buffers are copied before `save` returns. An optimizer of the state that does not run torch's step
    hooks, or that is `capturable` and so may be replayed from a CUDA graph, is refused (`unsupported_value`). If this
    rank has saved the same before, `save` returns before the ranks have agreed, and the handle raises their
    disagreement. `auto` is `copy`.
    """
    staging_bytes: int | None = None
    """Host memory, in bytes, that an asynchronous save may stage in. A larger state goes through it in waves, and
    `save` returns when the last has been staged. None for as much as this rank writes."""
    max_file_bytes: int = 8 << 30
    """Greatest length of a data file, in bytes. A larger chunk gets a file of its own, or is cut if it is
    compressed."""
    writer_threads: int = 3
    """Writes in flight per rank to a local folder, each from a block of 16 MiB. To S3, as many parts of a file are in
    flight, at least 8, or `max_concurrency` of `storage_options`; but a synchronous save has only as many blocks as
    this, at least 3. To any other URL, a file is one stream."""
    codec: str | Mapping[str, str] | tuple[tuple[str, str], ...] = "none"
    """Compression of tensors: `none`, or `zstd`, which makes bfloat16 weights about a third smaller.

    Or a mapping from globs of FQNs to one of them: the first glob that matches counts, and a tensor that none matches
    is not compressed. It is stored as a tuple of pairs. A chunk that does not get smaller is stored raw. A file of
    compressed tensors holds at most 64 MiB of them, and larger ones are cut. Each file is put together in host memory,
    beyond `staging_bytes`, while the one before it is written: 128 MiB in all.
    """
    local_stage: str | os.PathLike[str] | None = None
    """A folder on a disk of this host (`/nvme/stage`), which may differ from rank to rank, or None.

    Data is made durable there first, and the staging memory is free for the next save: then `handle.local()` returns.
    The data is uploaded to the path and the checkpoint committed: then `handle.result()` returns. One save is uploaded
    at a time, while the next one may be written to the disk. The copies are deleted after the commit. `bcp.recover`
    finishes saves after a crash. Files for which the disk has no room are written to the path directly. Stored as a
    str.
    """
    reuse: bool = False
    """Do not write data files again that the newest checkpoint under the same root has already: a folder gets a hard
    link to them, S3 copies them itself. Every checkpoint stays complete when others are deleted; but damage on a disk
    hits all checkpoints that share the file. Other stores get every file.

    Frozen parameters of modules (`requires_grad=False`), and what two saves of this process have found unchanged, are
    in files of their own, whose 128-bit digests are compared. Does not go with `staging_bytes`, because bytes in waves
    cannot be compared before they are written.
    """
    timeout_s: float = 600.0
    """Seconds that a rank waits for the others, after its own part, before it raises `rank_missing`. It waits up to 5 s
    more for rank 0, which finds out which rank is missing. A rank without an answer by then names rank 0, even if
    another rank is missing for which rank 0 began to wait more than 5 s later than this rank.

    A failed request to S3 is retried for half of this time.
    """
    on_progress: Callable[[Progress], object] | None = None
    """Called with the Progress of this rank: when a phase begins, and at most ten times a second while bytes are
    written; from any thread, one call at a time. It should return at once. If it raises, that is logged and it is not
    called again. `bcp.progress_bar()` returns one."""
    check_finite: Literal["off", "warn", "refuse"] = "off"
    """Look for NaN and infinite values in floating-point and complex tensors before anything is written. `warn` logs
    their names; `refuse` raises CheckpointSaveError (`not_finite`) on every rank. It reads each tensor once in the
    call; tensors on a device make it wait for them. It does not look into RankLocal values and NumPy arrays."""
    memory: Memory | None = None
    """Hold each save in the memory of the hosts as well, where `bcp.resume` finds it, or with `to="memory"` there
    alone. Takes no `codec`, and `staging_bytes` of at least what a rank writes."""

    def __post_init__(self) -> None:
        _check_bool("SaveOptions", "overwrite", self.overwrite)
        _check_callable("SaveOptions", "on_progress", self.on_progress)
        _check_choice("SaveOptions", "check_finite", self.check_finite, FINITE_CHECKS)
        _check_snapshot(self.snapshot)
        if self.staging_bytes is not None:
            _check_at_least("SaveOptions", "staging_bytes", self.staging_bytes, MIN_STAGING_BYTES)
        _check_at_least("SaveOptions", "max_file_bytes", self.max_file_bytes, _MiB)
        _check_at_least("SaveOptions", "writer_threads", self.writer_threads, 1)
        object.__setattr__(self, "codec", _checked_codec("SaveOptions.codec", self.codec))
        stage = _checked_folder("SaveOptions.local_stage", self.local_stage)
        # Absolute, so that recovery looks there also when the working directory has changed.
        object.__setattr__(self, "local_stage", stage and os.path.abspath(stage))  # noqa: PTH100 - it is kept as a str
        _check_bool("SaveOptions", "reuse", self.reuse)
        if self.reuse and self.staging_bytes is not None:
            raise ValueError("SaveOptions.reuse=True compares whole files, and takes no staging_bytes: leave one out")
        _check_positive("SaveOptions", "timeout_s", self.timeout_s)
        _check_memory(self.memory, self.codec)


@dataclass(frozen=True, slots=True)
class NameMap:
    """Names of one framework for the tensors of another, see docs/name_maps.md. The fields are checked on creation: a
    ValueError names the field, its value and the values that it takes. The map that `name` names is read by the load.
    """

    name: str | os.PathLike[str]
    """Name of a map of this library, such as `megatron-gpt-to-hf-llama`, or path of a map of your own. It is applied in
    the direction that fits the checkpoint's names. Stored as a str."""
    options: Mapping[str, int | str] | tuple[tuple[str, int | str], ...] = ()
    """Numbers that the checkpoint does not have, by name: `{"heads": 32}`. Stored as a tuple of pairs."""
    keep_unmapped: bool = False
    """Keep the names of tensors of the model that the map does not know, instead of raising an error."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _checked_map_name(self.name))
        object.__setattr__(self, "options", _checked_map_options(self.options))
        _check_bool("NameMap", "keep_unmapped", self.keep_unmapped)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """Options of a load. Checked on creation: a ValueError names the field, its value and the values that it takes."""

    verify: bool = True
    """Compare the checksum of every byte that is used; a difference raises CheckpointCorruptError.

    A checksum covers up to 1 MiB, or 256 KiB in a chunk of 16 MiB or more of a checkpoint of up to 256 GiB. Each
    contiguous range may cost as much more at each end.
    """
    exchange: Literal["auto", "on", "off"] = "auto"
    """Exchange of bytes that several ranks need: one reader rank reads them. The others of its host copy them out of
    memory that they share, and one rank of each other host receives them for all there.

    `auto` exchanges if the checkpoint is at a URL. A local folder is in the page cache, from which every rank of a host
    reads faster than over the network. Rank 0's option counts for all.
    """
    reader_threads: int = 4
    """Reads in flight per rank."""
    direct: Literal["auto", "off"] = "off"
    """`auto` reads from a local folder straight into CUDA memory, by GPUDirect Storage, what lies in one piece there,
    if kvikio is installed and `verify` is False: checksums are computed on the host, which such bytes never reach. All
    else is read as with `off`.
    """
    max_gap_bytes: int | None = None
    """Greatest gap, in bytes, across which two ranges of a file are read as one; the bytes between them are dropped.
    None for as much as the storage reads in the time of another request: 125 kB of a local file, 2 MB of a URL."""
    scratch_bytes: int = 64 * _MiB
    """Host memory per rank, in bytes, for reads that cannot go straight into their target, and for bytes sent to other
    ranks. At a URL other than S3 also for all bytes on the way to their target, because fsspec allocates its own
    memory."""
    follow_links: bool = False
    """Read files outside the checkpoint's folder, to which a manifest made by `bcp convert --link` points. The author
    of the manifest chose these files: use this only if you trust the author. If the link is on a local path,
    `storage_options` are for the place that it points to."""
    timeout_s: float = 600.0
    """Seconds that a rank waits for the others, after its own part, before it raises `rank_missing`. It waits up to 5 s
    more for rank 0, which finds out which rank is missing. A rank without an answer by then names rank 0, even if
    another rank is missing for which rank 0 began to wait more than 5 s later than this rank.

    It waits longer for bytes from a reader rank, as long as the reader rank goes on reading and no read takes this
    time. A failed request to S3 is retried for half of this time.
    """
    name_map: NameMap | str | os.PathLike[str] | None = None
    """Read the checkpoint as another framework would have saved it: the name or path of a map, or a NameMap. `key_map`,
    `include` and `exclude` get the mapped names. The same on all ranks. Stored as a NameMap.
    """
    on_progress: Callable[[Progress], object] | None = None
    """Called with the Progress of this rank, as for SaveOptions; not for what is read of an opened checkpoint. Bytes
    are counted by ranges that were read; those that other ranks pass on do not count."""

    def __post_init__(self) -> None:
        _check_callable("LoadOptions", "on_progress", self.on_progress)
        if self.name_map is not None and not isinstance(self.name_map, NameMap):
            object.__setattr__(self, "name_map", NameMap(self.name_map))
        _check_bool("LoadOptions", "verify", self.verify)
        _check_choice("LoadOptions", "exchange", self.exchange, EXCHANGES)
        _check_choice("LoadOptions", "direct", self.direct, DIRECT)
        _check_at_least("LoadOptions", "reader_threads", self.reader_threads, 1)
        if self.max_gap_bytes is not None:
            _check_at_least("LoadOptions", "max_gap_bytes", self.max_gap_bytes, 0)
        _check_bool("LoadOptions", "follow_links", self.follow_links)
        _check_at_least("LoadOptions", "scratch_bytes", self.scratch_bytes, MIN_SCRATCH_BYTES)
        _check_positive("LoadOptions", "timeout_s", self.timeout_s)


def given_or_default(options: object, kind: type[_Options], *, argument: str = "options") -> _Options:
    """Returns the options, or the defaults for None. Raises TypeError, which names the argument, for anything that is
    not of this kind.
    """
    if options is None:
        return kind()
    if not isinstance(options, kind):
        name = kind.__name__
        raise TypeError(f"{argument} takes {name}, not {_typed(options)}; nothing was done: pass bcp.{name}(...)")
    return options


def _typed(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"


def _check_memory(value: object, codec: object) -> None:
    if value is None:
        return
    if not isinstance(value, Memory):
        raise ValueError(f"memory takes a bcp.Memory, such as bcp.Memory(copies=1), or None, not {value!r:.100}")
    if codec != "none":
        raise ValueError(
            f"SaveOptions(codec={codec!r}) does not go with memory: what memory holds is the data file itself, which "
            "is only known when compression has ended; leave out one of the two"
        )


def _check_label(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"{name} takes a label, or None, not {value!r}")


def _check_callable(owner: str, name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise ValueError(f"{owner}.{name} takes a function, or None, not {value!r}")


def _check_choice(owner: str, name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}.{name} takes one of {', '.join(map(repr, choices))}, not {value!r}")


def _check_snapshot(value: object) -> None:
    if value == "fork":
        advice = "take 'lazy', which holds training as briefly, or 'copy', which is safe whatever changes the state"
        raise ValueError(f"SaveOptions.snapshot='fork' was removed: {advice}")
    _check_choice("SaveOptions", "snapshot", value, SNAPSHOTS)


def _checked_codec(name: str, value: object) -> str | tuple[tuple[str, str], ...]:
    """Returns the option in an immutable form. Raises ValueError for all but a codec, or codecs by glob."""
    if isinstance(value, str) and value in CODECS:
        return value
    choices = " or ".join(map(repr, CODECS))
    if not isinstance(value, Mapping | tuple):
        raise ValueError(f"{name} takes {choices}, or a mapping from globs of FQNs to one of them, not {value!r}")
    rules = tuple(value.items()) if isinstance(value, Mapping) else value
    for rule in rules:
        if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str):
            raise ValueError(f"{name} takes globs of FQNs, each with {choices}, not {rule!r}")
        if not isinstance(rule[1], str) or rule[1] not in CODECS:
            raise ValueError(f"{name} takes {choices} for {rule[0]!r}, not {rule[1]!r}")
    return rules


def _checked_map_name(value: object) -> str:
    """Returns the name of a map, or its path with ~ expanded. No map is looked for."""
    name = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(name, str) and name and "\0" not in name:
        return os.path.expanduser(name)  # noqa: PTH111 - it is kept as a str
    raise ValueError(f"NameMap.name takes the name or the path of a map, not {value!r}")


def _checked_map_options(value: object) -> tuple[tuple[str, int | str], ...]:
    """Returns the options in an immutable form. Raises ValueError for values that cannot be options."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, tuple) and all(map(_is_map_option, pairs)):
        return pairs
    raise ValueError(f"NameMap.options takes integers and texts by name, not {value!r}")


def _is_map_option(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is str and type(pair[1]) in {int, str}


def _checked_folder(name: str, value: object) -> str | None:
    """Returns the path with ~ expanded, or None for None. The folder need not exist. Raises ValueError for a URL."""
    folder = os.fspath(value) if isinstance(value, os.PathLike) else value
    if folder is None:
        return None
    if isinstance(folder, str) and folder and "://" not in folder and "\0" not in folder:
        return os.path.expanduser(folder)  # noqa: PTH111 - it is kept as a str
    raise ValueError(f"{name} takes a folder on a disk of this host, or None, not {value!r}")


def _check_bool(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{owner}.{name} takes True or False, not {value!r}")


def _check_at_least(owner: str, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}.{name} takes an integer of at least {least}, not {value!r}")


def _check_positive(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_S:
        raise ValueError(f"{owner}.{name} takes a number of seconds above 0 and of at most {_MAX_S:g}, not {value!r}")
