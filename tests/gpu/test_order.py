"""The order of saves and loads with kernels that are late, before the call and after it, for every way to copy."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import OWN, on_fake_cuda
from sample_tensors import bits_of, random_bits
from snapshot_cases import save

import bytecheckpoint as bcp
from bytecheckpoint.memory import device_to_host
from bytecheckpoint.memory.device_to_host import DeviceCopy, mark_streams
from bytecheckpoint.memory.host_to_device import CopyStreams, CudaCopyStream
from bytecheckpoint.saving.in_flight import process_state
from gpu.conftest import Device

KINDS = ["synchronous", "copy", "waves", "lazy", "lazy waves"]
TINY = bcp.LoadOptions(scratch_bytes=8 << 20, reader_threads=2)


def values(seed: int) -> dict[str, torch.Tensor]:
    state = {"large": random_bits(torch.float32, (4_500_000,), seed), "odd": random_bits(torch.uint8, (10_007,), seed)}
    state["bfloat16"] = random_bits(torch.bfloat16, (700, 300), seed)
    state |= {f"small.{number}": random_bits(torch.float32, (100,), seed + number) for number in range(50)}
    return state | {"scalar": random_bits(torch.float32, (1,), seed)}


def placed(device: Device, seed: int) -> dict[str, torch.Tensor]:
    return {name: device.put(tensor) for name, tensor in values(seed).items()}


def overwrite(state: dict[str, torch.Tensor], content: dict[str, torch.Tensor]) -> None:
    """Bit for bit, on the current stream."""
    for name, tensor in state.items():
        as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        tensor.view(as_integers).copy_(content[name].view(as_integers))


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in expected.items() if bits_of(found[name].cpu()) != bits_of(value)]


def saved(path: Path, state: dict[str, Any], kind: str) -> bcp.SaveHandle:
    return bcp.save(path, state) if kind == "synchronous" else save(path, state, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_has_what_kernels_before_it_leave_and_nothing_of_those_after(
    tmp_path: Path, device: Device, kind: str
) -> None:
    """Three times: the second save has a plan and pinned memory, so that a lazy one returns before the ranks agree."""
    state = placed(device, 0)
    contents = [placed(device, seed) for seed in (1, 2, 3, 9)]
    device.finish()
    for number in range(3):
        device.late(lambda number=number: overwrite(state, contents[number]))
        handle = saved(tmp_path / str(number), state, kind)
        device.late(lambda: overwrite(state, contents[3]))
        handle.result(60)
        device.finish()
        assert differing(bcp.open(tmp_path / str(number)).state_dict(), values(number + 1)) == []


@pytest.mark.parametrize(
    "options", [TINY, bcp.LoadOptions(), bcp.LoadOptions(verify=False)], ids=["tiny", "default", "raw"]
)
def test_a_load_comes_after_the_kernels_before_it_and_before_those_after(
    tmp_path: Path, device: Device, options: bcp.LoadOptions
) -> None:
    bcp.save(tmp_path, values(0))
    state, other = placed(device, 1), placed(device, 2)
    device.finish()
    device.late(lambda: overwrite(state, other))
    bcp.load(tmp_path, state, options=options)
    seen = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    device.late(lambda: overwrite(seen, state))
    device.finish()
    assert differing(seen, values(0)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_uses_what_is_copied_before_a_late_copy_is_done(
    tmp_path: Path, device: Device, monkeypatch: Any, kind: str
) -> None:
    """With a pause before and after each copy, to the host and from it."""
    queue_copy, copy = device_to_host.queue_copy, CudaCopyStream.copy

    def late_queue_copy(queued: DeviceCopy) -> None:
        device.pause()
        queue_copy(queued)
        device.pause()

    def late_copy(lane: CudaCopyStream, *arguments: Any) -> None:
        with torch.cuda.stream(lane._stream):
            device.pause()
        copy(lane, *arguments)
        with torch.cuda.stream(lane._stream):
            device.pause()

    monkeypatch.setattr(device_to_host, "queue_copy", late_queue_copy)
    monkeypatch.setattr(CudaCopyStream, "copy", late_copy)
    state, loaded = placed(device, 0), placed(device, 1)
    for number in range(2):
        saved(tmp_path / str(number), state, kind).result(60)
        assert differing(bcp.open(tmp_path / str(number)).state_dict(), values(0)) == []
        bcp.load(tmp_path / str(number), loaded, options=TINY)
        overwrite(state, loaded)  # at once, on the stream of the caller
        assert differing(state, values(0)) == []


def test_all_copies_of_a_process_take_one_stream_a_device(tmp_path: Path, device: Device, monkeypatch: Any) -> None:
    """Torch lends 32, in turn, also to collectives."""
    made: list[object] = []
    new_stream = torch.cuda.Stream

    def counted(*args: Any, **stream: Any) -> Any:
        if not stream:  # torch makes objects of streams that there are already, by their numbers
            made.append(args)
        return new_stream(*args, **stream)

    monkeypatch.setattr(torch.cuda, "Stream", counted)
    state = placed(device, 0)
    for kind in KINDS:
        saved(tmp_path / kind, state, kind).result(60)
        bcp.load(tmp_path / kind, state)
    assert len(made) <= 1


def test_staging_memory_is_pinned_at_its_exact_size_and_given_back(tmp_path: Path, device: Device) -> None:
    staging = process_state().buffers.staging
    large, small = placed(device, 0), {"t": device.put(torch.arange(1000.0))}
    for number, state in enumerate((large, small, small, small, small, large)):
        save(tmp_path / str(number), state, "copy").result(60)
        mapping = staging._mapping
        assert mapping is not None
        assert mapping._device is not None
        if device.fake is None:
            assert torch.frombuffer(mapping, dtype=torch.uint8).is_pinned()
        else:
            assert len(mapping) in device.fake.pinned.values()
            assert sum(device.fake.pinned.values()) == len(mapping)
        if number == 4:
            assert len(mapping) < 100_000
        if state is large:
            assert len(mapping) < 1.01 * sum(tensor.nbytes for tensor in large.values()) + 100_000
    assert staging._num_small_takes == 0


def test_blocks_of_a_synchronous_save_are_pinned(tmp_path: Path, device: Device) -> None:
    bcp.save(tmp_path, placed(device, 0))
    blocks = [returned.block for returned in process_state().buffers.scratch._returned]
    assert any(block.obj._device is not None for block in blocks)


def test_warming_up_pins_the_staging_memory(tmp_path: Path, device: Device) -> None:
    state = placed(device, 0)
    bcp.warm_up(state)
    mapping = process_state().buffers.staging._mapping
    assert mapping is not None
    assert mapping._device is not None
    save(tmp_path, state, "copy").result(60)
    assert process_state().buffers.staging._mapping is mapping


def test_a_host_that_pins_nothing_saves_all_the_same_with_one_warning(
    tmp_path: Path, device: Device, monkeypatch: Any, caplog: Any
) -> None:
    class Refusing:
        def cudaHostRegister(self, *_: int) -> int:
            refused_on.add(threading.get_ident())
            return 2

        def cudaGetErrorString(self, _: int) -> str:
            return "out of memory"

    refused_on: set[int] = set()
    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    state = placed(device, 0) | {"filler": device.put(torch.arange(5_000_000.0))}
    for number in range(2):
        save(tmp_path / str(number), state, "copy").result(60)
        saved_state = bcp.open(tmp_path / str(number)).state_dict()
        assert differing(saved_state, values(0)) == []
    warnings = [record.getMessage() for record in caplog.records if "GiB of host memory" in record.getMessage()]
    assert len(warnings) == 1
    assert "out of memory" in warnings[0]
    assert threading.get_ident() not in refused_on  # where the error would be the thread's last one


def test_a_host_that_pins_nothing_loads_all_the_same_with_one_warning(
    tmp_path: Path, device: Device, monkeypatch: Any, caplog: Any
) -> None:
    bcp.save(tmp_path, values(0))
    state = placed(device, 1)
    if device.fake is None:  # without CUDA torch pins nothing
        empty = torch.empty

        def refuse(*lengths: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
            if pin_memory:
                raise RuntimeError("out of memory")
            return empty(*lengths, **more)

        monkeypatch.setattr(torch, "empty", refuse)
    bcp.load(tmp_path, state, options=TINY)
    assert differing(state, values(0)) == []
    assert ["could not be pinned" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("kind", ["synchronous", "lazy"])
def test_a_save_or_a_load_inside_of_a_capture_is_refused(
    tmp_path: Path, device: Device, kind: str, monkeypatch: Any
) -> None:
    state = placed(device, 0)
    bcp.save(tmp_path / "good", state)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(bcp.CheckpointError, match="captures a CUDA graph") as raised:
        saved(tmp_path / "bad", state, kind).result(60)
    assert raised.value.kind == "unsupported_value"
    with pytest.raises(bcp.CheckpointError, match="captures a CUDA graph"):
        bcp.load(tmp_path / "good", state)


def test_a_save_of_host_tensors_calls_nothing_of_cuda(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a call of CUDA")

    for name in (
        "is_available",
        "device_count",
        "current_device",
        "current_stream",
        "device",
        "Stream",
        "Event",
        "cudart",
    ):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(process_state(), "buffers", type(process_state().buffers)())
    for kind in KINDS:
        saved(tmp_path / kind, values(0), kind).result(60)
        bcp.load(tmp_path / kind, values(1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_of_cuda_is_on_the_device_of_the_tensors_and_relaxed(tmp_path: Path, kind: str) -> None:
    """Threads begin with device 0, where a call would make a context."""
    with pytest.MonkeyPatch.context() as patch, on_fake_cuda() as fake:
        buffers = type(process_state().buffers)()
        patch.setattr(process_state(), "buffers", buffers)
        device = Device(fake)
        state = placed(device, 0)
        for number in range(2):
            saved(tmp_path / str(number), state, kind).result(60)
            bcp.load(tmp_path / str(number), state, options=TINY)
        buffers.staging.take(0)
        for mapping in [buffers.staging._mapping, *(returned.block.obj for returned in buffers.scratch._returned)]:
            if mapping is not None:
                mapping.unpin()
        assert fake.devices_used == {OWN}
        assert fake.modes == {2}
        assert fake.pinned == {}


def test_memory_that_is_freed_at_once_is_saved_all_the_same(tmp_path: Path, device: Device) -> None:
    """Torch would give it to the next tensor, whose kernels come at once: the snapshot holds it until it is copied."""
    for number in range(2):
        state = placed(device, number)
        device.finish()
        options = bcp.SaveOptions(snapshot="lazy")
        handle = bcp.save(tmp_path / str(number), state, async_save=True, options=options)
        state.clear()
        others = placed(device, 7)
        handle.result(60)
        assert differing(bcp.open(tmp_path / str(number)).state_dict(), values(number)) == []
        device.finish()
        assert differing(others, values(7)) == []


def test_an_accelerator_that_is_not_cuda_is_waited_for_before_the_copy(monkeypatch: Any) -> None:
    """Threads that copy have streams of their own, which are not ordered after the caller's."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    devices = [torch.device("xpu", 1), torch.device("cpu"), torch.device("meta")]
    assert mark_streams(devices) == {}
    assert waited == [torch.device("xpu", 1)]
    with CopyStreams([], CudaCopyStream, without_streams=devices):
        assert len(waited) == 2
    assert len(waited) == 3
