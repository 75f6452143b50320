"""`RngState`, the random number generators of a process, and the states that a rank gets of those that were saved."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch

from bytecheckpoint.adapters.plain.manifest_trees import SavedByRank
from bytecheckpoint.adapters.rank_values import megatron_rng
from bytecheckpoint.adapters.rank_values.rng_fold import ROOT, folded, stream_root


class RngState:
    """The random number generators of this process, for the state of a save or a load: `{"rng": bcp.RngState()}`.

    These are the generators that Python's `random`, `numpy.random` and torch use where no other is passed (torch's for
    the host and, where this process has used CUDA, for its devices), and those of Megatron's tracker, if the process
    has one. A save reads the generators, a load sets them. The state of the CUDA device that was current goes to the
    one that is current now, the others go by number; if this process has fewer devices, a warning says that the states
    of the others are left out.

    Every rank's are saved, and a rank gets back those of the rank of the same number, or, with `at`, those of a rank
    at the same place of the mesh: of the same number if it was there, else the first. On a larger number of ranks, or a
    larger mesh, some have none:

    - elastic="keep": they keep what they have, so seed each rank differently before loading;
    - elastic="fold": they get a stream of their own, keyed by a root that is saved with the state, the step, and the
      rank or, with `at`, its place. No two ranks (with `at`, no two places) get the same, and none what another saved.

    On a smaller number the generators of the other ranks are left alone. A generator of your own belongs into a
    `RankLocal`. Loaders draw from these generators when they are first read: see `LoadReport.restore_rng`.

    Args:
        elastic: "keep" or "fold", as above. A load decides; a save with "fold" also saves the root.
        at: The place of this rank in a mesh, by the names of those dimensions over which random numbers differ, as
            `{"pp": 0, "tp": 1}`: ranks at the same place draw alike. Leave out the data-parallel dimension where, as
            in Megatron, all its ranks draw alike, and the tensor-parallel one for DTensor, whose random operations need
            the same state on all ranks of a mesh. A save and a load name the same dimensions.

    Raises ValueError for another `elastic`, and for a number in `at` that is no integer.
    """

    def __init__(self, elastic: Literal["keep", "fold"] = "keep", *, at: Mapping[str, int] | None = None) -> None:
        if elastic not in {"keep", "fold"}:
            raise ValueError(f"RngState.elastic takes 'keep' or 'fold', not {elastic!r}")
        self.elastic = elastic
        self.at = None if at is None else {str(name): _whole_number(at, name) for name in sorted(at)}
        self._root: bytes | None = None
        """Root of the checkpoint that was loaded last, which a later save passes on; None without."""

    def __repr__(self) -> str:
        return "RngState(python, numpy, torch, and CUDA where it is used)"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the generators. A save calls this."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  it is the old generator that is global
            "torch": torch.get_rng_state(),
        }
        # Asking for the state of a device that was never used would make a context on it, hundreds of megabytes each.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            devices = [generator.get_state() for generator in torch.cuda.default_generators]
            state["cuda"] = {"current": torch.cuda.current_device(), "devices": devices}
        if (tracked := megatron_rng.read_tracker()) is not None:
            state["megatron"] = tracked
        if self.at is not None:
            state["at"] = self.at
        if self.elastic == "fold":
            state[ROOT] = self._root or stream_root(state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators whose state is given. A load calls this."""
        if "python" in state:
            random.setstate(state["python"])
        if "numpy" in state:
            np.random.set_state(state["numpy"])  # noqa: NPY002
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        if "cuda" in state:
            _set_cuda(state["cuda"]["current"], state["cuda"]["devices"])
        if "megatron" in state:
            megatron_rng.set_tracker(state["megatron"])
        self._root = state.get(ROOT)

    def chosen(self, saved: SavedByRank, rank: int, moment: str) -> dict[str, Any] | None:
        """Returns the state that this rank gets; None if it keeps its own. `moment` names the save in streams' keys."""
        source = self._source(saved, rank)
        tree: dict[str, Any] = {} if source is None else saved.tree(source)
        root: bytes | None = None
        if self.elastic == "fold":
            of_first = saved.tree(min(saved.data))
            root = of_first.get(ROOT) or stream_root(of_first)
            if source is None:
                tree = folded(root, moment, f"rank {rank}" if self.at is None else f"at {self.at}")
            tree[ROOT] = root
        megatron_rng.choose_tracker(tree, saved, rank, moment, root=root)
        return tree or None

    def _source(self, saved: SavedByRank, rank: int) -> int | None:
        """Returns the rank of the save whose state this rank gets: that of the same number, or with `at` one at the
        same place; None if there was none. Without places in the save, numbers count.
        """
        if self.at is None:
            return rank if rank in saved.data else None
        places = {other: saved.tree(other).get("at") for other in sorted(saved.data)}
        if all(place is None for place in places.values()):  # saved without `at`: only the numbers are known
            return rank if rank in places else None
        return rank if places.get(rank) == self.at else next((o for o, at in places.items() if at == self.at), None)


def _whole_number(at: Mapping[str, Any], name: str) -> int:
    """Returns this rank's place in a dimension, given as any integer, text or whole float. Raises ValueError."""
    given = at[name]
    with suppress(TypeError, ValueError, OverflowError):
        number = int(given)
        if isinstance(given, str) or number == given:
            return number
    raise ValueError(f"RngState.at takes an integer for each dimension, not {at!r}")


def _set_cuda(current: int | None, devices: list[torch.Tensor]) -> None:
    """Sets the generators of CUDA devices to the saved states of the same numbers; then that of the device that is
    current now to state number `current`, of the device that was current at the save, unless that is None. Warns of
    states without a device. Does not change which device is current.
    """
    num_devices = torch.cuda.device_count()
    for number in range(min(len(devices), num_devices)):
        torch.cuda.set_rng_state(devices[number], number)
    if num_devices and current is not None:
        torch.cuda.set_rng_state(devices[current])
    if len(devices) > num_devices:
        warnings.warn(
            f"random numbers of {len(devices)} CUDA devices were saved, and this process has {num_devices}: those of "
            "the others are left out",
            stacklevel=2,
        )
