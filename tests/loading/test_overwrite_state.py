"""What the error of a load says has become of the state is what has become of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from storage.faulty_store import Fault, FaultyStore

import bytecheckpoint as bcp
from bytecheckpoint import api, phases
from bytecheckpoint.formats import find_checkpoint
from bytecheckpoint.storage import range_reader

IN_ORDER = bcp.LoadOptions(reader_threads=1)
UNVERIFIED = bcp.LoadOptions(reader_threads=1, verify=False)
UNTOUCHED = ". Nothing of the state was overwritten"
UNFILLED = ". Nothing of the state was overwritten, but what had no memory may have some now that is not filled: load "
UNKNOWN = ". The state may be partly overwritten: load a good checkpoint into it before it is used"
OVERWRITTEN = ". The state is partly overwritten: load a good checkpoint into it before it is used"
LARGE_NUMEL = 3 << 18
"""Of a tensor that is read straight into its memory."""


def filled(value: float) -> dict[str, Any]:
    return {"large": torch.full((LARGE_NUMEL,), value), "small": torch.full((100,), value)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    bcp.save(tmp_path, {"model": filled(1.0)})
    return tmp_path


def data_file(saved: Path) -> Path:
    (file,) = (saved / "data").iterdir()
    return file


def damage(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0xFF
    file.write_bytes(content)


@contextmanager
def failing_read(number: int) -> Iterator[None]:
    """Within the block this read of a data file fails before it has read anything; the first is 1."""
    open_store = api.open_store

    def open_faulty(*args: Any, **kwargs: Any) -> FaultyStore:
        store = open_store(*args, **kwargs)
        return FaultyStore(store, fail_at=number, fault=Fault.BEFORE, counts=is_of_data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_checkpoint, "open_store", open_faulty)
        yield


def is_of_data(operation: str, name: str) -> bool:
    return operation == "read_into" and "data/" in name


def message_of(load: Callable[[], object]) -> str:
    with pytest.raises(bcp.CheckpointError) as error:
        load()
    return error.value.message


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def test_what_does_not_fit_says_that_nothing_was_loaded(saved: Path) -> None:
    state = {"model": {**filled(0.0), "other": torch.zeros(1)}}
    message = message_of(lambda: bcp.load(saved, state))
    assert "the state is as it was" in message
    assert "overwritten" not in message


def test_a_read_through_scratch_memory_that_fails_first_says_that_nothing_was_overwritten(saved: Path) -> None:
    model = {"small": torch.zeros(100)}
    with failing_read(1):
        message = message_of(lambda: bcp.load(saved, {"model": model}, include="model.small"))
    assert message.endswith(UNTOUCHED)
    assert is_all(model["small"], 0.0)


def test_damage_found_in_scratch_memory_says_that_nothing_was_overwritten(saved: Path) -> None:
    damage(data_file(saved), -1)
    model = {"small": torch.zeros(100)}
    message = message_of(lambda: bcp.load(saved, {"model": model}, include="model.small"))
    assert "damaged" in message
    assert message.endswith(UNTOUCHED)
    assert is_all(model["small"], 0.0)


def test_damage_found_in_the_memory_of_a_tensor_says_that_the_state_is_overwritten(saved: Path) -> None:
    damage(data_file(saved), LARGE_NUMEL)
    model = filled(0.0)
    message = message_of(lambda: bcp.load(saved, {"model": model}, options=IN_ORDER))
    assert "damaged" in message
    assert message.endswith(OVERWRITTEN)
    assert not is_all(model["large"], 0.0)


def test_a_read_into_a_tensor_that_fails_says_that_the_state_may_be_overwritten(saved: Path) -> None:
    with failing_read(1):
        message = message_of(lambda: bcp.load(saved, {"model": filled(0.0)}, options=IN_ORDER))
    assert message.endswith(UNKNOWN)


def test_what_fails_after_another_read_says_that_the_state_is_overwritten(saved: Path) -> None:
    damage(data_file(saved), -1)
    model = filled(0.0)
    message = message_of(lambda: bcp.load(saved, {"model": model}, options=IN_ORDER))
    assert message.endswith(OVERWRITTEN)
    assert not is_all(model["large"], 0.0)


@pytest.mark.parametrize("is_flat", [True, False])
def test_damage_in_a_frame_says_that_nothing_was_overwritten(tmp_path: Path, is_flat: bool) -> None:
    weights = torch.randn(1 << 10, 1 << 10).bfloat16()
    bcp.save(tmp_path, {"w": weights}, options=bcp.SaveOptions(codec="zstd"))
    damage(data_file(tmp_path), 5000)
    target = torch.zeros_like(weights) if is_flat else torch.zeros_like(weights).t().contiguous().t()
    message = message_of(lambda: bcp.load(tmp_path, {"w": target}, options=IN_ORDER))
    assert message.endswith(UNTOUCHED)
    with pytest.MonkeyPatch.context() as patch:  # what a checksum lets pass, or nobody has checked
        patch.setattr(range_reader, "decode_frame", raising(bcp.StorageError("boom", kind="unavailable")))
        message = message_of(lambda: bcp.load(tmp_path, {"w": target}, options=UNVERIFIED))
    assert message.endswith(UNTOUCHED)
    assert is_all(target, 0.0)


def test_memory_that_was_made_and_not_filled_is_told(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": torch.nn.Linear(3, 2)})
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    with failing_read(1):
        message = message_of(lambda: bcp.load(tmp_path, {"model": model}))
    assert UNFILLED in message
    assert not model.weight.is_meta


def test_what_is_refused_once_memory_is_made_says_that_nothing_was_overwritten(saved: Path) -> None:
    model = {"large": torch.zeros(LARGE_NUMEL), "small": torch.zeros(100, device="meta")}
    message = message_of(lambda: bcp.load(saved, {"model": model}))
    assert "on the meta device" in message
    assert UNFILLED in message
    assert is_all(model["large"], 0.0)


class Broken:
    """An object that does not take its state back."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise RuntimeError("boom")


def test_an_object_that_fails_before_anything_is_filled_says_that_the_state_may_be_overwritten(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"object": Broken()})
    message = message_of(lambda: bcp.load(tmp_path, {"object": Broken()}))
    assert message.endswith(UNKNOWN)


def test_an_object_that_fails_once_a_tensor_is_filled_says_that_the_state_is_overwritten(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": filled(1.0), "object": Broken()})
    model = filled(0.0)
    message = message_of(lambda: bcp.load(tmp_path, {"model": model, "object": Broken()}))
    assert message.endswith(OVERWRITTEN)
    assert is_all(model["large"], 1.0)


def test_plain_data_that_was_put_back_before_an_object_failed_counts(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"step": 3, "object": Broken()})
    state = {"step": 0, "object": Broken()}
    message = message_of(lambda: bcp.load(tmp_path, state))
    assert message.endswith(OVERWRITTEN)
    assert state["step"] == 3


def test_the_error_keeps_its_kind_and_its_cause(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cause = RuntimeError("boom")
    monkeypatch.setattr(phases, "read_together", raising(cause))
    with pytest.raises(bcp.CheckpointError) as error:
        bcp.load(saved, {"model": filled(0.0)})
    assert (error.value.kind, error.value.ranks, error.value.path) == ("rank_failed", (0,), str(saved))
    assert error.value.__cause__ is cause
    assert error.value.message.endswith(f"RuntimeError: boom{UNTOUCHED}")


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail
