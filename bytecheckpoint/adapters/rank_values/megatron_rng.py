"""The states of Megatron's tracker of CUDA random numbers, which differ over dimensions of the model-parallel mesh and
not, as a rule, from rank to rank. Megatron is looked at only where the process has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from bytecheckpoint.adapters.plain.manifest_trees import SavedByRank
from bytecheckpoint.adapters.rank_values.rng_fold import key_of, philox_state

_KEY = "megatron"
_RANDOM, _PARALLEL = "megatron.core.tensor_parallel.random", "megatron.core.parallel_state"
_GETTERS = {
    "pp": "get_pipeline_model_parallel_rank",
    "tp": "get_tensor_model_parallel_rank",
    "ep": "get_expert_model_parallel_rank",
    "etp": "get_expert_tensor_parallel_rank",
}
_DIMS_OF = {"expert-parallel-rng": ("pp", "ep", "etp"), "data-parallel-rng": ("pp",)}
"""Dimensions over which the states of these names differ. States of all other names differ over pp and tp."""


def read_tracker() -> dict[str, Any] | None:
    """Returns the states by name and the place of this rank in the mesh, or None where there is no tracker in use."""
    states = {name: _tensor_of(state) for name, state in _live_states().items()}
    return {"states": states, "at": _place()} if states else None


def _live_states() -> Mapping[str, Any]:
    # Megatron's own function would make a tracker of the default kind.
    tracker = getattr(sys.modules.get(_RANDOM), "_CUDA_RNG_STATE_TRACKER", None)
    states: Mapping[str, Any] = {} if tracker is None else tracker.get_states()
    return states


def _tensor_of(state: Any) -> torch.Tensor:
    tensor: torch.Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return tensor.clone()


def _place() -> dict[str, int]:
    """Returns this rank's number in each dimension of the mesh; an empty dict before the mesh is made."""
    parallel = sys.modules.get(_PARALLEL)
    if parallel is None or not parallel.model_parallel_is_initialized():
        return {}
    return {dim: getattr(parallel, getter)() for dim, getter in _GETTERS.items()}


def set_tracker(saved: Mapping[str, Any]) -> None:
    """Gives Megatron's tracker, if the process has imported it, the states that `saved` has; its others stay."""
    module = sys.modules.get(_RANDOM)
    if module is None:
        return
    live = dict(_live_states())
    for name, state in saved["states"].items():
        if isinstance(live.get(name), torch.Generator):
            live[name].set_state(state)  # a CUDA graph may hold this generator
        else:
            live[name] = state.clone()
    module.get_cuda_rng_tracker().set_states(live)


def choose_tracker(tree: dict[str, Any], saved: SavedByRank, rank: int, moment: str, *, root: bytes | None) -> None:
    """Replaces the tracker's states in `tree`, which a rank loads, by those saved at its place in the mesh: by the rank
    of the same number if it was there, else those on which all ranks that were there agree.

    Names for which there are none get a stream of their own, if there is a root, else they are left out: the tracker
    keeps what it has. It keeps all that it has if no rank saved a tracker.
    """
    is_used = _KEY in tree or bool(_live_states())  # by the rank's own state, or by this process
    trees = {number: saved.tree(number).get(_KEY) for number in sorted(saved.data)} if is_used else {}
    held = {number: tracked for number, tracked in trees.items() if tracked is not None}
    tree.pop(_KEY, None)
    if not held:
        return
    place = _place()
    names = dict.fromkeys([*_live_states(), *(name for tracked in held.values() for name in tracked["states"])])
    states: dict[str, torch.Tensor] = {}
    for name in names:
        dims = _DIMS_OF.get(name, ("pp", "tp"))
        own = {dim: place.get(dim) for dim in dims}
        found = {
            number: tracked["states"][name]
            for number, tracked in held.items()
            if name in tracked["states"] and {dim: tracked["at"].get(dim) for dim in dims} == own
        }
        if rank in found:
            states[name] = found[rank]
        elif found and len({bytes(state.numpy()) for state in found.values()}) == 1:
            states[name] = next(iter(found.values()))
        elif root is not None:
            place_name = f"rank {rank}" if found or not place else f"at {own}"
            states[name] = philox_state(key_of(root, moment, name, place_name))
    tree[_KEY] = {"states": states, "at": place}
