"""Reads a checkpoint as the nested state that was given to `save`, without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.key_map import listed_globs
from bytecheckpoint.checkpoint import read_whole
from bytecheckpoint.distributed.ranks import SoleRank
from bytecheckpoint.loading.mismatches import refuse_unused_globs
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_alone, retry_replaced, wanted_step
from bytecheckpoint.loading.plain_trees import PlainData, TensorStub
from bytecheckpoint.loading.select import SelectionRequest, select
from bytecheckpoint.options import LoadOptions, given_or_default
from bytecheckpoint.storage.paths import path_text


@retry_replaced
def load_tree(
    path: str | os.PathLike[str],
    step: int | Literal["latest"] | None = "latest",
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    device: torch.device | str | int = "cpu",
    storage_options: Mapping[str, Any] | None = None,
    options: LoadOptions | None = None,
) -> dict[Any, Any]:
    """Reads a checkpoint, in one process and without a model, into the nested state that was given to `save`.

    A module is a dict of tensors by their names in its state_dict, an optimizer the dict that its state_dict() gives,
    with names of parameters where it had them, a RankLocal a dict by rank, and a tensor subclass the tensors that it is
    made of. Tied tensors are one tensor. What another program wrote is nested as it wrote it. A module inside a dict of
    the state gets no dict of its own: `{"nets": {"actor": module}}` gives
    `{"nets": {"actor.weight": ..., "actor.bias": ...}}`. An optimizer's state_dict(), if that was given to `save`, is a
    dict like any other: globs take any part of it.

    Args:
        path: As for `load`.
        step: As for `load`.
        include: Only what matches one of these globs of FQNs, as `model.*`. An optimizer of which anything matches is
            read as a whole.
        exclude: Nothing that matches one of these globs. `optimizer.*` leaves out an optimizer; a part of its tensors
            cannot be left out.
        device: For all tensors. Arrays of numpy stay what they are.
        storage_options: As for `save`.
        options: See LoadOptions.

    Raises:
        CheckpointMismatchError: A glob matches nothing, `exclude` takes a part of an optimizer's tensors, or globs take
            a part of a list with tensors (`conflict`); or the path is a checkpoint and a root of steps.
        CheckpointNotFoundError, CheckpointCorruptError, UnsafeCheckpointError, StorageError: As for `load`.
    """
    included, excluded = listed_globs("include", include), listed_globs("exclude", exclude)
    target = LoadTarget(path_text(path), wanted_step(step), storage_options)
    source = open_alone(target, given_or_default(options, LoadOptions))
    manifest = source.manifest
    view = CheckpointView(manifest, rank=0, num_ranks=1, key_map=None, include=included, exclude=excluded)
    refuse_unused_globs(view, source.path)
    if included == []:  # which takes nothing; a SelectionRequest without globs takes all
        excluded = ["*"]
    request = SelectionRequest(to="torch", include=included or (), exclude=excluded or (), is_in_memory=True)
    selection = select(manifest, request, None)
    nested = PlainData(manifest, selection, request).nested()
    fqns = [tensor.pieces[0].fqn or "" for tensor in selection.wanted]
    with source.counting(SoleRank()):
        tensors = read_whole(source, fqns, device)
    filled: dict[Any, Any] = _filled(nested, [tensors[fqn] for fqn in fqns], device)
    return filled


def _filled(value: Any, tensors: Sequence[torch.Tensor], device: torch.device | str | int) -> Any:
    """Returns the nested state with tensors in place of stubs, and its own, small tensors moved to the device."""
    if isinstance(value, TensorStub):
        return tensors[value.number]
    if isinstance(value, torch.Tensor):  # small ones are in the manifest
        return value.to(device)
    if isinstance(value, dict):
        return type(value)({key: _filled(item, tensors, device) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_filled(item, tensors, device) for item in value)
    return value
