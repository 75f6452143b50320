"""Readers beside saves that replace the checkpoint, and beside its deletion: they get the old one or the new one,
whole, and nothing is called damaged.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from faults.seams import Seam, before
from storage.s3_service import S3Service

import bytecheckpoint as bcp
from bytecheckpoint.loading import read as read_module

OVERWRITING = bcp.SaveOptions(overwrite=True)
NUM_LOADS = 300
WRITERS_PAUSE_S = 0.02

PLACES = ["a folder", "memory", "s3"]


class Place(NamedTuple):
    url: str
    storage_options: dict[str, Any] | None


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The one with the name that the test is parametrized with."""
    if request.param == "s3":
        s3: S3Service = request.getfixturevalue("s3")
        return Place(f"s3://{s3.bucket}/{request.getfixturevalue('s3_prefix')}", s3.options)
    return Place(str(tmp_path) if request.param == "a folder" else f"memory://{uuid.uuid4().hex}", None)


def state_of(value: float, *, num_tensors: int = 3) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((4000,), value) for number in range(num_tensors)}


def values_of(state: dict[str, torch.Tensor]) -> set[float]:
    return {value for tensor in state.values() for value in tensor.tolist()}


def once(action: Callable[[], object]) -> Callable[[], None]:
    """The action at the first call, which the action itself may make again, and nothing later."""
    left = [action]

    def act() -> None:
        if left:
            left.pop()()

    return act


@pytest.mark.parametrize("names", [1, 400])
def test_a_manifest_that_is_replaced_when_it_is_opened_is_read_whole(tmp_path: Path, names: int) -> None:
    """The new manifest is longer, or shorter."""
    bcp.save(tmp_path, state_of(1.0, num_tensors=20))
    replace = once(lambda: bcp.save(tmp_path, state_of(2.0, num_tensors=names), options=OVERWRITING))
    with before(Seam(os, "open"), replace):
        found = bcp.open(tmp_path)
    assert len(found) == names
    assert values_of(found.state_dict()) == {2.0}


@pytest.mark.parametrize("moment", ["planning", "reading"])
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_load_of_what_is_replaced_meanwhile_loads_the_new_one(place: Place, moment: str) -> None:
    url, options = place
    bcp.save(url, state_of(1.0), storage_options=options)
    replace = once(lambda: bcp.save(url, state_of(2.0), storage_options=options, options=OVERWRITING))
    seam = {"planning": Seam(read_module, "plan_load"), "reading": Seam(read_module, "run_fetches")}[moment]
    state = state_of(-1.0)
    with before(seam, replace):
        report = bcp.load(url, state, storage_options=options)
    assert values_of(state) == {2.0}
    assert report.save_id == bcp.open(url, storage_options=options).info.save_id


def test_a_load_says_that_the_checkpoint_is_replaced_again_and_again(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0))

    def replace() -> None:
        bcp.save(tmp_path, state_of(2.0), options=OVERWRITING)

    with (
        before(Seam(read_module, "run_fetches"), replace),
        pytest.raises(bcp.CheckpointNotFoundError) as raised,
    ):
        bcp.load(tmp_path, state_of(-1.0))
    assert raised.value.kind == "replaced"
    assert "Nothing is damaged" in str(raised.value)


def test_an_error_after_another_attempt_says_what_the_first_has_left(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0))
    replace = once(lambda: bcp.save(tmp_path, {"other": torch.ones(3)}, options=OVERWRITING))
    with (
        before(Seam(read_module, "run_fetches"), replace),
        pytest.raises(bcp.CheckpointMismatchError) as raised,
    ):
        bcp.load(tmp_path, state_of(-1.0))
    assert "was replaced by another save" in str(raised.value)
    assert "The state" in str(raised.value) or "Nothing of the state" in str(raised.value)


def test_a_view_of_what_was_replaced_says_so(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0))
    found = bcp.open(tmp_path)
    bcp.save(tmp_path, state_of(2.0), options=OVERWRITING)
    for read in (lambda: found["w0"][:3], found.state_dict):
        with pytest.raises(bcp.CheckpointNotFoundError) as raised:
            read()
        assert raised.value.kind == "replaced"
    assert bcp.open(tmp_path)["w0"][0] == 2.0


def test_a_file_that_is_really_gone_is_still_missing(tmp_path: Path) -> None:
    bcp.save(tmp_path, state_of(1.0))
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    with pytest.raises(bcp.CheckpointNotFoundError) as raised:
        bcp.load(tmp_path, state_of(-1.0))
    assert raised.value.kind == "missing_file"


@pytest.mark.parametrize("place", ["a folder", "memory"], indirect=True)
def test_hundreds_of_loads_beside_two_writers_get_one_checkpoint_each(place: Place) -> None:
    url, options = place
    bcp.save(url, state_of(0.0), storage_options=options)
    is_over, failures, saved = threading.Event(), [], []
    num_refused = 0

    def write(value: float) -> None:
        while not is_over.is_set():
            try:
                bcp.save(url, state_of(value), storage_options=options, options=OVERWRITING)
                saved.append(value)
            except bcp.CheckpointError as error:
                # Another writer's manifest came between: on stores without conditions the slower save says so.
                if "memory" not in url or error.kind not in {"storage", "exists"}:
                    failures.append(error)
            is_over.wait(WRITERS_PAUSE_S)

    writers = [threading.Thread(target=write, args=(value,)) for value in (1.0, 2.0)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(NUM_LOADS):
            state = state_of(-1.0)
            try:
                bcp.load(url, state, storage_options=options)
            except bcp.CheckpointNotFoundError as error:
                # On a busy machine two writers may be faster than ten attempts of a reader.
                if error.kind != "replaced":
                    raise
                num_refused += 1
                continue
            found = values_of(state)
            assert len(found) == 1, found
            assert found <= {0.0, 1.0, 2.0}
    finally:
        is_over.set()
        for writer in writers:
            writer.join()
    assert failures == []
    assert len(saved) > 10
    assert num_refused < NUM_LOADS // 10
