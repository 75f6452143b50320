"""The random number generators of a process: Python's, numpy's, torch's on the host and on CUDA devices."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch


class RngState:
    """The random number generators of this process, for the state of a save or a load: `{"rng": bcp.RngState()}`.

    Those that Python's `random`, `numpy.random` and torch use where no other is passed, the latter for the host and,
    where this process has used CUDA, for its devices. It holds nothing: a save reads the generators, a load sets them.

    Every rank's are kept, and a rank gets back those of the rank of the same number. On a larger number of ranks those
    that have none keep what they have, so seed each rank differently before loading; on a smaller number the generators
    of the other ranks are left alone. What was the current CUDA device sets the one that is now, others go by number;
    on a process without them a warning says that they are left out.

    Generators of your own have states of their own: save `generator.get_state()` in a `RankLocal`.
    """

    def __repr__(self) -> str:
        return "RngState(python, numpy, torch, and CUDA where it is used)"

    def state_dict(self) -> dict[str, Any]:
        """What the generators are at now. A save calls this."""
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  it is the old generator that is global
            "torch": torch.get_rng_state(),
        }
        # Asking for the state of a device that was never used would make a context on it, hundreds of megabytes each.
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            devices = [generator.get_state() for generator in torch.cuda.default_generators]
            state["cuda"] = {"current": torch.cuda.current_device(), "devices": devices}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators. A load calls this."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if "cuda" in state:
            _set_cuda(state["cuda"]["current"], state["cuda"]["devices"])


def _set_cuda(current: int, devices: list[torch.Tensor]) -> None:
    num_devices = torch.cuda.device_count()
    for number in range(min(len(devices), num_devices)):
        torch.cuda.set_rng_state(devices[number], number)
    if num_devices:
        torch.cuda.set_rng_state(devices[current])
    if len(devices) > num_devices:
        warnings.warn(
            f"random numbers of {len(devices)} CUDA devices were saved, and this process has {num_devices}: those of "
            "the others are left out",
            stacklevel=2,
        )
