"""The plain data of a checkpoint of Lightning, as this library takes it: loops, callbacks, hyperparameters."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

_HAVE_HPARAMS = (pl.LightningModule, pl.LightningDataModule)
_HPARAMS = tuple(each.CHECKPOINT_HYPER_PARAMS_KEY for each in _HAVE_HPARAMS)
_HPARAMS_TYPES = tuple(each.CHECKPOINT_HYPER_PARAMS_TYPE for each in _HAVE_HPARAMS)
"""Keys of the class of hyperparameters of OmegaConf. Without it, Lightning takes them as the dict that JSON gives."""


def as_plain(rest: dict[str, Any]) -> dict[str, Any]:
    """Returns what a checkpoint of Lightning has beside tensors, with hyperparameters as JSON text. Positions of
    loaders are left out: they have an entry of their own.
    """
    plain = {key: value for key, value in rest.items() if key not in _HPARAMS_TYPES}
    for name in _HPARAMS:
        if name in plain:
            plain[name] = json.dumps(_json_ready(plain[name]), default=str)
    loops = plain.get("loops", {})
    fit_loop = {key: value for key, value in loops.get("fit_loop", {}).items() if key != "combined_loader"}
    if fit_loop:
        plain["loops"] = {**loops, "fit_loop": fit_loop}
    return plain


def _json_ready(value: Any) -> Any:
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(value):
        value = _items(omegaconf, value)
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    return value


def _items(omegaconf: Any, config: Any) -> Any:
    """Returns a config of OmegaConf as a dict or list of its items, with references resolved; configs in it stay
    configs. A reference to what is not there stays as it was written, and a mandatory value that was not given stays
    "???". A config without items is returned as it was written: a reference, "???" or None.
    """
    written = omegaconf.OmegaConf.to_container(config, resolve=False)
    if not isinstance(written, (dict, list)):  # all of it is a reference, or has no value
        return written
    items = {}
    for key in written if isinstance(written, dict) else range(len(written)):
        try:
            items[key] = config[key]
        except omegaconf.errors.OmegaConfBaseException:
            items[key] = written[key]
    return items if isinstance(written, dict) else list(items.values())


def from_plain(extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain data as Lightning and its hooks expect it, with hyperparameters as JSON has them."""
    return {key: json.loads(value) if key in _HPARAMS else value for key, value in extra.items()}


def is_mid_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Returns True if training has taken some batches of an epoch and not its last one."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return bool(progress.get("current", {}).get("ready", 0)) and not progress.get("is_last_batch", False)
