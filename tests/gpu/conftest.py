"""Devices for tests that run on a GPU where there is one, and on a fake of it everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_cuda import FakeCuda, on_fake_cuda

from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.staging.host_buffers import HostBuffers

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


class Device:
    """Tensors and kernels of a device."""

    def __init__(self, fake: FakeCuda | None) -> None:
        self.fake = fake
        self.name = "cpu" if fake else "cuda"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same values on the device. None of the fake's tensors may be flat."""
        if self.fake is None:
            return tensor.to("cuda")
        apart = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)[..., 0]
        return apart.copy_(tensor)

    def late(self, kernel: Callable[[], object]) -> None:
        """Gives a kernel to the current stream that is still to run when this returns."""
        if self.fake is not None:
            self.fake.callers_stream().give(kernel)
            return
        torch.cuda._sleep(50_000_000)
        kernel()

    def finish(self) -> None:
        """Waits for the current stream."""
        if self.fake is not None:
            stream = self.fake.callers_stream()
            stream.run(stream.num_given)
        else:
            torch.cuda.current_stream().synchronize()


@pytest.fixture(params=["fake", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """The device, with new buffers."""
    monkeypatch.setattr(process_state(), "buffers", HostBuffers())
    if request.param == "cuda":
        yield Device(None)
        return
    with on_fake_cuda() as fake:
        yield Device(fake)
