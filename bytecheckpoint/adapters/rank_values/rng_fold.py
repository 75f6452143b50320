"""Random number streams for ranks that a save lacked, by root, moment and rank: no communication, no two alike."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from bytecheckpoint.adapters.plain.plain_data import encode_plain

ROOT = "root"
"""Key of the root in the state of `RngState`."""

_NUM_WORDS = 624
"""Words of 32 bits in the state of a Mersenne twister."""
_FIRST_WORD = 24
"""Bytes of torch's state before the words of its twister: its seed, counters and flags. Words take 8 bytes each."""


def stream_root(state: dict[str, Any]) -> bytes:
    """Returns the root of new streams: a digest of the states of generators in `state`. Draws no number from them."""
    own = {key: state[key] for key in ("python", "numpy", "torch", "cuda") if key in state}
    return hashlib.sha256(encode_plain(own, "")).digest()[:16]


def key_of(root: bytes, *names: str) -> int:
    """Returns 256 bits computed from the root and these names."""
    return int.from_bytes(hashlib.sha256(root + "\n".join(names).encode()).digest(), "little")


def folded(root: bytes, moment: str, place: str) -> dict[str, Any]:
    """Returns a new state for the generators of this process, keyed by root, moment and place. Sets no generator."""

    def key(name: str) -> int:
        return key_of(root, moment, place, name)

    kind = getattr(np.random, np.random.get_state(legacy=False)["bit_generator"])  # noqa: NPY002  the global one
    bits = kind(np.random.SeedSequence(key("numpy")))
    state: dict[str, Any] = {
        "python": random.Random(key("python")).getstate(),  # noqa: S311  nothing secret
        "numpy": {**bits.state, "has_gauss": 0, "gauss": 0.0},
        "torch": _torch_state(key("torch")),
    }
    num_devices = torch.cuda.device_count()
    if num_devices:
        devices = [philox_state(key(f"cuda {number}")) for number in range(num_devices)]
        state["cuda"] = {"current": None, "devices": devices}
    return state


def philox_state(key: int) -> torch.Tensor:
    """Returns the start of a stream of a CUDA generator: its seed and offset, 8 bytes each."""
    return torch.tensor(list((key % 2**64).to_bytes(8, "little") + bytes(8)), dtype=torch.uint8, device="cpu")


def _torch_state(key: int) -> torch.Tensor:
    """Returns a state of torch's CPU generator, all words of which follow from the key. torch's own seeds have 32 bits,
    so that two of thousands of ranks would get the same.
    """
    generator = torch.Generator().manual_seed(key % 2**64)
    state = generator.get_state()
    words = np.random.SeedSequence(key).generate_state(_NUM_WORDS, np.uint32).astype("<u8").tobytes()
    state[_FIRST_WORD : _FIRST_WORD + len(words)] = torch.tensor(list(words), dtype=torch.uint8, device="cpu")
    return state
