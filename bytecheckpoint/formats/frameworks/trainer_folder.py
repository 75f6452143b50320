"""Folders of the Trainer of Hugging Face's transformers and of Accelerate, without FSDP: a model, and files of
torch.save beside it for its optimizer, its scheduler and its gradient scaler.

The model has no name there, so its tensors have the names of the model's own; what lies beside it has that of its file.
Accelerate numbers what there is more than one of: `model_1`, `optimizer_1`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.errors import CheckpointCorruptError, UnsafeCheckpointError
from bytecheckpoint.formats.file_reader import damaged
from bytecheckpoint.formats.manifest_builder import ManifestBuilder
from bytecheckpoint.formats.safetensors_files import read_files, read_index
from bytecheckpoint.formats.torch_save.files import SavedFile, missing_file, open_saved
from bytecheckpoint.formats.torch_save.unpickler_globals import find_value
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

TORCH_SOLE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_STATE = re.compile(r"\A((?:optimizer|scheduler|scaler)(?:_\d{1,6})?)\.(?:pt|bin)\Z")
_MODEL = re.compile(r"\A(?:pytorch_)?(model_\d{1,6})\.(safetensors|bin)\Z")
_TRAINER_STATE = "trainer_state.json"
_STEP = re.compile(r"(?:\A|/)checkpoint-(\d{1,18})\Z")


def read_torch_model(store: Store, folder: str, listing: Mapping[str, int | None]) -> ManifestBuilder:
    """The model of a folder with files of torch.save: one, or those of an index.

    Raises CheckpointNotFoundError (missing_file), CheckpointMismatchError (conflict), CheckpointCorruptError or
    UnsafeCheckpointError.
    """
    builder = ManifestBuilder(join_name(str(store), folder))
    if listing.get(TORCH_SOLE) is not None:
        saved = _open(store, folder, TORCH_SOLE, listing, builder)
        _add(builder, saved, saved.value)
        return builder
    path = join_name(builder.path, TORCH_INDEX)
    weights = read_index(store, join_name(folder, TORCH_INDEX), path, listing[TORCH_INDEX] or 0)
    for name in sorted(set(weights.values())):
        if listing.get(name) is None:
            raise missing_file(builder.path, f"lacks {name!r:.200}, in which its index has tensors")
        saved = _open(store, folder, name, listing, builder)
        wanted = {fqn for fqn, file in weights.items() if file == name}
        if not isinstance(saved.value, dict) or not wanted <= saved.value.keys():
            raise damaged(path, f"tensors that it says are in {name!r:.200} are not there")
        _add(builder, saved, {fqn: item for fqn, item in saved.value.items() if weights.get(fqn, name) == name})
    return builder


def add_beside(store: Store, folder: str, listing: Mapping[str, int | None], builder: ManifestBuilder) -> None:
    """Adds what lies beside the model of a folder, which was read.

    Raises CheckpointMismatchError (conflict), CheckpointCorruptError or UnsafeCheckpointError.
    """
    step = _STEP.search(builder.path)
    builder.step = int(step[1]) if step else None
    read = {file.name for file in builder.files}
    for name, num_bytes in sorted(listing.items()):
        state, model = _STATE.match(name), _MODEL.match(name)
        if num_bytes is None or name in read:
            continue
        if state and state[1] not in builder.trees:
            _add_state(store, folder, name, state[1], listing=listing, builder=builder)
        elif model and model[1] not in builder.trees:
            _add_model(store, folder, name, model[1], listing=listing, builder=builder)
        elif name == _TRAINER_STATE:
            builder.leave_out(name, "the history of the training, and no state of the model")


def _add_state(
    store: Store, folder: str, name: str, entry: str, *, listing: Mapping[str, int | None], builder: ManifestBuilder
) -> None:
    """One that is refused is left out: the model can be loaded all the same."""
    try:
        saved = _open(store, folder, name, listing, builder)
    except UnsafeCheckpointError as error:
        builder.leave_out(name, f"refused ({error.kind}), and an error says why where its path is given")
        return
    except CheckpointCorruptError as error:
        if error.kind != "unsupported_version":
            raise
        builder.leave_out(name, "of a form that this release does not read: give its path to see why")
        return
    _add(builder, saved, {entry: saved.value})


def _add_model(
    store: Store, folder: str, name: str, entry: str, *, listing: Mapping[str, int | None], builder: ManifestBuilder
) -> None:
    if name.endswith(".bin"):
        saved = _open(store, folder, name, listing, builder)
        _add(builder, saved, {entry: saved.value})
    else:
        builder.take_in(read_files(store, folder, [name]), entry)


def _open(
    store: Store, folder: str, name: str, listing: Mapping[str, int | None], builder: ManifestBuilder
) -> SavedFile:
    return open_saved(store, folder, name, listing[name] or 0, builder=builder, find_global=find_value)


def _add(builder: ManifestBuilder, saved: SavedFile, value: Any) -> None:
    known: dict[str, str] = {}

    def add(fqn: str, view: Any) -> None:
        place = repr((view.storage.key, view.dtype, view.item_offset, view.shape, view.strides))
        first = known.setdefault(place, fqn)
        if first == fqn:
            builder.add_tensor(fqn, view.dtype, view.shape, saved.chunks(view, fqn))
        else:
            builder.add_alias(fqn, first)

    builder.take_apart(value, on_tensor=add)
