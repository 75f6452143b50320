"""Saves and loads the state of an `Accelerator`."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import weakref
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from bytecheckpoint import api
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.errors import CheckpointMismatchError, CheckpointNotFoundError
from bytecheckpoint.info import LoadReport
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.shared.named_parameters import parameters_named
from bytecheckpoint.integrations.shared.numbered_folders import FolderRecord, NumberedFolders
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.layout import MANIFEST_NAME
from bytecheckpoint.storage.open_store import expand_home, is_plain_path
from bytecheckpoint.storage.paths import join_name

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType

    from bytecheckpoint.integrations.accelerate.prepared_loader import (
        PreparedLoader,
        current_loader,
        data_state,
        restore_after_first_batch,
    )
except ImportError as error:
    raise missing_framework("accelerate", "accelerate >= 1.0") from error

logger = logging.getLogger("bytecheckpoint")

_REFUSED = {
    DistributedType.DEEPSPEED: "call bytecheckpoint.integrations.deepspeed with the engine that prepare() returned",
    DistributedType.MEGATRON_LM: "call bytecheckpoint.integrations.megatron",
    DistributedType.XLA: "call accelerator.save_state",
}
_PREFIX = "checkpoint_"
_NAME = re.compile(rf"{_PREFIX}(\d+)\Z")
_FILE_OF_ACCELERATE = re.compile(
    r"(?:pytorch_)?model(?:_\d+|-\d{5}-of-\d{5}|_fsdp(?:_\d+)?(?:_rank\d+)?)?\.(?:bin|safetensors)(?:\.index\.json)?"
    r"|(?:optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?\.bin"
    r"|scaler\.pt|(?:random_states|custom_checkpoint)_\d+\.pkl"
)
_FOLDER_OF_ACCELERATE = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
"""Names of what `Accelerator.save_state` writes."""
_FOLDERS: MutableMapping[Any, NumberedFolders] = weakref.WeakKeyDictionary()
"""The checkpoints of each Accelerator's project that this process has saved into, on rank 0."""


def save_state(
    accelerator: Any, path: str | os.PathLike[str] | None = None, *, async_save: bool = True, **arguments: Any
) -> SaveHandle:
    """Saves what `accelerator.save_state` saves: models, optimizers, schedulers, loaders, random numbers, the scaler,
    registered objects and the step of gradient accumulation. All ranks call it.

    Args:
        accelerator: The Accelerator that has prepared and registered it all.
        path: As for `bytecheckpoint.save`. None takes `checkpoints/checkpoint_<iteration>` of the project, adds one to
            the iteration, and keeps `total_limit` checkpoints there: older ones are deleted in the background once this
            one is committed, with the files of accelerate in their folders. Files of others stay.
        async_save: Return as soon as the state may change, and write in the background.
        arguments: The other arguments of `bytecheckpoint.save`: `step`, `metadata`, `options`, `storage_options`, ...

    Raises:
        ValueError: There is no path, and the project has no automatic names or `step` was given; or accelerate runs
            DeepSpeed, Megatron-LM or XLA.
        CheckpointError: A hook raised on some rank: all ranks raise this; or as `bytecheckpoint.save` raises it. The
            handle raises the errors of the background.
    """
    _refuse_backend(accelerator)
    project = accelerator.project_configuration
    root = _project_root(accelerator) if path is None else ""
    place = join_name(root, f"{_PREFIX}{project.iteration}") if path is None else os.fspath(path)
    if root and arguments.get("step") is not None:
        raise ValueError("step= needs a path: the project names its checkpoints by iteration; nothing was saved")
    if not accelerator.sync_gradients:
        logger.warning(
            "the checkpoint is between two steps of the optimizer: gradients accumulated so far are not part of it. "
            "Save when accelerator.sync_gradients is True"
        )
    if root:

        def note_save() -> FolderRecord:
            return _folders_of(accelerator, root, arguments).record(project.iteration)

        decisions = _decisions(root, arguments, SaveOptions)
        record = decisions.decide_together("looking at the checkpoints", note_save, FolderRecord)
        arguments["metadata"] = {**(arguments.get("metadata") or {}), **record.as_metadata()}
    models = _models_to_save(accelerator, place, _decisions(place, arguments, SaveOptions))
    state = _state_of(accelerator, models, is_for_load=False)
    arguments["metadata"] = marked("accelerate", arguments.get("metadata"))
    with _parameters_named(accelerator, models):
        handle = api.save(place, state, async_save=async_save, **arguments)
    if root:
        folders = _FOLDERS.get(accelerator)  # on rank 0 of the group
        if folders is not None:
            limit = 0 if project.total_limit is None else max(project.total_limit, 1)
            folders.keep_newest(handle, project.iteration, limit)
        project.iteration += 1
    return handle


def load_state(accelerator: Any, path: str | os.PathLike[str] | None = None, **arguments: Any) -> LoadReport:
    """Loads what `save_state` saved, on any number of ranks, after `prepare` and before the first batch.

    Loaders go on in the middle of their pass if they are stateful; of others a warning says how many batches to skip.
    The random state is set at once. If the save was made in a loop over a loader, it is set again when the next pass
    over that loader has given its first batch.

    Args:
        accelerator: As for `save_state`.
        path: As for `bytecheckpoint.load`. None takes the checkpoint of the project that was committed last. With
            automatic names, the project's next save takes the number after that of the loaded folder; with None, the
            first such number that no damaged checkpoint has.
        arguments: The other arguments of `bytecheckpoint.load`: `strict`, `include`, `exclude`, `options`, ...

    Raises:
        ValueError: As for `save_state`, except for `step`.
        CheckpointMismatchError: accelerate itself has written the folder (`conflict`), or the checkpoint has a model
            and none is prepared yet; `exclude="model.*"` loads the rest alone.
        CheckpointError: As `bytecheckpoint.load` raises it.
    """
    _refuse_backend(accelerator)
    place, following = _newest(_project_root(accelerator), arguments) if path is None else (os.fspath(path), None)
    models = _models_to_load(accelerator, place, _decisions(place, arguments, LoadOptions))
    if not accelerator._models:  # before prepare(): an empty one refuses the weights that would be left out silently
        models[0] = nn.Module()
    state = _state_of(accelerator, models, is_for_load=True)
    with _parameters_named(accelerator, models):
        report = api.load(place, state, **arguments)
    accelerator.step = state["extra_state"]["step"]
    name = _NAME.search(place.rstrip("/"))
    if name is not None and accelerator.project_configuration.automatic_checkpoint_naming:
        accelerator.project_configuration.iteration = int(name[1]) + 1 if following is None else following
    for number, loader in enumerate(accelerator._dataloaders):
        key = _numbered("data", number)
        restore_rng = report.restore_rng if state["extra_state"]["current_loader"] == key else None
        if isinstance(state[key].streams, PreparedLoader):
            state[key].streams.go_on(key, restore_rng)
        elif restore_rng is not None:
            restore_after_first_batch(loader, restore_rng)
    report.restore_rng()
    return report


def _state_of(accelerator: Any, models: Mapping[int, Any], *, is_for_load: bool) -> dict[str, Any]:
    """Returns the live state under names that are the same for all integrations; a second model is `model_1`."""
    optimizers = [_unwrapped(each, AcceleratedOptimizer, "optimizer") for each in accelerator._optimizers]
    schedulers = [_unwrapped(each, AcceleratedScheduler, "scheduler") for each in accelerator._schedulers]
    current = None if is_for_load else current_loader(accelerator)
    data = data_state(accelerator, current, is_for_load=is_for_load)
    names = (_numbered("data", number) for number, each in enumerate(accelerator._dataloaders) if each is current)
    extra: dict[str, Any] = {"step": accelerator.step, "current_loader": next(names, None)}
    extra |= {f"object_{number}": each for number, each in enumerate(accelerator._custom_objects)}
    if accelerator.scaler is not None:
        extra["scaler"] = accelerator.scaler
    return {
        **{_numbered("model", number): model for number, model in models.items()},
        **{_numbered("optimizer", number): each for number, each in enumerate(optimizers)},
        **{_numbered("scheduler", number): each for number, each in enumerate(schedulers)},
        **{_numbered("data", number): each for number, each in enumerate(data)},
        "extra_state": extra,
        "rng": RngState(elastic="keep"),
    }


def _parameters_named(accelerator: Any, models: Mapping[int, Any]) -> AbstractContextManager[None]:
    """Returns a context in which the optimizers know the names of parameters of all models that are not in `models`: a
    hook saves and loads these, so no module of the state names them.
    """
    taken = {
        _numbered("model", number): each for number, each in enumerate(accelerator._models) if number not in models
    }
    return parameters_named(
        taken, [_unwrapped(each, AcceleratedOptimizer, "optimizer") for each in accelerator._optimizers]
    )


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _unwrapped(value: Any, wrapper: type, name: str) -> Any:
    return getattr(value, name) if isinstance(value, wrapper) else value


def _models_to_save(accelerator: Any, path: str, decisions: Decisions) -> dict[int, Any]:
    """Runs the hooks that accelerate runs before a save, and returns the models whose weights no hook took away, by
    number: a hook saves those that it takes. The answer of rank 0 counts, because hooks of most programs take weights
    away on rank 0 alone. FSDP shows hooks no weights, and all models are returned. An error of a hook on any rank is
    raised by all.
    """
    models = dict(enumerate(accelerator._models))
    hooks = accelerator._save_model_state_pre_hook
    sharded = accelerator.distributed_type == DistributedType.FSDP

    def run_hooks() -> list[int]:
        if not hooks:
            return list(models)
        if is_plain_path(path):
            Path(path).expanduser().mkdir(parents=True, exist_ok=True)
        weights = [] if sharded else [model.state_dict() for model in models.values()]
        left = list(weights)
        for hook in hooks.values():
            hook(accelerator._models, left, path)
        kept = [number for number, each in enumerate(weights) if any(each is other for other in left)]
        return list(models) if sharded else kept

    # On every rank, also without hooks: programs may register them on one alone.
    agreed = decisions.agree("running the hooks before the save", run_hooks, list[int])
    return {number: models[number] for number in agreed}


def _models_to_load(accelerator: Any, path: str, decisions: Decisions) -> dict[int, Any]:
    """Runs the hooks that accelerate runs before a load, and returns the models that no hook took away, by number: a
    hook loads those that it takes. Raises on all ranks the error of a hook on any rank. For a folder that
    accelerate itself has written, runs no hook and raises CheckpointMismatchError (conflict).
    """
    models = dict(enumerate(accelerator._models))
    left = [] if accelerator.distributed_type == DistributedType.FSDP else list(models.values())
    hooks, is_asked = accelerator._load_model_state_pre_hook, bool(left)

    def run_hooks() -> None:
        _refuse_folder_of_accelerate(path)
        for hook in hooks.values():
            hook(left, path)

    decisions.do("running the hooks before the load", run_hooks)
    return {number: each for number, each in models.items() if not is_asked or any(each is other for other in left)}


def _refuse_backend(accelerator: Any) -> None:
    advice = _REFUSED.get(accelerator.distributed_type)
    if advice is not None:
        kind = accelerator.distributed_type.value
        raise ValueError(
            f"accelerate runs {kind}, which this function does not save or load; nothing was done: {advice}"
        )


def _refuse_folder_of_accelerate(path: str) -> None:
    """Raises CheckpointMismatchError (conflict) for a folder that accelerate itself has written."""
    folder = Path(path).expanduser()
    if not is_plain_path(path) or not folder.is_dir():
        return
    names = [each.name for each in folder.iterdir()]
    if MANIFEST_NAME not in names and any(name.startswith("random_states_") for name in names):
        raise CheckpointMismatchError(
            f"{path} is a folder that accelerator.save_state wrote; nothing was loaded: load it with "
            "accelerator.load_state, and the checkpoints of save_state with this function",
            kind="conflict",
            path=path,
        )


def _project_root(accelerator: Any) -> str:
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise ValueError(
            "there is no path, and the project has no automatic names; nothing was done: pass path=, or "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
        )
    return join_name(os.fspath(project.project_dir), "checkpoints")


def _decisions(path: str, arguments: Mapping[str, Any], kind: type[SaveOptions | LoadOptions]) -> Decisions:
    timeout_s = given_or_default(arguments.get("options"), kind).timeout_s
    return Decisions(arguments.get("process_group"), path, timeout_s=timeout_s)


def _folders_in(root: str, arguments: Mapping[str, Any]) -> NumberedFolders:
    options = arguments.get("storage_options")
    return NumberedFolders(root, _PREFIX, storage_options=options, remove_beside=_remove_files_of_accelerate)


def _folders_of(accelerator: Any, root: str, arguments: Mapping[str, Any]) -> NumberedFolders:
    """Returns the folders of the Accelerator's project: the same object as long as its saves go to one root, a new one
    after each change of the root. Only rank 0 calls this.
    """
    known = _FOLDERS.get(accelerator)
    if known is None or known.root != expand_home(root):
        known = _folders_in(root, arguments)
        known.begin()
        _FOLDERS[accelerator] = known
    return known


def _newest(root: str, arguments: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the path of the checkpoint that was committed last, whose number is not the highest if training has gone
    back, and the number of the next save: the first above its own that no damaged checkpoint has.

    Raises CheckpointNotFoundError if none is committed, and the error of a damaged checkpoint if all are damaged.
    """

    def find() -> tuple[str, int]:
        folders = _folders_in(root, arguments)
        committed = folders.committed(to_load=True)
        if not committed:
            return "", 0
        numbers = itertools.count(committed[-1].number + 1)
        return committed[-1].path, next(number for number in numbers if number not in folders.damaged)

    decisions = _decisions(root, arguments, LoadOptions)
    found = decisions.decide_together("looking at the checkpoints", find, tuple[str, int])
    if not found[0]:
        raise CheckpointNotFoundError(
            f"{showable_url(root)} holds no committed checkpoint_<number> that save_state has written; nothing was "
            "loaded. Folders that accelerator.save_state wrote are loaded by accelerator.load_state",
            kind="not_found",
            path=showable_url(root),
        )
    return found


def _remove_files_of_accelerate(path: str) -> None:
    """Removes the files that accelerate itself has written into the folder of a checkpoint that is gone."""
    with suppress(FileNotFoundError):  # stores may remove the folder with the last file
        for each in list(Path(path).iterdir()):
            if _FILE_OF_ACCELERATE.fullmatch(each.name) and not each.is_dir():
                each.unlink()
            elif _is_folder_of_accelerate(each):
                shutil.rmtree(each)


def _is_folder_of_accelerate(path: Path) -> bool:
    is_named_so = _FOLDER_OF_ACCELERATE.fullmatch(path.name) is not None
    return is_named_so and not path.is_symlink() and (path / ".metadata").is_file()
