"""Snapshots of a device whose copies come as late as they may: what they wait for, what waits for them, and where they
go. What needs a real device is in test_cuda_snapshots.py.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from late_streams import on_late_streams
from sample_tensors import DTYPES, random_bits
from snapshot_cases import OPTIONS, bits_of_all, differing, raw_memory, save, saved_bits

import bytecheckpoint as bcp
from bytecheckpoint.memory.device_to_host import DeviceCopies, DeviceRanges, mark_streams
from bytecheckpoint.saving import write

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

KINDS = ["synchronous", "copy", "waves", "lazy", "lazy waves"]


def on_device(seed: int = 0) -> dict[str, torch.Tensor]:
    """None of them is flat, so all of them are on the device; some cross the ends of blocks."""
    state = {f"dtype.{dtype}": random_bits(dtype, (90, 40), seed).T for dtype in DTYPES}
    state["large"] = random_bits(torch.float32, (4001, 5003), seed).T
    state["strided"] = random_bits(torch.bfloat16, (3000, 2000), seed)[:, ::3]
    state["conjugated"] = random_bits(torch.complex64, (900, 900), seed).conj()
    return state


def saved_late(path: Path, state: dict[str, torch.Tensor], kind: str) -> bcp.SaveHandle:
    if kind == "synchronous":
        return bcp.save(path, state, options=bcp.SaveOptions())
    return save(path, state, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_that_the_stream_of_the_caller_leaves_at_the_call(tmp_path: Path, kind: str) -> None:
    """Kernels given before the call are done before the copies, and those given after the call come after them."""
    state, expected = on_device(), on_device(1)
    host = {"host": torch.arange(1000.0)}
    flat_bits = bits_of_all(host)
    with on_late_streams() as streams:
        for memory, content in zip(raw_memory(state), raw_memory(expected), strict=True):
            streams.give(partial(memory.copy_, content))
        handle = saved_late(tmp_path, state | host, kind)
        for memory in raw_memory(state | host):
            memory.zero_()
        handle.result(60)
        assert streams.num_copied == streams.num_queued >= len(state)
        assert streams.events[0] == "mark"
        assert streams.events.count("copy") >= 1
    assert differing(saved_bits(tmp_path), bits_of_all(expected) | flat_bits) == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_tensor_may_be_the_last_of_its_file(tmp_path: Path, kind: str) -> None:
    """A conjugated one is not flat, so it is on the device."""
    state = {"first": random_bits(torch.complex64, (900, 90), 0).conj(), "last": torch.empty(0, 3).cfloat().conj()}
    expected = bits_of_all(state)
    with on_late_streams() as streams:
        saved_late(tmp_path, state, kind).result(60)
        assert streams.num_copied == streams.num_queued > 0
    assert differing(saved_bits(tmp_path), expected) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_marks_its_own_stream_whoever_copies(tmp_path: Path, kind: str) -> None:
    marking: set[int] = set()
    with on_late_streams() as streams, pytest.MonkeyPatch.context() as patch:
        mark = streams.mark
        patch.setattr(streams, "mark", lambda: (marking.add(threading.get_ident()), mark())[1])
        saved_late(tmp_path, on_device(), kind).result(60)
    assert marking == {threading.get_ident()}


def test_copies_are_queued_behind_the_event_and_made_when_they_are_waited_for() -> None:
    tensor, memory = torch.zeros(8, 4).T, bytearray(b"\xff" * 128)
    with on_late_streams() as streams:
        streams.give(lambda: tensor.fill_(1))
        copies = DeviceCopies([({0: tensor}, memoryview(memory))], mark_streams([tensor.device]))
        streams.give(lambda: tensor.fill_(2))
        copies.start()
        copies.start()
        assert (streams.events, streams.num_queued) == (["mark", "copy"], 1)
        assert memory == b"\xff" * 128  # the host did not wait
        copies.wait()
    assert torch.frombuffer(memory, dtype=torch.float32).tolist() == [1.0] * 32


def test_what_fails_while_it_is_queued_is_queued_again() -> None:
    tensor, memory = torch.ones(8, 4).T, bytearray(128)
    with on_late_streams() as streams, pytest.MonkeyPatch.context() as patch:
        copies = DeviceCopies([({0: tensor}, memoryview(memory))], mark_streams([tensor.device]))

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("device lost")

        patch.setattr(streams, "copy", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            copies.start()
        patch.undo()
        with on_late_streams():
            copies.start()
            copies.wait()
    assert torch.frombuffer(memory, dtype=torch.float32).tolist() == [1.0] * 32


@pytest.mark.parametrize("width", [1, 7, 16, 1000])
def test_a_range_of_a_file_has_its_part_of_every_tensor_and_nothing_else(width: int) -> None:
    tensors = {
        5: torch.arange(12.0).view(3, 4).T,
        60: random_bits(torch.uint8, (5, 3)).T,
        75: torch.arange(4).flip(0)[::2],
    }
    expected = bytearray(b"\xee" * 100)
    for start, tensor in tensors.items():
        expected[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    found = bytearray(b"\xee" * 100)
    with on_late_streams() as streams:
        parts = DeviceRanges([{}, tensors], mark_streams([torch.device("cpu")]))
        for start in range(0, 100, width):
            parts.gather(1, start, memoryview(found)[start : start + width])
        parts.gather(0, 0, memoryview(bytearray(10)))
    assert found == expected
    assert streams.num_copied == streams.num_queued


def test_a_device_without_streams_is_not_marked() -> None:
    assert mark_streams([torch.device("cpu"), torch.device("meta")]) == {}


@pytest.mark.parametrize("kind", ["copy", "waves"])
def test_a_failed_save_leaves_no_copy_that_is_still_to_come(tmp_path: Path, kind: str) -> None:
    """Its memory goes to the next save, whose bytes a late copy would overwrite."""
    state = on_device()
    with on_late_streams() as streams, pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "write_image", refused)
        with pytest.raises(bcp.StorageError, match="planted"):
            bcp.save(tmp_path / "bad", state, async_save=True, options=OPTIONS[kind]).result(60)
        assert streams.num_copied == streams.num_queued
        patch.undo()


def refused(*_: object, **__: object) -> None:
    raise bcp.StorageError("planted", kind="no_space")
