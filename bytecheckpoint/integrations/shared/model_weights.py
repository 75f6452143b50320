"""Weights alone: saved in Hugging Face's format, and loaded from any format, by all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from bytecheckpoint import api, phases
from bytecheckpoint.conversion.convert import ConvertLimits, ConvertRequest, convert
from bytecheckpoint.distributed.ranks import Subject, join_ranks
from bytecheckpoint.errors import and_more
from bytecheckpoint.loading.open_checkpoint import LoadTarget
from bytecheckpoint.loading.select import SelectionRequest
from bytecheckpoint.manager.agreement.stopping import rank_in
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.storage.open_store import is_plain_path

logger = logging.getLogger("bytecheckpoint")

_MAX_NAMED = 10
_MEMORY_BYTES = 2 << 30
_MAX_FILE_BYTES = 5_000_000_000
"""Largest length of a file, as `save_pretrained` cuts them."""


def save_weights(
    path: str,
    weights: Mapping[str, torch.Tensor],
    *,
    options: SaveOptions,
    storage_options: Mapping[str, Any] | None = None,
    make_room: Callable[[], object] | None = None,
) -> None:
    """Writes the tensors, under the names in `weights`, to a folder of safetensors files at `path`, a local path or a
    URL. All ranks call it. Replaces the safetensors files of a model that are there; other files stay. Raises
    CheckpointExistsError if a checkpoint of another format is there.

    The weights are first saved as a checkpoint at `<path>.weights`, which is deleted once the folder is written; after
    an error it may stay. Once it is committed, all ranks call `make_room`, which may delete what is at `path`. Raises
    the errors of a save, of a load and of `make_room`.
    """
    between = f"{path}.weights"
    overwriting = SaveOptions(overwrite=True, timeout_s=options.timeout_s, writer_threads=options.writer_threads)
    api.save(between, {"model": weights}, storage_options=storage_options, options=overwriting)
    if make_room is not None:
        make_room()
    request = ConvertRequest(
        source=LoadTarget(between, None, storage_options),
        target=path,
        target_options=storage_options or {},
        selection=SelectionRequest(to="hf"),
        limits=ConvertLimits(_MEMORY_BYTES, _MAX_FILE_BYTES),
        overwrite=True,
        is_link=False,
        follow_links=False,
    )
    about = Subject(path, None, is_save=True)
    convert(request, join_ranks(None, options.timeout_s, about=about), progress=lambda _: nullcontext(_ignore_progress))
    if rank_in(None) == 0:
        api.delete(between, storage_options=storage_options)
        if is_plain_path(between):
            with suppress(OSError):  # others have put files there
                Path(between).rmdir()


def load_weights(path: str, weights: Any, *, options: LoadOptions, storage_options: Mapping[str, Any] | None) -> None:
    """Fills `weights`, a module or a dict of modules or tensors, in place, and converts stored values to its dtypes.
    Rank 0 warns of tensors in the checkpoint that `weights` lacks. Raises the errors of a load, also where a tensor is
    missing from the checkpoint.
    """
    report = phases.run_load(
        path,
        {"model": weights},
        "auto",
        step=None,
        strict=True,
        cast=True,
        process_group=None,
        storage_options=storage_options,
        options=options,
        ignored={"unexpected_key"},
    )
    if report.unexpected and rank_in(None) == 0:
        logger.warning("%s: %s are not part of the model", path, and_more(report.unexpected, _MAX_NAMED))


def _ignore_progress(num_bytes: int) -> None:
    """Does nothing: the progress is not shown."""
