"""Loads into tensors on a GPU: through pinned memory, in order with the caller's stream, and without a wait for the
whole device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sample_tensors import DTYPES, LAYOUTS, SHAPE, random_bits, same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import bytecheckpoint as bcp
from bytecheckpoint.memory.host_to_device import CudaCopyStream, copied_buffers
from gpu.conftest import NEEDS_GPU

pytestmark = NEEDS_GPU

MiB = 1 << 20
TINY = bcp.LoadOptions(scratch_bytes=8 * MiB, reader_threads=2)
NAN = float("nan")


@pytest.fixture(autouse=True)
def no_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a wait for the whole device")

    monkeypatch.setattr("torch.cuda.synchronize", refuse)


def on_host(seed: int) -> dict[str, torch.Tensor]:
    state = {f"dtype.{dtype}": random_bits(dtype, SHAPE, seed) for dtype in DTYPES}
    state["large"] = random_bits(torch.float32, (5_000_011,), seed)
    state["matrix"] = random_bits(torch.bfloat16, (3000, 2000), seed)
    state["conjugated"] = random_bits(torch.complex64, (9, 9), seed).conj()
    state |= {f"small.{number}": random_bits(torch.float32, (100,), seed + number) for number in range(300)}
    return state | {"scalar": random_bits(torch.float32, (), seed), "empty": torch.empty(0, 3)}


def on_device(state: dict[str, torch.Tensor], device: str = "cuda") -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(value, device=device) for name, value in state.items()}


def differing(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in expected.items() if not same_bits(state[name].cpu(), value)]


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("options", [TINY, bcp.LoadOptions(verify=False)], ids=["tiny", "default"])
def test_every_dtype_arrives_beside_what_stays_on_the_host(
    tmp_path: Path, codec: Any, options: bcp.LoadOptions
) -> None:
    expected = on_host(0) | {"host": torch.arange(100_000.0), "step": torch.tensor(7.0)}
    bcp.save(tmp_path, expected, options=bcp.SaveOptions(codec=codec))
    state = on_device(on_host(1)) | {"host": torch.zeros(100_000), "step": torch.tensor(0.0)}
    bcp.load(tmp_path, state, options=options)
    assert differing(state, expected) == []
    assert state["step"].is_cpu


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_arrives(tmp_path: Path, name: str) -> None:
    content = random_bits(torch.float32, SHAPE)
    bcp.save(tmp_path, {"t": content})
    placed = LAYOUTS[name](torch.zeros(SHAPE))
    storage = torch.zeros(placed.untyped_storage().nbytes() // 4, device="cuda")
    target = storage.as_strided(placed.shape, placed.stride(), placed.storage_offset())
    bcp.load(tmp_path, {"t": target})
    assert same_bits(target.cpu().contiguous(), content)


def test_large_strided_tensors_arrive_and_their_gaps_stay(tmp_path: Path) -> None:
    content = random_bits(torch.bfloat16, (3000, 1000))
    bcp.save(tmp_path, {"columns": content, "rows": content})
    memory = torch.full((3000, 3000), 3.0, dtype=torch.bfloat16, device="cuda")
    rows = torch.empty(1000, 3000, dtype=torch.bfloat16, device="cuda").T
    bcp.load(tmp_path, {"columns": memory[:, ::3], "rows": rows}, options=TINY)
    assert same_bits(memory[:, ::3].cpu().contiguous(), content)
    assert same_bits(rows.cpu().contiguous(), content)
    assert bool((memory[:, 1::3] == 3.0).all())


def test_dtypes_are_converted_as_on_the_host(tmp_path: Path) -> None:
    expected = {"t": torch.tensor([1e30, -1.5, NAN, 3e9]).repeat(100_000)}
    bcp.save(tmp_path, expected)
    for dtype in (torch.bfloat16, torch.float64, torch.int32):
        host, device = torch.zeros(400_000, dtype=dtype), torch.zeros(400_000, dtype=dtype, device="cuda")
        bcp.load(tmp_path, {"t": host}, cast=True)
        bcp.load(tmp_path, {"t": device}, cast=True)
        assert same_bits(device.cpu(), host)


@pytest.mark.parametrize("on_own_stream", [False, True])
def test_kernels_before_the_load_do_not_undo_it_and_those_after_see_it(tmp_path: Path, on_own_stream: bool) -> None:
    expected = {"large": torch.arange(5_000_000.0), "strided": torch.arange(4_000_000.0).reshape(2000, 2000)}
    bcp.save(tmp_path, expected)
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        state = {
            "large": torch.zeros(5_000_000, device="cuda"),
            "strided": torch.zeros(2000, 2000, device="cuda").T,
        }
        for _ in range(3):
            torch.cuda._sleep(50_000_000)
            for tensor in state.values():
                tensor.fill_(-1.0)
            bcp.load(tmp_path, state, options=TINY)
            seen = {name: tensor + 1 for name, tensor in state.items()}
            assert all(torch.equal(seen[name].cpu(), value + 1) for name, value in expected.items())


def test_memory_that_was_just_freed_is_not_overwritten_by_older_kernels(tmp_path: Path) -> None:
    """A module on the meta device gets memory that kernels of the caller's stream may still write to."""
    source = torch.nn.Linear(1500, 1500)
    bcp.save(tmp_path, {"model": source})
    with torch.device("meta"):
        model = torch.nn.Linear(1500, 1500)
    noise = [torch.zeros(1500, 1500, device="cuda") for _ in range(4)]
    torch.cuda._sleep(100_000_000)
    for tensor in noise:
        tensor.fill_(5.0)
    noise.clear()
    model.to_empty(device="cuda")
    bcp.load(tmp_path, {"model": model})
    assert torch.equal(model.weight.cpu(), source.weight)


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_optimizer_gets_its_state_on_the_device(tmp_path: Path, is_fused: bool) -> None:
    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=is_fused)

    model, optimizer = trained()
    for _ in range(2):
        model(torch.randn(32, 512, device="cuda")).square().sum().backward()
        optimizer.step()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    new_model, new_optimizer = trained()
    bcp.load(tmp_path, {"model": new_model, "optimizer": new_optimizer})
    new_states = list(new_optimizer.state.values())
    for old, new in zip(optimizer.state.values(), new_states, strict=True):
        assert {key: (value.device, value.dtype) for key, value in old.items()} == {
            key: (value.device, value.dtype) for key, value in new.items()
        }
        assert all(torch.equal(value, new[key]) for key, value in old.items())
    for old, new in zip(model.parameters(), new_model.parameters(), strict=True):
        assert torch.equal(old, new)
        new.grad = torch.ones_like(new)
    new_optimizer.step()


def test_lists_in_the_state_of_a_fresh_optimizer_arrive_for_its_next_step(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3000, device="cuda"))
    optimizers = [torch.optim.LBFGS([("weight", weight)], max_iter=3) for _ in range(2)]
    weight.grad = gradient = torch.zeros_like(weight)

    def loss() -> torch.Tensor:
        return gradient.copy_(weight.detach().sin()).sum()

    optimizers[0].step(loss)
    bcp.save(tmp_path, {"optimizer": optimizers[0]})
    bcp.load(tmp_path, {"optimizer": optimizers[1]})
    assert all(each.is_cuda for each in optimizers[1].state[weight]["old_dirs"])
    optimizers[1].step(loss)


def test_a_shard_of_a_dtensor_arrives(tmp_path: Path) -> None:
    content = random_bits(torch.float32, (1000, 700))
    bcp.save(tmp_path, {"t": content})
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )  # one process: nothing is sent
    try:
        mesh = init_device_mesh("cuda", (1,))
        target = DTensor.from_local(torch.zeros(1000, 700, device="cuda"), mesh, [Shard(0)], run_check=False)
        bcp.load(tmp_path, {"t": target})
    finally:
        torch.distributed.destroy_process_group()
    assert same_bits(target.to_local().cpu(), content)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
def test_several_devices_are_filled_at_once(tmp_path: Path) -> None:
    bcp.save(tmp_path, on_host(0))
    state = on_host(1)
    placed = {name: value.to(f"cuda:{number % 2}") for number, (name, value) in enumerate(state.items())}
    bcp.load(tmp_path, placed, options=TINY)
    assert differing(placed, on_host(0)) == []


def test_damaged_bytes_reach_no_tensor_and_the_next_load_works(tmp_path: Path) -> None:
    expected = {"large": torch.arange(1.0, 5_000_001.0)}
    for name in ("good", "bad"):
        bcp.save(tmp_path / name, expected)
    (file,) = (tmp_path / "bad").rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[9 * MiB] ^= 1
    file.write_bytes(content)
    state = {"large": torch.zeros(5_000_000, device="cuda")}
    with pytest.raises(bcp.CheckpointCorruptError):
        bcp.load(tmp_path / "bad", state, options=TINY)
    found = state["large"].cpu()
    assert bool(((found == expected["large"]) | (found == 0)).all())
    bcp.load(tmp_path / "good", state, options=TINY)
    assert torch.equal(state["large"].cpu(), expected["large"])


def test_buffers_are_pinned_and_wait_for_their_copies() -> None:
    lane = CudaCopyStream(torch.device("cuda", 0))
    buffers = copied_buffers([lane], num_buffers=1, byte_length=MiB)
    target = torch.zeros(2 * MiB, dtype=torch.uint8, device="cuda")
    for number in range(2):
        buffer = buffers.take()
        assert torch.frombuffer(buffer, dtype=torch.uint8).is_pinned()
        buffer[:] = bytes([number + 1]) * MiB
        lane.copy(target[number * MiB : (number + 1) * MiB], buffer, None)
        buffers.give(buffer)
    lane.close()
    assert target.unique(return_counts=True)[1].tolist() == [MiB, MiB]
