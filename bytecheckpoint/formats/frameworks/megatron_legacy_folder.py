"""Folders of Megatron's older format (`--ckpt-format torch`): a folder for each rank of tensor, pipeline and expert
parallelism, and in it one file with that rank's part of the model, and its own numbers for its layers.

The weights are put together to the whole model. Optimizer state lies there without names, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product, starmap
from operator import itemgetter
from typing import Any

from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.formats.file_reader import damaged
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks.megatron_globals import find_megatron_value
from bytecheckpoint.formats.frameworks.megatron_legacy_model import MODEL_KEY, Model, Rank, RankFile
from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.formats.torch_save.file import SavedFile, missing_file, translated
from bytecheckpoint.manifest.plain_wire import TensorRef
from bytecheckpoint.storage.paths import join_name

_RANK_FOLDER = re.compile(r"\Amp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?\Z")
_MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
_OPTIMIZER_FILES = re.compile(r"\A(?:distrib_optim|layer_wise_optimizer_\d+|optim)\.pt\Z")
_WRITER = "Megatron"
_OPTIMIZER = "optimizer"
_AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_SAID_BY_ALL = (
    *_AXES,
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers",
    "encoder_num_layers",
    "decoder_num_layers",
    "num_experts",
)
"""Arguments that all ranks have alike."""
_OF_RANK = ("rng_state", "rerun_state_machine")


def is_folder(listing: Mapping[str, int | None]) -> bool:
    """Returns True for a folder of a step, by its listing."""
    return any(num_bytes is None and _RANK_FOLDER.match(name) for name, num_bytes in listing.items())


def read_folder(source: SourceFolder) -> None:
    """Raises CheckpointNotFoundError (missing_file), CheckpointMismatchError (conflict), CheckpointCorruptError or
    UnsafeCheckpointError.
    """
    names = sorted(name for name in source.listing if source.is_folder(name) and _RANK_FOLDER.match(name))
    opened = [_open(source, name) for name in names]
    first = opened[0][1]
    files = translated(first.path, _WRITER, _arrange, opened, source.builder)
    translated(first.path, _WRITER, _read, files, source.builder)


def _open(source: SourceFolder, name: str) -> tuple[str, SavedFile, str]:
    """Returns the folder and the file of a rank, and the name of a file with optimizer state beside it."""
    inside = source.list(name)
    file = next((file for file in _MODEL_FILES if inside.get(file) is not None), None)
    if file is None:
        raise missing_file(join_name(source.path, name), f"has no {_MODEL_FILES[0]}")
    saved = source.open(join_name(name, file), find_megatron_value, num_bytes=inside[file])
    if not isinstance(saved.value, dict):
        raise damaged(saved.path, "it has no dict")
    other = next((file for file in sorted(inside) if _OPTIMIZER_FILES.match(file)), "")
    return name, saved, join_name(name, other) if other else ""


def _arrange(opened: list[tuple[str, SavedFile, str]], builder: ManifestBuilder) -> dict[Rank, RankFile]:
    """Returns the files by rank, all of them there and of one save. Leaves out optimizer state by name."""
    settings = RankFile(Rank(0, 0, 0), *opened[0][:2]).settings
    has_stages = _size(settings, "pipeline_model_parallel_size") > 1
    files: dict[Rank, RankFile] = {}
    for name, saved, other in opened:
        match = _RANK_FOLDER.match(name)
        tp, *rest = (int(number) for number in (match.groups() if match else ()) if number is not None)
        if len(rest) == 1 and not has_stages and _size(settings, "expert_model_parallel_size") > 1:
            rest = [0, *rest]
        rank = Rank(tp, *[*rest, 0, 0][:2])
        if rank in files:
            what = f"has {files[rank].folder!r} and {name!r}, which are of one rank"
            raise CheckpointMismatchError(
                f"{builder.path} {what}; nothing was loaded: remove the one that is older",
                kind="conflict",
                path=builder.path,
            )
        files[rank] = RankFile(rank, name, saved)
        for left_out in (other, _OPTIMIZER if saved.value.get(_OPTIMIZER) else ""):
            if left_out:
                builder.leave_out(left_out, "which parameter each of its tensors belongs to is not written there")
    _refuse_missing_ranks(files, settings, builder.path)
    _refuse_mixed(files)
    return files


def _size(settings: Mapping[str, Any], name: str) -> int:
    size = settings.get(name)
    return size if type(size) is int and size > 0 else 1


def _refuse_missing_ranks(files: Mapping[Rank, RankFile], settings: Mapping[str, Any], path: str) -> None:
    said = [_size(settings, name) for name in _AXES]
    for axis, (name, size, numbers) in enumerate(zip(_AXES, said, zip(*files, strict=True), strict=True)):
        if name in settings and size <= max(numbers):
            stale = files[max(files, key=itemgetter(axis))].folder
            raise CheckpointMismatchError(
                f"{path} has {stale!r}, and its arguments say {name}={size}: it is of a save with more ranks, or the "
                "arguments are of another one; nothing was loaded: remove the folders of the older save",
                kind="conflict",
                path=path,
            )
    sizes = [max(size, 1 + max(numbers)) for size, numbers in zip(said, zip(*files, strict=True), strict=True)]
    few = [min(size, len(files) + 1) for size in sizes]  # of more, one of these is missing as well
    for rank in starmap(Rank, product(*map(range, few))):
        if rank not in files:
            have = f"there are {len(files)} folders like {next(iter(files.values())).folder}"
            what = f"tensor rank {rank.tp}, pipeline rank {rank.pp}, expert rank {rank.ep}"
            raise missing_file(path, f"has no folder of {what}: {have}, and {sizes} ranks along these axes")


def _refuse_mixed(files: Mapping[Rank, RankFile]) -> None:
    first = next(iter(files.values()))
    for file in files.values():
        here, there = file.value.get("iteration"), first.value.get("iteration")
        if here != there:
            raise damaged(file.saved.path, f"it is of iteration {here!r:.40}, {first.saved.path} of {there!r:.40}")
        for name in _SAID_BY_ALL:
            here, there = file.settings.get(name), first.settings.get(name)
            if type(here) is not type(there) or here != there:
                what = f"its arguments say {name}={here!r:.40}, those in {first.saved.path} {there!r:.40}"
                raise damaged(file.saved.path, f"it is of another save: {what}")


def _read(files: Mapping[Rank, RankFile], builder: ManifestBuilder) -> None:
    first = files[Rank(0, 0, 0)]
    builder.set_step(first.value.get("iteration"))
    Model(files, builder).add()
    for file in files.values():
        plain = [key for key in file.value if not MODEL_KEY.match(str(key)) and key != _OPTIMIZER]
        for key in plain if file is first else [key for key in plain if key in _OF_RANK]:
            fqn = str(key) if file is first else f"{file.folder}.{key}"
            tree = file.saved.plain(file.value[key], fqn)
            if not isinstance(tree, TensorRef):
                builder.trees[fqn] = tree
