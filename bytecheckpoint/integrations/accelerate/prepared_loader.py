"""The state of the loaders that `Accelerator.prepare` returned, for a save and a load."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelerate.utils import broadcast_object_list

from bytecheckpoint.adapters.data.loader_state import DataLoaderState
from bytecheckpoint.adapters.data.stateful_loaders import count_once
from bytecheckpoint.data.known_loaders import elastic_loader_of
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.accelerate.loader_facts import (
    batches_now,
    batches_per_skip,
    core_of,
    global_batch,
    has_first_iterator,
    holds_dataset,
    is_of_torchdata,
    order_of,
    set_sampling,
)
from bytecheckpoint.integrations.accelerate.passes import PASSES, RESUMES, ResumedPass

logger = logging.getLogger("bytecheckpoint")


class PreparedLoader:
    """The elastic loader of a loader that `Accelerator.prepare` returned. Its state is one position, shared by all
    ranks, and a state of each rank, which is used only by a load on the same number of ranks.
    """

    def __init__(self, accelerator: Any, loader: Any, *, is_current: bool, is_for_load: bool) -> None:
        self._accelerator, self._loader, self._is_current, self._is_for_load = (
            accelerator,
            loader,
            is_current,
            is_for_load,
        )
        self._pass = PASSES.get(core_of(loader))
        self._resume = RESUMES.get(core_of(loader))
        self._loaded_state: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        """States of streams, and the shared state, that a load gave; None if it gave none."""

    def stream_ids(self) -> Sequence[str]:
        """Returns the id of this rank's state; an empty list in a load, so that any number of ranks fits."""
        return [] if self._is_for_load else [_id_of(self._accelerator.process_index)]

    def stream_state(self, _stream_id: str) -> Mapping[str, Any]:
        """Returns the state with which this rank goes on if the number of ranks is the same."""
        if self._resume is not None and self._resume.stream is not None:
            return self._resume.stream
        loader, in_pass = self._loader, self._is_in_pass()
        order = self._pass.order if self._pass is not None and in_pass else order_of(loader)
        state = loader.state_dict() if is_of_torchdata(loader) else None
        # Torchdata draws twice for a pass that has ended, so such a state is left out, but for that of a dataset.
        is_needed = in_pass or holds_dataset(state)
        return {"order": order, "loader": state if is_needed else None, "is_new": has_first_iterator(loader)}

    def shared_state(self) -> Mapping[str, Any]:
        """Returns the position: the epoch, the number of batches that each rank took in it, and the batch size and
        number of ranks by which a load on another number of ranks converts it.
        """
        if self._resume is not None:
            return self._resume.shared
        begun, epoch, num_taken = self._pass, int(getattr(self._loader, "iteration", 0)), 0
        if begun is not None and self._is_in_pass():
            epoch, num_taken = begun.epoch, begun.num_taken
        elif begun is not None and begun.has_ended():
            epoch = max(epoch, begun.epoch + 1)
        return {
            "epoch": epoch,
            "batches": num_taken,
            "global_batch": global_batch(self._loader, self._accelerator.num_processes),
            "num_ranks": self._accelerator.num_processes,
        }

    def _is_in_pass(self) -> bool:
        begun = self._pass
        is_begun = begun is not None and begun.num_taken > 0 and not begun.has_ended()
        return is_begun and (self._is_current or not begun.is_left)  # type: ignore[union-attr]

    def check_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Raises CheckpointMismatchError (conflict) for the state of another kind of loader."""
        del streams
        if not isinstance(shared, Mapping) or "num_ranks" not in shared:
            raise CheckpointMismatchError(
                "the state that was saved is that of bcp.data.Streams or of another kind of loader, and this is a "
                "loader that accelerate has prepared; load into the kind of loader that was saved",
                kind="conflict",
            )

    def load_streams(self, streams: Mapping[str, Any], shared: Any) -> None:
        """Stores the state for `go_on`, and does not change the loader yet."""
        self._loaded_state = streams, shared

    def go_on(self, name: str, restore_rng: Callable[[], object] | None) -> None:
        """Brings the loader to the position that was loaded, or to the start of the saved epoch, with a warning, if it
        has no state. Does nothing if `include` or `exclude` left it out. All ranks call it, as it broadcasts the order
        of a checkpoint of another number of ranks. Some of this is done when the next pass begins; `restore_rng` is
        called when that pass has given its first batch.
        """
        if self._loaded_state is None:  # left out by `include` or `exclude`
            return
        streams, shared = self._loaded_state
        loader, num_ranks, rank = self._loader, self._accelerator.num_processes, self._accelerator.process_index
        stream = streams.get(_id_of(rank)) if shared["num_ranks"] == num_ranks else None
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(shared["epoch"])
        order = stream["order"] if stream is not None else self._broadcast_order(streams)
        set_sampling(loader, order)
        num_batches, num_again = batches_now(loader, shared, num_ranks)
        num_to_skip = 0
        if stream is not None and is_of_torchdata(loader):
            if stream["loader"] is not None or not stream["is_new"]:
                loader.load_state_dict(stream["loader"] or {})
                count_once(loader.base_dataloader)
        elif is_of_torchdata(loader):
            num_to_skip = num_batches
        elif num_batches and self._accelerator.is_main_process:
            logger.warning(
                "%s: the checkpoint was saved after %d batches of epoch %d, and this loader has no state: it begins "
                "that epoch anew. Iterate over accelerator.skip_first_batches(loader, %d) first, or prepare it with "
                "DataLoaderConfiguration(use_stateful_dataloader=True)",
                name,
                num_batches,
                shared["epoch"],
                num_batches * batches_per_skip(loader, num_ranks),
            )
        if num_again and self._accelerator.is_main_process:
            text = "%s: %d samples come again: %d ranks had taken a number that %d ranks cannot share evenly"
            logger.warning(text, name, num_again, shared["num_ranks"], num_ranks)
        core = core_of(loader)
        PASSES.pop(core, None)
        RESUMES[core] = ResumedPass(
            prepared=weakref.ref(loader),
            shared=shared,
            stream=stream,
            order=order if shared["batches"] else None,
            num_to_skip=num_to_skip,
            restore_rng=restore_rng,
        )

    def _broadcast_order(self, streams: Mapping[str, Any]) -> dict[str, Any]:
        """Returns on all ranks the order of the saved pass from the state that rank 0 got. For a load on another number
        of ranks; all ranks call it.
        """
        saved = streams.get(_id_of(0), {}).get("order", {})
        found = [{name: saved.get(name) for name in ("generator", "seed")}]
        broadcast_object_list(found)
        return found[0]


def data_state(accelerator: Any, current: Any, *, is_for_load: bool) -> list[DataLoaderState]:
    """Returns the state of each prepared loader, in their order. `current` is the one that the trainer reads."""
    loaders = accelerator._dataloaders
    states = []
    for loader in loaders:
        elastic = elastic_loader_of(loader)
        if elastic is None:
            elastic = PreparedLoader(accelerator, loader, is_current=loader is current, is_for_load=is_for_load)
        rank, size = accelerator.process_index, accelerator.num_processes
        states.append(DataLoaderState(elastic, rank=rank, size=size))
    return states


def current_loader(accelerator: Any) -> Any:
    """Returns the loader that the trainer reads, or None: of the loaders in a pass, the one that gave the last batch. A
    pass that the trainer left early counts only if there is no other and some model is in training mode.
    """
    cores = [(PASSES.get(core_of(loader)), loader) for loader in accelerator._dataloaders]
    begun = [(each, loader) for each, loader in cores if each is not None and each.num_taken and not each.has_ended()]
    candidates = [(each.turn, loader) for each, loader in begun if not each.is_left]
    if not candidates and any(model.training for model in accelerator._models):
        candidates = [(each.turn, loader) for each, loader in begun]
    return max(candidates, key=lambda item: item[0])[1] if candidates else None


def restore_after_first_batch(loader: Any, restore_rng: Callable[[], object]) -> None:
    """Makes the next pass over a loader of `bcp.data.Streams` call `restore_rng` once it has given its first batch."""
    RESUMES[core_of(loader)] = ResumedPass(weakref.ref(loader), {"batches": 0}, restore_rng)


def _id_of(rank: int) -> str:
    return f"rank_{rank:06d}"
