"""Folders of the Trainer of Hugging Face's transformers and of Accelerate, without FSDP: a model, and files of
torch.save beside it for its optimizer, its scheduler and its gradient scaler.

The model has no name there, so its tensors keep the names that they have in the model, without a prefix; each file
beside the model becomes an entry named after the file. Accelerate numbers further ones: `model_1`, `optimizer_1`.
"""

from __future__ import annotations

import re

from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError
from bytecheckpoint.formats.file_reader import damaged
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.safetensors_files import read_files, read_index
from bytecheckpoint.formats.torch_save.unpickler import UnheldValueError
from bytecheckpoint.storage.paths import join_name

TORCH_SOLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_STATE = re.compile(r"\A((?:optimizer|scheduler|scaler)(?:_\d{1,6})?)\.(?:pt|bin)\Z")
_MODEL = re.compile(r"\A(?:pytorch_)?(model_\d{1,6})\.(safetensors|bin)\Z")
_TRAINER_STATE = "trainer_state.json"
_STEP = re.compile(r"(?:\A|/)checkpoint-(\d{1,18})\Z")


def is_folder(source: SourceFolder) -> bool:
    """Returns True if the folder has a model in files of torch.save."""
    return not source.files.isdisjoint((TORCH_SOLE, TORCH_INDEX))


def read_torch_model(source: SourceFolder) -> None:
    """Adds the model in files of torch.save: one, or those of an index. Raises as `detect.read_manifest` does."""
    if source.listing.get(TORCH_SOLE) is not None:
        saved = source.open(TORCH_SOLE)
        saved.take_apart(saved.value)
        return
    weights = read_index(source, TORCH_INDEX)
    source.refuse_missing(set(weights.values()), TORCH_INDEX)
    for saved in source.open_all(sorted(set(weights.values()))):
        name = saved.name
        wanted = {fqn for fqn, file in weights.items() if file == name}
        if not isinstance(saved.value, dict) or not wanted <= saved.value.keys():
            path = join_name(source.path, TORCH_INDEX)
            raise damaged(path, f"tensors that it says are in {name!r:.200} are not there")
        saved.take_apart({fqn: item for fqn, item in saved.value.items() if weights.get(fqn, name) == name})


def add_beside(source: SourceFolder) -> None:
    """Adds the optimizers, schedulers, gradient scalers and further models beside the model of a folder, and sets the
    step by the folder's name. The model must have been read before. Raises as `detect.read_manifest` does.
    """
    builder = source.builder
    step = _STEP.search(source.path)
    builder.step = int(step[1]) if step else None
    read = {file.name for file in builder.files}
    for name in sorted(source.files - read):
        state, model = _STATE.match(name), _MODEL.match(name)
        if state and state[1] not in builder.trees:
            _add_state(source, name, state[1])
        elif model and model[1] not in builder.trees:
            _add_model(source, name, model[1])
        elif name == _TRAINER_STATE:
            builder.leave_out(name, "the history of the training, and no state of the model")


def _add_state(source: SourceFolder, name: str, entry: str) -> None:
    """Adds an entry, or leaves it out if its file is refused or of a form that is not read: the model can still be
    loaded. Raises CheckpointCorruptError if the file is damaged.
    """
    part = source.beside()  # a file that is refused halfway adds nothing
    try:
        saved = part.open(name)
        saved.take_apart({entry: saved.value})
    except UnsafeCheckpointError as error:
        source.builder.leave_out(name, f"refused ({error.kind}): give its path to see why")
    except CheckpointCorruptError as error:
        if error.kind != "unsupported_version" and not isinstance(error.__cause__, UnheldValueError):
            raise
        source.builder.leave_out(name, "of a form that this release does not read: give its path to see why")
    else:
        source.builder.take_in(part.builder)


def _add_model(source: SourceFolder, name: str, entry: str) -> None:
    if name.endswith(".bin"):
        saved = source.open(name)
        saved.take_apart({entry: saved.value})
    else:
        model = source.beside()
        read_files(model, [name])
        source.builder.take_in(model.builder, entry)
