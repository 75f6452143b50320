"""Folders that hold a folder of torch.distributed.checkpoint for the model and one for the optimizer: those of the
open-source ByteCheckpoint, and those of Hugging Face's Accelerate and Trainer for FSDP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bytecheckpoint.formats.file_reader import conflicting, missing_file
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks.dcp_folder import read_state
from bytecheckpoint.formats.frameworks.dcp_metadata import METADATA_NAME
from bytecheckpoint.formats.manifest_builder import two_of
from bytecheckpoint.storage.paths import join_name


class _Kind(NamedTuple):
    """The names that a program gives to the folders."""

    members: Mapping[str, str]
    """Folder -> the name that its content gets, "" if it has names already. The first is the folder of the model."""
    extra: str
    """The folder with a file for each rank, if there is one."""


_OSS = _Kind({"model": "model", "optimizer": "optimizer"}, "extra_state")
_ACCELERATE = _Kind({"pytorch_model_fsdp_0": "", "optimizer_0": ""}, "")
_EXTRA_FILE = re.compile(r"\Aextra_state_rank_(\d{1,9})\.pt\Z")
_WEIGHTS = re.compile(r"\A.*(?:\.safetensors|\.safetensors\.index\.json|\.distcp|pytorch_model.*\.bin)\Z")
_STEP = re.compile(r"(?:\A|/)(?:global_step_|checkpoint-)(\d{1,18})\Z")
_DATA_FILE = re.compile(r"/__(\d{1,9})_\d+\.distcp\Z")


def is_folder(source: SourceFolder) -> bool:
    """Returns True if the folder holds a folder of torch.distributed.checkpoint with a name in _OSS or _ACCELERATE."""
    return _kind_of(source) is not None


def _kind_of(source: SourceFolder) -> _Kind | None:
    for kind in (_OSS, _ACCELERATE):
        if any(METADATA_NAME in source.list(name) for name in filter(source.is_folder, kind.members)):
            return kind
    return None


def read_folder(source: SourceFolder) -> None:
    """Adds the content of all these folders, and the step in the path, to the builder. Raises as
    `detect.read_manifest` does.
    """
    step = _STEP.search(source.path)
    source.builder.step = int(step[1]) if step else None
    kind = _kind_of(source) or _OSS
    root: dict[Any, Any] = {}
    members, left_out = _members(source, kind)
    for inside, name in members.items():
        state = read_state(source, inside, below=f"{name}." if name else "")
        for key, value in ({name: state} if name else state).items():
            if key in root:
                raise two_of(source.path, str(key))
            root[key] = value
    if kind.extra and source.is_folder(kind.extra):
        if kind.extra in root:
            raise two_of(source.path, kind.extra)
        root[kind.extra] = _extra_state(source, kind.extra)
    for name in left_out:
        source.builder.leave_out(name, f"not of {', '.join(sorted(members))}, which were read")
    source.builder.take_apart(root)


def _members(source: SourceFolder, kind: _Kind) -> tuple[dict[str, str], list[str]]:
    """Returns the folders to read, each with the name of its content, and the names that are left out. Refuses a folder
    without metadata, and weights of which it is unclear whether they are the model.
    """
    members: dict[str, str] = {}
    left_out = []
    for name, num_bytes in sorted(source.listing.items()):
        if num_bytes is not None:
            left_out.append(name)
            continue
        inside = source.list(name)
        if METADATA_NAME in inside:
            members[name] = kind.members.get(name, name)
        elif name in kind.members or any(file.endswith(".distcp") for file in inside):
            raise missing_file(join_name(source.path, name), f"has no {METADATA_NAME}: its save was not finished")
        elif name != kind.extra:
            left_out += [f"{name}/{file}" for file in inside if _WEIGHTS.match(file)] or [f"{name}/"]
    weights = [name for name in left_out if _WEIGHTS.match(name)]
    if weights and next(iter(kind.members)) not in members:
        what = f"has {weights[0]!r:.200} beside {min(members)!r:.200}, and which of them is the model is not known"
        raise conflicting(source.path, what, "give the path of one of them")
    return members, left_out


def _extra_state(source: SourceFolder, inside: str) -> dict[str, Any]:
    files = {
        int(match[1]): join_name(inside, file)
        for file, num_bytes in source.list(inside).items()
        if num_bytes is not None and (match := _EXTRA_FILE.match(file))
    }
    ranks = [int(match[1]) for file in source.builder.files if (match := _DATA_FILE.search(file.name))]
    missing = next((rank for rank in range(max([*ranks, *files], default=-1) + 1) if rank not in files), None)
    if missing is not None:
        raise missing_file(join_name(source.path, inside), f"has no file of rank {missing}")
    state = {}
    ranks = sorted(files)
    for rank, saved in zip(ranks, source.open_all(files[rank] for rank in ranks), strict=True):
        state[f"rank_{rank}"] = saved.plain(saved.value, f"{inside}.rank_{rank}")
    return state
