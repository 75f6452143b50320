"""Times the planner of torch.distributed.checkpoint on the same input: the work of its coordinator between the plans
that it gathers and those that it scatters, and the size of the metadata.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from simulated_ranks.ranks import NamedShape, offers_of


def measure_dcp(tensors: list[NamedShape], num_ranks: int) -> tuple[float, float]:
    """Returns seconds on the coordinator, and bytes of the metadata file."""
    payloads = list(local_plans(tensors, num_ranks))
    started = time.process_time()
    plans = [pickle.loads(payload) for payload in payloads]
    del payloads
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, None, is_coordinator=True)
    final_plans, metadata = planner.create_global_plan(plans)
    for plan in final_plans:
        pickle.dumps(plan)
    seconds = time.process_time() - started
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", offset, 1 << 15)
        for rank, plan in enumerate(final_plans)
        for offset, item in enumerate(plan.items)
    }
    return seconds, len(pickle.dumps(metadata))


def local_plans(tensors: list[NamedShape], num_ranks: int) -> Iterator[bytes]:
    """Yields the message of each rank: an item for each shard that is not empty."""
    for rank in range(num_ranks):
        items = [
            WriteItem(
                index=MetadataIndex(offer.fqn, torch.Size(offer.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offer.offsets), torch.Size(offer.lengths)),
                    properties=TensorProperties(dtype=torch.float32),
                    size=torch.Size(offer.shape),
                ),
            )
            for offer in offers_of(tensors, rank, num_ranks)
            if offer.region.numel
        ]
        buffer = io.BytesIO()
        pickle.dump(SavePlan(items, planner_data={fqn: (fqn,) for fqn, _ in tensors}), buffer)
        yield buffer.getvalue()
