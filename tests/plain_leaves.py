"""The plain data of a checkpoint by FQN, as its manifest has it."""

from __future__ import annotations

from typing import Any

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.plain_data import decode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.manifest.plain_wire import TensorRef


def plain_leaves(checkpoint: bcp.Checkpoint) -> dict[str, Any]:
    """What all ranks share, but for tensors."""
    trees = {fqn: leaves(decode_plain(data), fqn) for fqn, data in checkpoint.manifest.objects.items()}
    return {fqn: value for tree in trees.values() for fqn, value in tree.items() if not isinstance(value, TensorRef)}
