"""The least that the ranks of a group need to agree on anything through the store of their group: each sends a message,
rank 0 receives all of them and answers, each receives the answer. Nothing is planned, checked, removed or polled, and
no thread but the caller's takes part.
"""

from __future__ import annotations

from itertools import count

import torch.distributed as dist

MESSAGE = bytes(100)
_NUMBERS = count()
"""Numbers of the agreements of this process, the same on all ranks."""


def agree() -> None:
    number, rank, num_ranks = next(_NUMBERS), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    if rank > 0:
        store.set(f"limit/{number}/{rank}", MESSAGE)
        store.get(f"limit/{number}/answer")
        return
    store.multi_get([f"limit/{number}/{other}" for other in range(1, num_ranks)])
    store.set(f"limit/{number}/answer", MESSAGE)
