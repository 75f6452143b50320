"""Says what is missing in a folder that another program began to write, or that was copied in part."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bytecheckpoint.errors import CheckpointNotFoundError, and_more
from bytecheckpoint.formats import safetensors_files
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks.dcp_metadata import METADATA_NAME
from bytecheckpoint.storage.store import Store

_NUM_NAMED = 4
_DATA_SUFFIX = ".distcp"
_NUMBERED = re.compile(r"\A(.+)-\d{5}-of-(\d{5})\.bin\Z")
_OF_TRAINER = re.compile(r"\A(?:trainer_state\.json|random_states_\d+\.pkl)\Z")
_STEP_FOLDER = re.compile(r"\A(?:global_step_?|iter_|checkpoint-|step-)(\d{1,18})\Z")


def unfinished_error(store: Store, folder: str, named_by: str = "") -> CheckpointNotFoundError | None:
    """Returns the error (not_committed) for a folder in which a part of a foreign checkpoint is missing; None for any
    other folder. `named_by` is the file that names the folder as the latest step: then an empty one is an error too.
    """
    source = SourceFolder(store, folder, store.list(folder))
    found = (look(source) for look in (_dcp, _dcp_members, _numbered_files, _index_alone, _without_model))
    why = next(filter(None, found), None)
    if named_by and not source.listing:
        why = "is empty"
    if why is None:
        return None
    whose = f", the step that {named_by} names," if named_by else ""
    return CheckpointNotFoundError(
        f"{source.path}{whose} {why}: its save did not finish, or it was copied in part; nothing was loaded, and "
        "checkpoints beside it are not affected: load one of those (`bcp ls` of the folder above), or save or copy "
        "this one again",
        kind="not_committed",
        path=source.path,
    )


def without_latest_error(path: str, trackers: Mapping[str, str]) -> CheckpointNotFoundError:
    """Returns the error (not_found) for a root that lacks the folders its tracker files name. `trackers` has the file
    by the name of the folder.
    """
    names, files = (
        " or ".join(f"{each!r:.100}" for each in dict.fromkeys(part)) for part in (trackers, trackers.values())
    )
    return CheckpointNotFoundError(
        f"{path} has no folder {names}, which its file {files} names as the latest step: that step was deleted or not "
        "copied; nothing was loaded, and other steps are not affected: `bcp ls` lists them",
        kind="not_found",
        path=path,
    )


def only_steps_error(path: str, listing: Mapping[str, int | None]) -> CheckpointNotFoundError | None:
    """Returns the error (not_found) for a root with folders of steps as trainers name them; None for any other folder.
    Call it only where no file names the latest step: it does not look for one.
    """
    names = step_folders(listing)
    if not names:
        return None
    return CheckpointNotFoundError(
        f"{path} is no checkpoint, and has no file that names the latest of its steps ({and_more(names, _NUM_NAMED)}), "
        f"as some trainers write when a save has finished; nothing was loaded: give the path of one, such as {path}/"
        f"{names[0]}",
        kind="not_found",
        path=path,
    )


def step_folders(listing: Mapping[str, int | None]) -> list[str]:
    """Returns the folders that have a name as trainers give to those of their steps, the newest step first."""
    by_step = {int(match[1]): name for name in listing if listing[name] is None and (match := _STEP_FOLDER.match(name))}
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def _dcp(source: SourceFolder) -> str | None:
    files = sorted(name for name in source.files if name.endswith(_DATA_SUFFIX))
    if not files or METADATA_NAME in source.listing:
        return None
    named = and_more(files, _NUM_NAMED)
    return f"has data of torch.distributed.checkpoint ({named}), and not the {METADATA_NAME} that is written last"


def _dcp_members(source: SourceFolder) -> str | None:
    for name in sorted(filter(source.is_folder, ("model", "optimizer", "pytorch_model_fsdp_0", "optimizer_0"))):
        why = _dcp(SourceFolder(source.store, f"{source.name}/{name}".strip("/"), source.list(name)))
        if why is not None:
            return f"has in its {name!r} {why.removeprefix('has ')}"
    return None


def _numbered_files(source: SourceFolder) -> str | None:
    matches = list(filter(None, map(_NUMBERED.match, sorted(source.files))))
    if not matches:
        return None
    name, count = matches[0].groups()
    return f"has {len(matches)} of {int(count)} files {name}-*-of-{count}.bin, and no index of them"


def _index_alone(source: SourceFolder) -> str | None:
    for name in sorted(source.files):
        if name.endswith(safetensors_files.INDEX_SUFFIX):
            num_files = len(safetensors_files.files_of_index(source, name))
            return f"has {name!r}, and none of the {num_files} files that it names"
    return None


def _without_model(source: SourceFolder) -> str | None:
    if not any(map(_OF_TRAINER.match, source.files)) or only_steps_error("", source.listing):
        return None  # a Trainer also keeps such a file beside the folders of its steps
    return "has what the Trainer of transformers, or Accelerate, writes beside a model, and no model"
