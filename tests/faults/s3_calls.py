"""One save or load of one rank at an object store, as a worker carries it out, and how it ended. It knows no faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest

import bytecheckpoint as bcp
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.saving.plans.rank_plan import PlanCache
from bytecheckpoint.staging import file_image
from bytecheckpoint.storage.backends import s3_requests, s3_upload
from distributed.small_pieces import small_pieces
from faults.moto_bucket import storage_options
from faults.seams import Seen, seen, state_of

UNTOUCHED = -1.0
"""What a state holds before it is loaded into."""
PART_BYTES = 256 << 10


class Place(NamedTuple):
    """Where a checkpoint is to be, and which way leads there."""

    url: str
    step: int | None
    endpoint: str
    timeout_s: float
    stalled_s: float
    """Without a byte for that long a request has stalled."""
    in_parts: bool

    @property
    def storage_options(self) -> dict[str, Any]:
        timeouts = {"connect_timeout": self.stalled_s, "read_timeout": self.stalled_s}
        return storage_options(self.endpoint, config_kwargs=timeouts)


class Ended(NamedTuple):
    """How a save or a load ended on one rank."""

    error: Seen | None
    seconds: float
    value: float | None = None
    """That the state holds everywhere after a load; None where it holds several."""


@contextmanager
def in_a_hurry() -> Iterator[None]:
    """Within the block nobody is held back for long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_requests, "_FIRST_BACKOFF_S", 0.02)
        patch.setattr(s3_requests, "_MAX_BACKOFF_S", 0.2)
        patch.setattr(s3_requests, "_FORGET_BACKOFF_S", 1.0)
        patch.setattr(s3_requests, "_FIRST_CONTACT_S", 1.0)
        patch.setattr(s3_upload, "_CLEAN_UP_S", 2.0)
        yield


@contextmanager
def in_small_parts() -> Iterator[None]:
    """Within the block a small state is uploaded and read like a large one."""
    with small_pieces(extent_bytes=PART_BYTES // 8), pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_state(), "plans", PlanCache())  # those that are kept have large blocks
        patch.setattr(file_image, "BLOCK_BYTES", PART_BYTES)
        patch.setattr(s3_upload, "_PART_BYTES", PART_BYTES)
        patch.setattr(s3_upload, "_MIN_PART_BYTES", 1)
        yield


def save_there(
    rank: int, _: int, place: Place, value: float, async_save: bool = False, overwrite: bool = False
) -> Ended:
    """On one rank."""
    options = bcp.SaveOptions(timeout_s=place.timeout_s, overwrite=overwrite)

    def save() -> object:
        return bcp.save(
            place.url,
            state_of(rank, value),
            step=place.step,
            async_save=async_save,
            storage_options=place.storage_options,
            options=options,
        ).result()

    started = time.monotonic()
    with in_a_hurry(), in_small_parts() if place.in_parts else nullcontext():
        return Ended(seen(save), time.monotonic() - started)


def load_there(rank: int, _: int, place: Place) -> Ended:
    """On one rank."""
    state, options = state_of(rank, UNTOUCHED), bcp.LoadOptions(timeout_s=place.timeout_s)

    def load() -> object:
        step = "latest" if place.step is None else place.step
        return bcp.load(place.url, state, step=step, storage_options=place.storage_options, options=options)

    started = time.monotonic()
    with in_a_hurry(), in_small_parts() if place.in_parts else nullcontext():
        return Ended(seen(load), time.monotonic() - started, value_of(rank, state))


def value_of(rank: int, state: dict[str, Any]) -> float | None:
    tensors = [state["all"], state["own"][f"rank{rank}"] - rank]
    values = {state["plain"]["value"], *(each.item() for tensor in tensors for each in tensor.aminmax())}
    return values.pop() if len(values) == 1 else None
