"""Snapshots of tensors on a GPU: the values at the call, while the training's stream goes on and nothing waits for the
whole device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sample_tensors import bits_of
from snapshot_cases import OPTIONS, save

import bytecheckpoint as bcp
from bytecheckpoint.saving.in_flight import process_state
from gpu.conftest import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.fixture(autouse=True)
def no_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a wait for the whole device")

    monkeypatch.setattr("torch.cuda.synchronize", refuse)


def on_device() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    base = torch.randn(1200, 4000, device="cuda", generator=generator)
    return {
        "flat": base.clone(),
        "transposed": base.clone().T,
        "strided": base.clone()[:, ::3],
        "half": base.bfloat16(),
        "conjugated": torch.randn(9, 9, dtype=torch.complex64, device="cuda").conj(),
        "scalar": torch.tensor(3.0, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "host": torch.ones(1000),
    }


def keep_changing(state: dict[str, torch.Tensor]) -> None:
    """Kernels that follow at once on the current stream."""
    for _ in range(20):
        for tensor in state.values():
            tensor.add_(1)


def check(path: Path, expected: dict[str, torch.Tensor]) -> None:
    saved = bcp.open(path).state_dict()
    assert [name for name, value in expected.items() if bits_of(saved[name]) != bits_of(value)] == []


@pytest.mark.parametrize("on_own_stream", [False, True])
@pytest.mark.parametrize("kind", ["synchronous", "copy", "waves", "lazy", "lazy waves"])
def test_kernels_that_follow_at_once_change_nothing(tmp_path: Path, kind: str, on_own_stream: bool) -> None:
    """And those that were queued before the call, on whatever stream is the current one, have had their effect."""
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.current_stream()
    state = on_device()
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        for step in range(3):
            torch.cuda._sleep(50_000_000)
            keep_changing(state)
            if kind == "synchronous":
                handle = bcp.save(tmp_path, state, step=step)
            else:
                handle = save(tmp_path, state, kind, step=step)
            expected = {name: tensor.clone() for name, tensor in state.items()}
            keep_changing(state)
            handle.result(60)
            check(tmp_path / f"step_{step:08}", {name: tensor.cpu() for name, tensor in expected.items()})


def test_staging_memory_is_pinned(tmp_path: Path) -> None:
    bcp.save(tmp_path, on_device(), async_save=True, options=OPTIONS["copy"]).result(30)
    assert torch.frombuffer(process_state().buffers.staging._mapping, dtype=torch.uint8).is_pinned()


def test_an_optimizer_on_the_device_waits_for_a_lazy_save(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def backward() -> None:
        model(torch.randn(32, 512, device="cuda")).square().sum().backward()

    backward()
    optimizer.step()
    expected = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    state = {"model": model, "optimizer": optimizer}
    handle = bcp.save(tmp_path, state, async_save=True, options=OPTIONS["lazy"])
    backward()
    optimizer.step()
    handle.result(30)
    check(tmp_path, {name: value.cpu() for name, value in expected.items()})
