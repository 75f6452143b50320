"""Folders that hold a folder of torch.distributed.checkpoint for the model and one for the optimizer: those of the
open-source ByteCheckpoint, and those of Hugging Face's Accelerate and Trainer for FSDP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.formats.frameworks.dcp_folder import METADATA_NAME, read_state, take_apart
from bytecheckpoint.formats.manifest_builder import ManifestBuilder, two_of
from bytecheckpoint.formats.torch_save.files import missing_file, open_saved
from bytecheckpoint.formats.torch_save.unpickler_globals import find_value
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store


class _Kind(NamedTuple):
    """How a program names the folders."""

    members: Mapping[str, str]
    """Folder -> the name of what is in it; "" where that has names already."""
    extra: str
    """The folder with a file for each rank, if there is one."""


_OSS = _Kind({"model": "model", "optimizer": "optimizer"}, "extra_state")
_ACCELERATE = _Kind({"pytorch_model_fsdp_0": "", "optimizer_0": ""}, "")
_EXTRA_FILE = re.compile(r"\Aextra_state_rank_(\d{1,9})\.pt\Z")
_WEIGHTS = re.compile(r"\A.*(?:\.safetensors|\.safetensors\.index\.json|\.distcp|pytorch_model.*\.bin)\Z")
_STEP = re.compile(r"(?:\A|/)(?:global_step_|checkpoint-)(\d{1,18})\Z")
_DATA_FILE = re.compile(r"/__(\d{1,9})_\d+\.distcp\Z")


def is_folder(store: Store, folder: str, listing: Mapping[str, int | None]) -> bool:
    """Whether the folder is one of these."""
    kind = _kind_of(listing)
    return kind is not None and any(
        METADATA_NAME in store.list(join_name(folder, name)) for name in _present(kind, listing)
    )


def _kind_of(listing: Mapping[str, int | None]) -> _Kind | None:
    return next((kind for kind in (_OSS, _ACCELERATE) if _present(kind, listing)), None)


def _present(kind: _Kind, listing: Mapping[str, int | None]) -> list[str]:
    return [name for name in kind.members if name in listing and listing[name] is None]


def read_folder(store: Store, folder: str, listing: Mapping[str, int | None]) -> ManifestBuilder:
    """Raises CheckpointNotFoundError (missing_file), CheckpointMismatchError (conflict), CheckpointCorruptError or
    UnsafeCheckpointError.
    """
    builder = ManifestBuilder(join_name(str(store), folder))
    step = _STEP.search(builder.path)
    builder.step = int(step[1]) if step else None
    kind = _kind_of(listing) or _OSS
    root: dict[Any, Any] = {}
    members, left_out = _members(store, folder, listing, kind, builder.path)
    for inside, name in members.items():
        state = read_state(store, folder, inside, builder=builder, below=f"{name}." if name else "")
        for key, value in ({name: state} if name else state).items():
            if key in root:
                raise two_of(builder.path, str(key))
            root[key] = value
    if kind.extra and listing.get(kind.extra, 0) is None:
        if kind.extra in root:
            raise two_of(builder.path, kind.extra)
        root[kind.extra] = _extra_state(store, folder, kind.extra, builder)
    for name in left_out:
        builder.leave_out(name, f"not of {', '.join(sorted(members))}, which were read")
    take_apart(builder, root)
    return builder


def _members(
    store: Store, folder: str, listing: Mapping[str, int | None], kind: _Kind, path: str
) -> tuple[dict[str, str], list[str]]:
    """The folders to read, each with the name of what is in it: a user's own have theirs. And what is left out."""
    members: dict[str, str] = {}
    left_out = []
    for name, num_bytes in sorted(listing.items()):
        if num_bytes is not None:
            left_out.append(name)
            continue
        inside = store.list(join_name(folder, name))
        if METADATA_NAME in inside:
            members[name] = kind.members.get(name, name)
        elif name in kind.members or any(file.endswith(".distcp") for file in inside):
            raise missing_file(join_name(path, name), f"has no {METADATA_NAME}: its save was not finished")
        elif name != kind.extra:
            left_out += [f"{name}/{file}" for file in inside if _WEIGHTS.match(file)] or [f"{name}/"]
    weights = [name for name in left_out if _WEIGHTS.match(name)]
    if weights and _model_folder(kind) not in members:
        what = f"has {weights[0]!r:.200} beside {min(members)!r:.200}, and which of them is the model is not known"
        raise CheckpointMismatchError(
            f"{path} {what}; nothing was loaded: give the path of one of them",
            kind="conflict",
            path=path,
        )
    return members, left_out


def _model_folder(kind: _Kind) -> str:
    return next(iter(kind.members))


def _extra_state(store: Store, folder: str, inside: str, builder: ManifestBuilder) -> dict[str, Any]:
    """What each rank has saved of its own."""
    found = {}
    for file, num_bytes in store.list(join_name(folder, inside)).items():
        match = _EXTRA_FILE.match(file)
        if match and num_bytes is not None:
            found[int(match.group(1))] = file, num_bytes
    ranks = [int(match.group(1)) for match in map(_DATA_FILE.search, (file.name for file in builder.files)) if match]
    missing = sorted(set(range(max([*ranks, *found], default=-1) + 1)) - set(found))
    if missing:
        raise missing_file(join_name(builder.path, inside), f"has no file of rank {missing[0]}")
    state = {}
    for rank, (file, num_bytes) in sorted(found.items()):
        name = join_name(inside, file)
        saved = open_saved(store, folder, name, num_bytes, builder=builder, find_global=find_value)
        state[f"rank_{rank}"] = saved.plain(builder, saved.value, f"{inside}.rank_{rank}")
    return state
