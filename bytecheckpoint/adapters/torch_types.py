"""Types of torch's distributed tensors and wrappers, without importing them: `torch.distributed.tensor` takes half a
second, most of it for sympy, and a state that has none of them must not wait for it.

A type here stands for one of torch. isinstance() gives False for it until the process has imported torch's type.
Calling it makes an object of that type.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "AsyncCollectiveTensor",
    "DTensor",
    "DTensorSpec",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "Replicate",
    "Shard",
    "ShardedTensor",
    "StridedShard",
    "TensorMeta",
    "loaded_dtensor",
    "placement_types",
]


class _StandIn(type):
    """Metaclass of the types that each stand for a type of torch."""

    module: str
    name: str

    def __instancecheck__(cls, instance: object) -> bool:
        loaded = sys.modules.get(cls.module)
        real = getattr(loaded, cls.name, None)
        return real is not None and isinstance(instance, real)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return getattr(import_module(cls.module), cls.name)(*arguments, **options)


def _stand_in(module: str, name: str) -> Any:
    return _StandIn(name.lstrip("_"), (), {"module": f"torch.distributed.{module}", "name": name})


if not TYPE_CHECKING:
    AsyncCollectiveTensor = _stand_in("_functional_collectives", "AsyncCollectiveTensor")
    DTensor = _stand_in("tensor", "DTensor")
    Replicate = _stand_in("tensor", "Replicate")
    Shard = _stand_in("tensor", "Shard")
    ShardedTensor = _stand_in("_shard.sharded_tensor.api", "ShardedTensor")
    StridedShard = _stand_in("tensor.placement_types", "_StridedShard")  # what fully_shard makes of tensor parallel
    DTensorSpec = _stand_in("tensor._dtensor_spec", "DTensorSpec")
    TensorMeta = _stand_in("tensor._dtensor_spec", "TensorMeta")
    FSDPModule = _stand_in("fsdp", "FSDPModule")
    FullyShardedDataParallel = _stand_in("fsdp", "FullyShardedDataParallel")
    FlatParameter = _stand_in("fsdp._flat_param", "FlatParameter")


def loaded_dtensor() -> type | None:
    """Returns torch's class DTensor; None if the process has not imported it, so that there is no instance of it."""
    return cast("type | None", getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None))


@cache
def placement_types() -> frozenset[type]:
    """Returns torch's classes of placements. Imports them, so it is called only for a state that has placements."""
    from torch.distributed import tensor  # noqa: PLC0415
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    return frozenset({tensor.Replicate, tensor.Shard, _StridedShard})
