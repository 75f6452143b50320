"""The least that the ranks of a group need to agree on anything through the store of their group: each says a word,
the first one hears all of them and answers, each hears the answer. Nothing is planned, checked or removed, nobody
polls, and no thread but the caller's takes part.
"""

from __future__ import annotations

from itertools import count

import torch.distributed as dist

WORD = bytes(100)
_NUMBERS = count()
"""Of the agreements of this process, the same on all ranks."""


def agree() -> None:
    number, rank, num_ranks = next(_NUMBERS), dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    if rank > 0:
        store.set(f"limit/{number}/{rank}", WORD)
        store.get(f"limit/{number}/answer")
        return
    store.multi_get([f"limit/{number}/{other}" for other in range(1, num_ranks)])
    store.set(f"limit/{number}/answer", WORD)
