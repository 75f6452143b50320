"""Reads facts about a loader of accelerate: samplers, generators, the size of its batches, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import BatchSampler, IterableDataset

from bytecheckpoint.adapters.rank_values.rng_state import RngState


def order_of(loader: Any) -> dict[str, Any]:
    """Returns the random states, and the seed of a seedable sampler, that decide the order of a pass begun now."""
    sampler, generator = sampler_of(loader), generator_of(loader)
    return {
        "rng": RngState().state_dict(),
        "generator": None if generator is None else generator.get_state(),
        "seed": sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
    }


def set_sampling(loader: Any, order: Mapping[str, Any]) -> None:
    """Sets what the loader's sampler draws from, to the `seed` or the `generator` of an `order_of`; ignores `rng`."""
    sampler, generator = sampler_of(loader), generator_of(loader)
    if isinstance(sampler, SeedableRandomSampler):
        if order.get("seed") is not None:
            sampler.initial_seed = order["seed"]
    elif order.get("generator") is not None:
        if generator is None and hasattr(sampler, "generator"):  # in a single process accelerate makes no generator
            generator = sampler.generator = torch.Generator()
        if generator is not None:
            generator.set_state(order["generator"])


def generator_of(loader: Any) -> torch.Generator | None:
    found = getattr(loader, "synchronized_generator", None)
    return found if found is not None else getattr(sampler_of(loader), "generator", None)


def core_of(loader: Any) -> Any:
    """Returns the innermost batch sampler of a loader, or its sampler if it makes no batches; for a loader over an
    iterable dataset, the dataset.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    innermost = _batch_samplers(loader)[-1]
    return loader.sampler if innermost is None else innermost


def _batch_samplers(loader: Any) -> list[Any]:
    found = [loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler]
    while hasattr(found[-1], "batch_sampler"):
        found.append(found[-1].batch_sampler)
    return found


def sampler_of(loader: Any) -> Any:
    if isinstance(loader.dataset, IterableDataset):
        return None
    innermost = _batch_samplers(loader)[-1]
    return loader.sampler if innermost is None else getattr(innermost, "sampler", None)


def is_of_torchdata(loader: Any) -> bool:
    """Returns True if torchdata's StatefulDataLoader reads for this loader. Other loaders of accelerate have a
    state_dict() too, but no position in it.
    """
    return bool(getattr(loader, "use_stateful_dataloader", False))


def has_first_iterator(loader: Any) -> bool:
    """Returns True if torchdata's loader has its first iterator already. accelerate asks each loader for
    a state before its first pass, and that makes one.
    """
    return bool(getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False))


def holds_dataset(state: Any) -> bool:
    """Returns True if the state of torchdata's loader holds the state of a dataset."""
    if not isinstance(state, Mapping):
        return False
    own = any(state.get(key) is not None for key in ("dataset_state", "dataset_iter_state"))
    return own or any(map(holds_dataset, state.values()))


def global_batch(loader: Any, num_ranks: int) -> int | None:
    """Returns the number of samples in one batch of all ranks together; None if it is not known."""
    is_iterable = isinstance(loader.dataset, IterableDataset)
    dealers = [loader, loader.dataset] if is_iterable else [loader, *_batch_samplers(loader)]
    size = getattr(loader.dataset, "batch_size", None) if is_iterable else getattr(dealers[-1], "batch_size", None)
    size = size if size is not None else loader.batch_size
    counts = [each.num_processes for each in dealers if isinstance(getattr(each, "num_processes", None), int)]
    if any(getattr(each, "split_batches", False) for each in dealers):
        return None if size is None else int(size)
    count = counts[0] if counts else num_ranks
    return None if size is None else int(size) * count


def batches_per_skip(loader: Any, num_ranks: int) -> int:
    """Returns the count that `accelerator.skip_first_batches` needs for each batch that a rank is to skip: 1, or
    `num_ranks` where rank 0 reads the batches of all ranks, unless the dataset is iterable.
    """
    reads_for_all = isinstance(loader, DataLoaderDispatcher) and not loader.split_batches
    return num_ranks if reads_for_all and not isinstance(loader.dataset, IterableDataset) else 1


def batches_now(loader: Any, shared: Mapping[str, Any], num_ranks: int) -> tuple[int, int]:
    """Converts the saved position to this number of ranks. Returns how many batches each rank has to skip, rounded
    down, and how many samples are read again because of the rounding; on another number of ranks, 0 and 0 if the size
    of a batch is not known.
    """
    if shared["num_ranks"] == num_ranks or not shared["batches"]:
        return int(shared["batches"]), 0
    now, then = global_batch(loader, num_ranks), shared["global_batch"]
    if not now or not then:
        return 0, 0
    return divmod(int(shared["batches"]) * int(then), now)
