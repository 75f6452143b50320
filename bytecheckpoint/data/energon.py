"""Energon's loader as streams, one for each of its workers: a worker owns a fixed share of the data, so that another
number of ranks is exact where the workers can be shared out evenly.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.errors import CheckpointMismatchError

_CLASS = "@energon"
"""Key of a dict that stands for an object of Energon's; its value is the name of the class."""
_PACKAGE = "megatron.energon."
_PREFIX = "worker_"


class EnergonLoader:
    """The elastic loader of a SavableDataLoader. A state can be loaded only before the first sample is read."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._read_at: tuple[Any, ...] = ()
        """Position of the loader at which `_state` was taken; () if none is of now."""
        self._state: Any = None

    def _rank_state(self) -> Any:
        """Returns the state of all workers of this rank. Asks them again only if a sample was read, or a state loaded,
        since.
        """
        loader = self._loader
        position = (loader._next_worker_id, loader._global_sample_idx, *loader._worker_sample_counters)
        if position != self._read_at:
            self._state, self._read_at = loader.save_state_rank(), position
        return self._state

    @property
    def _num_workers(self) -> int:
        return max(int(self._loader.num_workers), 1)

    def stream_ids(self) -> Sequence[str]:
        """Returns the ids of this rank's workers, numbered over all ranks."""
        first = self._loader.worker_config.rank * self._num_workers
        return [f"{_PREFIX}{number}" for number in range(first, first + self._num_workers)]

    def all_stream_ids(self) -> Sequence[str]:
        """Returns the ids of the workers of all ranks."""
        return [f"{_PREFIX}{number}" for number in range(self._loader.worker_config.world_size * self._num_workers)]

    def stream_state(self, stream_id: str) -> Any:
        """Returns the state of a worker as a tree."""
        state = self._rank_state()
        worker = list(self.stream_ids()).index(stream_id)
        return {"worker": None if state is None else to_tree(state.worker_states[worker])}

    def shared_state(self) -> Any:
        """Returns the number of workers of a rank, the worker that gives the next sample, and the size of a
        micro-batch.
        """
        state = self._rank_state()
        return {
            "num_workers": int(self._loader.num_workers),
            "next_worker_id": 0 if state is None else state.next_worker_id,
            "micro_batch_size": None if state is None else state.micro_batch_size,
        }

    def assign(self, ids: Sequence[str], size: int) -> list[list[str]]:
        """Returns for each of `size` ranks an equal share of the workers, in the order of their numbers: a worker's
        number says which share of the data it reads.

        Raises CheckpointMismatchError (conflict) if there are no equal shares.
        """
        if len(ids) % size:
            raise CheckpointMismatchError(
                f"{len(ids)} workers of Energon were saved, which {size} ranks cannot share evenly; load on a number "
                f"of ranks that divides {len(ids)}, each with {len(ids)} / ranks workers",
                kind="conflict",
            )
        ordered = sorted(ids, key=lambda stream_id: int(stream_id.removeprefix(_PREFIX)))
        share = len(ids) // size
        return [ordered[rank * share : (rank + 1) * share] for rank in range(size)]

    def check_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Raises CheckpointMismatchError (conflict) if another kind of loader saved the state, if the number of streams
        is not that of this loader's workers, if the loader is being read, or if a state has a record that the installed
        Energon lacks.
        """
        self._checked(streams, shared)

    def _checked(self, streams: Mapping[str, Any], shared: Any) -> list[Any]:
        """Returns the states of this rank's workers in their order. Raises as `check_streams` does."""
        loader = self._loader
        if not isinstance(shared, Mapping) or "num_workers" not in shared:
            raise CheckpointMismatchError(
                "the state that was saved is not that of a loader of Energon; load into the kind of loader that was "
                "saved",
                kind="conflict",
            )
        if bool(loader.num_workers) != bool(shared["num_workers"]) or len(streams) != self._num_workers:
            wanted = len(streams) if shared["num_workers"] else 0
            raise CheckpointMismatchError(
                f"this rank gets the state of {len(streams)} workers of Energon, saved with num_workers="
                f"{shared['num_workers']}, and its loader has num_workers={loader.num_workers}; nothing of it was "
                f"changed: make it with WorkerConfig(num_workers={wanted})",
                kind="conflict",
            )
        if getattr(loader, "_has_workers", False):
            raise CheckpointMismatchError(
                "the workers of this loader of Energon run already, and cannot be given a state; load into a new one",
                kind="conflict",
            )
        ordered = sorted(streams, key=lambda stream_id: int(stream_id.removeprefix(_PREFIX)))
        return [from_tree(streams[stream_id]["worker"]) for stream_id in ordered]

    def load_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Restores this rank's workers; does nothing if no worker was saved with a state. If ranks had another number
        of workers at the save, the first worker gives the next sample. Raises the errors of `check_streams`.
        """
        loader, states = self._loader, self._checked(streams, shared)
        if all(state is None for state in states):
            return
        is_same = shared["num_workers"] == loader.num_workers
        rank_state = _class_of("savable_loader.SavableDataLoaderState")
        loader.restore_state_rank(
            rank_state(
                worker_states=states,
                next_worker_id=shared["next_worker_id"] if is_same else 0,
                micro_batch_size=shared["micro_batch_size"],
            )
        )
        self._read_at = ()


def energon_loader(loader: Any) -> EnergonLoader | None:
    """Returns the elastic loader of Energon's SavableDataLoader; None for any other loader."""
    kinds = type(loader).__mro__
    is_known = any(kind.__name__ == "SavableDataLoader" and kind.__module__.startswith(_PACKAGE) for kind in kinds)
    return EnergonLoader(loader) if is_known else None


def to_tree(value: Any) -> Any:
    """Returns a state of Energon's as a tree of plain data."""
    kind = type(value)
    if kind.__module__.startswith(_PACKAGE):
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix(_PACKAGE)
        if isinstance(value, dict):
            return {_CLASS: name, "items": {key: to_tree(item) for key, item in value.items()}}
        if dataclasses.is_dataclass(value):
            fields = {field.name: to_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {_CLASS: name, "fields": fields}
    if kind is dict:
        return {key: to_tree(item) for key, item in value.items()}
    return kind(map(to_tree, value)) if kind in (list, tuple) else value


def from_tree(tree: Any) -> Any:
    """Returns the state of Energon's that a tree stands for.

    Raises CheckpointMismatchError (conflict) for a record that the installed Energon lacks, or has with other fields.
    """
    if type(tree) is dict and type(tree.get(_CLASS)) is str:
        kind = _class_of(tree[_CLASS])
        if "items" in tree:
            return kind({key: from_tree(item) for key, item in tree["items"].items()})
        try:
            return kind(**{name: from_tree(item) for name, item in tree["fields"].items()})
        except TypeError as error:  # its fields are others
            raise _unknown_record(tree[_CLASS]) from error
    if type(tree) is dict:
        return {key: from_tree(item) for key, item in tree.items()}
    return type(tree)(map(from_tree, tree)) if type(tree) in (list, tuple) else tree


def _class_of(name: str) -> Any:
    """Returns a record class of Energon's by its name: a dataclass, or a dict. Raises CheckpointMismatchError
    (conflict) if the installed Energon has no such class.
    """
    module, _, attribute = name.rpartition(".")
    kind = getattr(sys.modules.get(_PACKAGE + module), attribute, None)
    if not isinstance(kind, type) or not (issubclass(kind, dict) or dataclasses.is_dataclass(kind)):
        raise _unknown_record(name)
    return kind


def _unknown_record(class_name: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"the state of Energon's loader has a record {class_name!r:.200}, which the installed Energon lacks, or has "
        "with other fields; its loader was not changed: load with the version that saved it",
        kind="conflict",
    )
