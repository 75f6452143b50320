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

from bytecheckpoint.formats.file_reader import conflicting, damaged, missing_file
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks.megatron_globals import find_megatron_value
from bytecheckpoint.formats.frameworks.megatron_legacy_model import MODEL_KEY, Model, Rank, RankFile
from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.formats.torch_save.duplicates import Comparer
from bytecheckpoint.formats.torch_save.file import SavedFile, translated
from bytecheckpoint.formats.torch_save.unpickler_globals import Instance
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
    *("expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("num_layers", "encoder_num_layers", "decoder_num_layers", "num_experts"),
)
"""Arguments that all ranks have alike."""
_OF_RANK = ("rng_state", "rerun_state_machine")
_ARGS, _NUMBERS_OF_RANK = "args", {"rank", "local_rank"}
"""Key of the arguments, and those that are not alike on all ranks."""
_WHY_LEFT_OUT = "which parameter each of its tensors belongs to is not written there"


def is_folder(source: SourceFolder) -> bool:
    """Returns True for a folder of a step, by its listing."""
    return bool(_rank_folders(source))


def _rank_folders(source: SourceFolder) -> list[str]:
    return sorted(name for name in source.listing if source.is_folder(name) and _RANK_FOLDER.match(name))


def read_folder(source: SourceFolder) -> None:
    """Adds the files of all ranks to the builder. Raises as `detect.read_manifest` does."""
    folders = _rank_folders(source)
    names = [
        _model_file(source, folder, inside) for folder, inside in zip(folders, source.list_all(folders), strict=True)
    ]
    saved = source.open_dicts(names, find_megatron_value)
    opened = list(map(_rank_file, folders, saved))
    path = opened[0].saved.path
    files = translated(path, _WRITER, _arrange, opened, source.builder)
    translated(path, _WRITER, _read, files, source.builder)


def _model_file(source: SourceFolder, folder: str, inside: Mapping[str, int | None]) -> str:
    """Returns the model file of a rank. Notes files with optimizer state beside it as left out. Raises
    CheckpointNotFoundError (missing_file) if it is not there.
    """
    name = next((file for file in _MODEL_FILES if inside.get(file) is not None), None)
    if name is None:
        raise missing_file(join_name(source.path, folder), f"has no {_MODEL_FILES[0]}")
    for file_name in sorted(filter(_OPTIMIZER_FILES.match, inside)):
        source.builder.leave_out(join_name(folder, file_name), _WHY_LEFT_OUT)
    return join_name(folder, name)


def _rank_file(folder: str, saved: SavedFile) -> RankFile:
    match = _RANK_FOLDER.match(folder)
    tp, *other_numbers = (int(number) for number in (match.groups() if match else ()) if number is not None)
    file = RankFile(Rank(tp, *[*other_numbers, 0, 0][:2]), folder, saved)
    has_stages, has_experts = (_size(file.settings, axis) > 1 for axis in _AXES[1:])
    if len(other_numbers) == 1 and has_experts and not has_stages:
        file = file._replace(rank=Rank(tp, 0, *other_numbers))
    return file


def _arrange(opened: list[RankFile], builder: ManifestBuilder) -> dict[Rank, RankFile]:
    """Returns the files by rank. Refuses missing or repeated ranks, and several saves; leaves out optimizer state."""
    files: dict[Rank, RankFile] = {}
    for file in opened:
        other = files.setdefault(file.rank, file)
        if other is not file:
            what = f"has {other.folder!r} and {file.folder!r}, which are of one rank"
            raise conflicting(builder.path, what, "remove the one that is older")
        if file.value.get(_OPTIMIZER):
            builder.leave_out(_OPTIMIZER, _WHY_LEFT_OUT)
    _check_ranks(files, opened[0].settings, builder.path)
    _refuse_mixed(files)
    return files


def _size(settings: Mapping[str, Any], name: str) -> int:
    size = settings.get(name)
    return size if type(size) is int and size > 0 else 1


def _check_ranks(files: Mapping[Rank, RankFile], settings: Mapping[str, Any], path: str) -> None:
    """Refuses folders of more ranks than the arguments say, and the lack of a rank's folder."""
    said = [_size(settings, name) for name in _AXES]
    for axis, (name, size, numbers) in enumerate(zip(_AXES, said, zip(*files, strict=True), strict=True)):
        if name in settings and size <= max(numbers):
            stale = files[max(files, key=itemgetter(axis))].folder
            what = f"has {stale!r}, and its arguments say {name}={size}: it is of a save with more ranks, or the "
            what += "arguments are of another one"
            raise conflicting(path, what, "remove the folders of the older save")
    sizes = [max(size, 1 + max(numbers)) for size, numbers in zip(said, zip(*files, strict=True), strict=True)]
    few = [min(size, len(files) + 1) for size in sizes]  # enough: one of these is missing if any rank is
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
    """Adds step, model and plain data; plain data of other ranks than the first only if it is `_OF_RANK`. Notes other
    values of theirs as left out if the first rank lacks them or has others.
    """
    first, comparer = files[Rank(0, 0, 0)], Comparer()
    builder.set_step(first.value.get("iteration"))
    Model(files, builder).add()
    for file in files.values():
        for key in (key for key in file.value if not MODEL_KEY.match(str(key)) and key != _OPTIMIZER):
            fqn = str(key) if file is first else f"{file.folder}.{key}"
            is_read = file is first or key in _OF_RANK
            if not is_read and not _is_same(key, first, file, comparer):
                builder.leave_out(fqn, "the first rank has another value, or none: its file has it")
            tree = file.saved.plain(file.value[key], fqn) if is_read else None
            if is_read and not isinstance(tree, TensorRef):
                builder.trees[fqn] = tree


def _is_same(key: Any, first: RankFile, other: RankFile, comparer: Comparer) -> bool:
    """Returns True if both ranks have the same value under this key, except for the numbers of the ranks."""
    if key not in first.value:
        return False
    here, there = first.value[key], other.value[key]
    if key == _ARGS:
        here, there = _common(here), _common(there)
    return comparer.same_value((first.saved, here), (other.saved, there), str(key)) is True


def _common(args: Any) -> Any:
    fields = args.fields if isinstance(args, Instance) else args
    is_dict = isinstance(fields, dict)
    return {name: each for name, each in fields.items() if name not in _NUMBERS_OF_RANK} if is_dict else fields
