"""Sources of samples of each kind, and what reading them without a stop gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bytecheckpoint.data import Packer, ShuffleBuffer


class Lines:
    """An iterable without state, as a dataset of webdataset."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


class Records:
    """An iterable with a state, as a dataset of torchdata. Its state says how often it was asked for."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.position = 0
        self.num_asked = 0
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.samples):
            self.position += 1
            self.num_read += 1
            yield self.samples[self.position - 1]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        self.num_asked += 1
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class EpochOrder:
    """A sequence in another order in each epoch."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index >= len(self.samples):
            raise IndexError(index)
        return self.samples[(index + 3 * self.epoch) % len(self.samples)]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def documents(samples: list[int]) -> list[list[int]]:
    """Documents of 0 to 4 tokens, all different."""
    return [[10 * sample + token for token in range(sample % 5)] for sample in samples]


KINDS = {
    "sequence": lambda samples: samples,
    "epoch order": EpochOrder,
    "lines": Lines,
    "records": Records,
    "shuffled sequence": lambda samples: ShuffleBuffer(samples, 4, seed=1),
    "shuffled lines": lambda samples: ShuffleBuffer(Lines(samples), 5),
    "shuffled records": lambda samples: ShuffleBuffer(Records(samples), 3, seed=2),
    "packed sequence": lambda samples: Packer(documents(samples), 4),
    "packed lines": lambda samples: Packer(Lines(documents(samples)), 3),
    "packed records": lambda samples: Packer(Records(documents(samples)), 2),
    "packed after shuffling": lambda samples: Packer(ShuffleBuffer(Records(documents(samples)), 3), 4),
}
"""Functions that make a source of each kind of these samples."""


def plain(sample: Any) -> Any:
    """A sample as something that compares and hashes."""
    return tuple(sample.tolist()) if isinstance(sample, torch.Tensor) else sample


def passes(source: Any, num_epochs: int) -> list[Any]:
    """The samples of whole passes, one after the other, as nothing but `iter` gives them."""
    found = []
    for epoch in range(num_epochs):
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        found += [plain(sample) for sample in source]
    return found
