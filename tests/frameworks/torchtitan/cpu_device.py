"""Lets torchtitan train on the CPU with gloo. It asks torch for an accelerator once, when it is imported, and calls
what torch.cuda has: here it gets the CPU, with what torch.cpu lacks. Nothing of torchtitan is changed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class _CpuDevice:
    """torch.cpu, and functions of torch.cuda that torchtitan calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, _: object) -> str:
        return "CPU"

    def get_device_properties(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def memory_stats(self, _: object) -> dict[str, int]:
        return {}


def import_torchtitan() -> None:
    """Imports the module that asks. Raises ImportError where torchtitan is missing."""
    asked = torch._utils._get_available_device_type, torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: _CpuDevice()
    try:
        import torchtitan.tools.utils as _  # noqa: F401
    finally:
        torch._utils._get_available_device_type, torch._utils._get_device_module = asked
    if not hasattr(torch.distributed, "set_timeout"):
        # torchtitan 0.3 calls it after its first step, and torch 2.13 does not have it yet.
        torch.distributed.set_timeout = lambda *_: None
