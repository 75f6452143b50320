"""Calls of torchsnapshot and the open-source ByteCheckpoint. Runs in an environment of their own, because the latter is
imported by the same name as this project, and always in a process group, which it needs.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from shared.states import HeldState


def torchsnapshot() -> Any:
    return importlib.import_module("torchsnapshot")  # may be missing: that is the error of this candidate alone


def snapshot_state(held: HeldState) -> dict[str, Any]:
    """Returns local tensors: torchsnapshot knows DTensors only by what a rank holds of them."""
    return {"state": torchsnapshot().StateDict(**held.local_tensors)}


def replicated(held: HeldState) -> list[str]:
    """Returns torchsnapshot's patterns for tensors that all ranks hold."""
    return ["**"] if held.is_replicated else []


class OssModel:
    """A model as the open-source ByteCheckpoint takes it: it asks for a state_dict, and fills its tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._tensors)

    def load_state_dict(self, tensors: dict[str, torch.Tensor], *_: object, **__: object) -> None:
        for name, tensor in tensors.items():
            if tensor is not self._tensors[name]:
                self._tensors[name].copy_(tensor)


def oss_save(folder: Path, held: HeldState, *, fast_saving: bool, **options: Any) -> None:
    _oss().save(
        str(folder),
        {"model": OssModel(held.tensors)},
        framework=_framework(held),
        ignore_append_global_steps_to_folder=True,
        fast_saving=fast_saving,
        **options,
    )


def oss_load(folder: Path, held: HeldState, *, fast_loading: bool) -> None:
    _oss().load(str(folder), {"model": OssModel(held.tensors)}, framework=_framework(held), fast_loading=fast_loading)


def _oss() -> Any:
    """Imports the other package of this name, which the environment that runs this file holds."""
    return importlib.import_module("bytecheckpoint")


def _framework(held: HeldState) -> str:
    return "ddp" if held.layout.kind in ("whole", "replicated") else "fsdp2"
