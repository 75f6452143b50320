"""Finds which program wrote a checkpoint, and what shows that: files in its folder, and keys of its data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from bytecheckpoint.formats.find_checkpoint import FoundCheckpoint
from bytecheckpoint.info import INTEGRATION, OWN_FORMAT
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage import layout

from .integrations import integration_of

Listing = Mapping[str, int | None]

_LIGHTNING = "pytorch-lightning_version"
_STEP_KEYS = ("global_step", "step", "iteration")
_SIZE_KEYS = ("dp_world_size", "world_size")
_DATA_OF_RANK = re.compile(r"(?:\A|/)__(\d{1,9})_\d+\.distcp\Z")
_RANK_IN_NAME = re.compile(r"(?:zero_pp_rank|[._-]rank)_?(\d{1,6})(?:\D|\Z)")
_WORLD_IN_NAME = re.compile(r"world_size_(\d{1,6})(?:\D|\Z)")
_UNREAD = (
    ("*.distcp", "torch.distributed.checkpoint, of a save that did not finish: its .metadata is missing"),
    ("*.gguf", "llama.cpp, whose .gguf files are not read here"),
    ("*.h5", "Keras, whose .h5 files are not read here"),
    ("*.msgpack", "Flax, whose .msgpack files are not read here"),
    ("*.onnx", "ONNX: a program and no checkpoint"),
    ("_CHECKPOINT_METADATA", "Orbax, which is not read here"),
    ("manifest.ocdbt", "Orbax, which is not read here"),
    ("*.npz", "numpy, whose .npz files are not read here"),
    ("adapter_config.json", "PEFT, without its adapter_model.safetensors"),
    ("config.json", "Hugging Face, without its weights"),
)
"""Globs of names in folders that are no checkpoint, and what such names are a sign of."""


class Origin(NamedTuple):
    """The program that wrote a checkpoint."""

    writer: str
    """Name of the program."""
    known_by: str
    """What shows it: a file, a key, or the first bytes of a file."""


def find_origin(found: FoundCheckpoint, manifest: Manifest, listing: Listing) -> Origin:
    """Returns the origin of a checkpoint whose folder has this listing."""
    kind = manifest.foreign_format or OWN_FORMAT
    if found.foreign is None:
        if manifest.linked_to:
            return Origin(f"bcp convert --link, of {kind}", f"a link in {layout.MANIFEST_NAME}")
        within = integration_of(manifest)
        if within is not None:
            return Origin(f"this library within {within.title}", f"{INTEGRATION!r} in the metadata")
        return Origin("this library", layout.MANIFEST_NAME)
    return _foreign_origin(kind, found.foreign.file, manifest, listing)


def _foreign_origin(kind: str, file: str, manifest: Manifest, listing: Listing) -> Origin:
    match kind:
        case "torch.save" if file and _LIGHTNING in manifest.objects:
            return Origin("Lightning", f"the key {_LIGHTNING}")
        case "safetensors" | "torch.save" if file:
            return Origin(kind, f"the first bytes of {file}")
        case "safetensors" | "torch.save":
            return _of_model_folder(kind, manifest, listing)
        case "torch.distributed.checkpoint" if "metadata.json" in listing:
            return Origin("Megatron (torch_dist)", "metadata.json")
        case "torch.distributed.checkpoint" if "meta.pt" in listing:
            return Origin("Lightning (sharded)", "meta.pt beside .metadata")
        case "torch.distributed.checkpoint folders":
            return _of_folders(listing)
        case "deepspeed":
            return _of_deepspeed(listing)
        case "megatron":
            return Origin("Megatron (--ckpt-format torch)", "the folders mp_rank_*")
        case "torch.save of ranks":
            return Origin("torch.save on each rank", "a file for each rank")
    return Origin(kind, ".metadata")


def _of_model_folder(kind: str, manifest: Manifest, listing: Listing) -> Origin:
    if "trainer_state.json" in listing:
        return Origin("the Trainer of transformers", "trainer_state.json")
    if sign := _first_match(listing, "random_states_*.pkl", "optimizer.bin", "scheduler.bin"):
        return Origin("Accelerate", sign)
    sign = _first_match([file.name for file in manifest.files], "*.safetensors", "*.bin") or ""
    return Origin(f"Hugging Face ({kind})" if "config.json" in listing else kind, sign)


def _of_folders(listing: Listing) -> Origin:
    if sign := _first_match(listing, "pytorch_model_fsdp_0", "optimizer_0"):
        is_trainer = "trainer_state.json" in listing
        return Origin(f"{'the Trainer of transformers' if is_trainer else 'Accelerate'} (FSDP)", sign)
    folders = [name for name in ("model", "optimizer") if name in listing and listing[name] is None]
    where = f"folder{'s' if len(folders) > 1 else ''} {' and '.join(folders)}"
    return Origin("the open-source ByteCheckpoint", f".metadata in the {where}")


def _of_deepspeed(listing: Listing) -> Origin:
    if "zero" in listing:
        return Origin("DeepSpeed (universal)", "the folder zero")
    sign = _first_match(listing, "*_optim_states.pt")
    return Origin("DeepSpeed (ZeRO)", sign) if sign else Origin("DeepSpeed without ZeRO", "mp_rank_00_model_states.pt")


def _first_match(names: Iterable[str], *patterns: str) -> str | None:
    return next((name for pattern in patterns for name in sorted(names) if fnmatchcase(name, pattern)), None)


def looks_like(names: Iterable[str]) -> str | None:
    """Returns what a folder that is no checkpoint may be, by the names in it; None if they do not tell."""
    found = (what for pattern, what in _UNREAD if _first_match(names, pattern))
    return next(found, None)


def step_of(manifest: Manifest, values: Mapping[str, Any]) -> int | None:
    """Returns the step of the manifest, else one in the metadata, else in a value at the top level; None if unknown."""
    of_save = {} if manifest.foreign_format else manifest.metadata
    candidates = [each for each in (of_save, of_save.get("megatron"), values) if isinstance(each, Mapping)]
    found = (each[key] for each in candidates for key in _STEP_KEYS if type(each.get(key)) is int)
    return next(found, None) if manifest.step is None else manifest.step


def world_size_of(manifest: Manifest, values: Mapping[str, Any]) -> int | None:
    """Returns the number of ranks that saved a checkpoint, by its provenance, its values or else the names of its
    files; None if none of them tells it.
    """
    args = values.get("args")
    candidates = [manifest.provenance.get("world_size"), *(values.get(key) for key in _SIZE_KEYS)]
    candidates += [args.get(key) for key in _SIZE_KEYS] if isinstance(args, dict) else []
    if any(type(size) is int for size in candidates):
        return next(size for size in candidates if type(size) is int)
    names = [file.name for file in manifest.files]
    if worlds := [int(match[1]) for match in map(_WORLD_IN_NAME.search, names) if match]:
        return max(worlds)
    ranks = [int(match[1]) for name in names if (match := _DATA_OF_RANK.search(name) or _RANK_IN_NAME.search(name))]
    return 1 + max(ranks) if ranks else None
