"""Loaders that are exact by themselves, because one position in a fixed order of samples says what all ranks have
taken: Megatron's counts of consumed samples, Mosaic's streaming, Grain's ElasticIterator and litData.

Each is recognized by the names of its classes. A position has no streams: it is shared state, the same on all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from bytecheckpoint.errors import CheckpointMismatchError

_SIZES = ("world_size", "num_workers", "batch_size")
"""Keys of the state of litData's dataset."""
_GRAIN_POSITION = "global_next_index"
"""Key of Grain's state."""
_MEGATRON_COUNTS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


@dataclass(frozen=True)
class CursorLoader:
    """The elastic loader of a data loader with one position for all ranks."""

    read: Callable[[], Any]
    """Returns the position, a dict that has `key`, as `load` takes it back."""
    load: Callable[[Any], None]
    key: str
    refuse_inexact: Callable[[], str | None] = lambda: None
    """Returns the reason why another number of ranks would lose or repeat samples, or None."""
    check: Callable[[Any], None] = lambda _: None
    """Raises CheckpointMismatchError (conflict) for a position that the loader cannot go on at."""

    def stream_ids(self) -> Sequence[str]:
        return []

    def stream_state(self, stream_id: str) -> Any:
        raise KeyError(stream_id)

    def shared_state(self) -> Any:
        return self.read()

    def check_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Raises CheckpointMismatchError (conflict) if there are streams, or if the saved position is that of another
        kind of loader, or one that this loader cannot go on at.
        """
        if streams:
            raise CheckpointMismatchError(
                f"the state that was saved has {len(streams)} streams, and this loader has one position for all ranks; "
                "load into the kind of loader that was saved",
                kind="conflict",
            )
        if not isinstance(shared, Mapping) or self.key not in shared:
            raise CheckpointMismatchError(
                f"the position that was saved has no {self.key}, so another kind of loader saved it; load into the "
                "kind of loader that was saved",
                kind="conflict",
            )
        self.check(shared)

    def load_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Loads the position. Raises the errors of `check_streams`."""
        self.check_streams(streams, shared)
        self.load(shared)


def megatron_cursor(args: Any) -> CursorLoader | None:
    """Returns the elastic loader of Megatron's arguments or train state, from which its data loaders are built with the
    number of samples that were consumed; None for any other object.
    """
    if type(getattr(args, _MEGATRON_COUNTS[0], None)) is not int:
        return None

    def read() -> dict[str, int]:
        return {name: getattr(args, name) for name in _MEGATRON_COUNTS if type(getattr(args, name, None)) is int}

    def load(counts: Mapping[str, int]) -> None:
        for name in counts.keys() & set(_MEGATRON_COUNTS):
            setattr(args, name, counts[name])

    def why_inexact() -> str | None:
        kind = getattr(args, "dataloader_type", None)
        if kind == "external":
            return "its dataloader_type is external, and the state of that loader is not in Megatron's counts"
        if kind == "cyclic" and getattr(args, "data_sharding", True):
            return "with data_sharding the order of samples depends on the number of ranks; pass --no-data-sharding"
        return None

    return CursorLoader(read, load, key=_MEGATRON_COUNTS[0], refuse_inexact=why_inexact)


def mosaic_cursor(loader: Any) -> CursorLoader | None:
    """Returns the elastic loader of Mosaic's StreamingDataLoader over a StreamingDataset; None for any other loader.

    The loader counts the samples that it gave out. All ranks are taken to have given out equally many.
    """
    if not _is_of(loader, "streaming.", "StreamingDataLoader") or not _is_of(
        loader.dataset, "streaming.", "StreamingDataset"
    ):
        return None

    def read() -> dict[str, Any]:
        state: dict[str, Any] = loader.state_dict()
        size, batch_size = len(loader.dataset), loader.batch_size or 1
        in_whole_batches = size // batch_size * batch_size if loader.drop_last else size
        num_ranks = loader.dataset._parallel_rank_world.num_ranks  # replicas of a sample count as one
        if state["sample_in_epoch"] >= in_whole_batches * num_ranks:
            return {**state, "epoch": state["epoch"] + 1, "sample_in_epoch": 0}
        return state

    def load(state: Mapping[str, Any]) -> None:
        loader.load_state_dict(dict(state))
        # A dataset that has begun a later epoch would take an earlier state for an outdated one.
        loader.dataset.next_epoch = state["epoch"]
        loader.num_samples_yielded = 0

    return CursorLoader(read, load, key="sample_in_epoch")


def grain_cursor(loader: Any) -> CursorLoader | None:
    """Returns the elastic loader of Grain's ElasticIterator, or of the iterator that it gives; None for all others."""
    if not any(_is_of(loader, "grain.", name) for name in ("ElasticIterator", "_ElasticMapDatasetIterator")):
        return None

    def read() -> dict[str, Any]:
        state: dict[str, Any] = loader.get_state()
        num_left = len(loader._ds) - state[_GRAIN_POSITION]
        # What is left makes no batch: without repeat() no more would ever follow.
        return {_GRAIN_POSITION: 0} if num_left < loader._global_batch_size else state

    return CursorLoader(read, lambda state: loader.set_state(dict(state)), key=_GRAIN_POSITION)


def litdata_cursor(loader: Any) -> CursorLoader | None:
    """Returns the elastic loader of litData's StreamingDataLoader; None for any other loader."""
    if not _is_of(loader, "litdata.", "StreamingDataLoader"):
        return None

    def read() -> dict[str, Any]:
        state: dict[str, Any] = copy.deepcopy(loader.state_dict())
        dataset = state["dataset"]
        if dataset["sample_in_epoch"] >= len(loader.dataset) * dataset["world_size"]:
            dataset.update(sample_in_epoch=0, num_samples_yielded=0)  # the next pass begins the epoch after this one
            state["num_samples_yielded"] = 0
        return state

    def check(state: Mapping[str, Any]) -> None:
        if state["dataset"]["sample_in_epoch"] and _is_resharded(loader, state["dataset"]):
            _refuse_repeats(loader, state["dataset"])

    def load(state: dict[str, Any]) -> None:
        loader.load_state_dict(_for_this_size(loader, state))

    def why_inexact() -> str | None:
        if _is_of(loader.dataset, "litdata.", "StreamingDataset"):
            return None
        kind = type(loader.dataset).__name__
        return f"litData resumes a {kind} on the same number of ranks, workers and samples in a batch only"

    return CursorLoader(read, load, key="dataset", refuse_inexact=why_inexact, check=check)


def _topology(loader: Any) -> dict[str, int]:
    size = loader.dataset.distributed_env.world_size
    return {"world_size": size, "num_workers": loader.num_workers or 1, "batch_size": loader.batch_size}


def _is_resharded(loader: Any, saved: Mapping[str, Any]) -> bool:
    """Returns True if litData goes on at the number of samples that all ranks took together, not at each rank's own."""
    is_same = all(saved[name] == number for name, number in _topology(loader).items())
    return not is_same or saved.get("resume_mode") == "elastic"


def _refuse_repeats(loader: Any, saved: Mapping[str, Any]) -> None:
    """Raises CheckpointMismatchError (conflict) where litData would begin at an earlier sample, or not at all."""
    dataset, position = loader.dataset, saved["sample_in_epoch"]
    # Before a round of all workers is complete, what was taken is not the first part of the order of all.
    rounds = [prod(int(sizes[name] or 1) for name in _SIZES) for sizes in (saved, _topology(loader))]
    if any(position % each for each in rounds):
        raise CheckpointMismatchError(
            f"{position} samples of this epoch were taken, and litData goes on exactly at a multiple of "
            f"{lcm(*rounds)}: ranks x workers x batch size was {rounds[0]} and is {rounds[1]} now. Nothing was "
            "changed; load with the sizes of the save, or save at a position that both divide",
            kind="conflict",
        )
    if saved["drop_last"] != dataset.drop_last:
        raise CheckpointMismatchError(
            f"the StreamingDataset was saved with drop_last={saved['drop_last']}, and has drop_last="
            f"{dataset.drop_last} now, which is its default where there are several ranks; nothing was changed: pass "
            "drop_last to it on any number of ranks",
            kind="conflict",
        )


def _for_this_size(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the state with which this loader goes on; a copy, because litData changes what it is given. If
    no sample of the epoch was taken, it has this loader's sizes (ranks, workers, batch). Else, if the sizes differ, it
    has values that make litData go on at the position of all ranks.
    """
    copied: dict[str, Any] = copy.deepcopy(state)
    saved = copied["dataset"]
    if not saved["sample_in_epoch"]:  # at the start of an epoch any sizes will do
        saved.update(_topology(loader), resume_mode=None)
    elif _is_resharded(loader, saved):
        # A world size that no run has makes litData go on at the position of all ranks, also where the sizes are those
        # of an earlier change: litData would count the samples of this rank twice. The number of samples yielded is
        # compared with this rank's share, not used.
        saved.update(world_size=0, num_samples_yielded=0)
    return copied


def _is_of(value: Any, package: str, name: str) -> bool:
    """Returns True for an object of a class of this name, or one derived from it, in the package."""
    return any(kind.__name__ == name and kind.__module__.startswith(package) for kind in type(value).__mro__)
