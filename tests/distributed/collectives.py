"""Whether ranks have used torch's collectives, on the calling thread or on any other: a library that is to be called in
the middle of training must not.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts what is sent between ranks, and its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.calls[str(func)] += 1
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))


def sequence_number() -> int:
    """Of the last collective of the process group, from whichever thread."""
    return torch.distributed.distributed_c10d._get_default_group()._get_sequence_number_for_group()
