"""Batches that carry how far their streams were read, from the process that reads to the one that trains."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from bytecheckpoint.data.stream_reader import Change
from bytecheckpoint.data.streams import Streams


@dataclass(frozen=True)
class CountedBatch:
    """A batch, and the places of its streams after it."""

    batch: Any
    changes: Sequence[Change]

    def pin_memory(self) -> CountedBatch:
        """Returns this message with the batch in pinned memory. torch calls this method by its name."""
        return CountedBatch(pin_memory(self.batch), self.changes)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class CountingCollate:
    """The loader's `collate_fn`, called in the process that reads, right after a batch was read; adds what was read. If
    it fails, the streams go back to where they were before the batch.
    """

    collate: Callable[[Any], Any]
    streams: Streams
    """The dataset of the loader; in a worker its copy there, because dataset and collate_fn are sent to it together."""

    def __call__(self, samples: Any) -> CountedBatch:
        reader = self.streams._reader
        if reader is None:
            raise RuntimeError("a state was loaded while a batch was read: call iter() on the loader again")
        try:
            batch = self.collate(samples)
        except BaseException as error:
            reader.roll_back()
            if isinstance(error, StopIteration):  # it would end the pass, and the rest of the epoch would be lost
                raise RuntimeError("the collate_fn of the DataLoader raised StopIteration") from error
            raise
        changes = reader.take_changes()
        return CountedBatch(
            batch, changes if get_worker_info() is None else [_with_leaves(_pack_tensor, each) for each in changes]
        )


def received(changes: Sequence[Change]) -> list[Change]:
    """Returns changes that a worker has sent, with the tensors in them unpacked."""
    return [_with_leaves(_unpack_tensor, each) for each in changes]


class _SentTensor(NamedTuple):
    """A tensor's bytes. Sent as tensors, the thousands of samples in a buffer would each hold a file open."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


def _with_leaves(convert: Callable[[Any], Any], change: Change) -> Change:
    snapshot = change.snapshot
    if snapshot is None or isinstance(snapshot, EllipsisType):
        return change
    return change._replace(snapshot=replace(snapshot, state=_converted(convert, snapshot.state)))


def _converted(convert: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) in {dict, OrderedDict}:
        return type(tree)((key, _converted(convert, value)) for key, value in tree.items())
    if type(tree) in {list, tuple}:
        return type(tree)(_converted(convert, value) for value in tree)
    return convert(tree)


def _pack_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return leaf  # a save refuses sparse and nested ones by their name
    whole = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Flattened first: neither a tensor without dimensions can be viewed as another type, nor one element with a stride.
    data = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
    return _SentTensor(leaf.dtype, tuple(leaf.shape), data)


def _unpack_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, _SentTensor):
        return leaf
    return torch.from_numpy(leaf.data).view(leaf.dtype).reshape(leaf.shape)
