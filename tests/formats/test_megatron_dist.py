"""Megatron's `torch_dist` folders: what it keeps beside tensors, where releases have put it, and what is refused."""

from __future__ import annotations

import json
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_files import Touch
from plain_leaves import plain_leaves
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MARKER = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
COMMON = {"args": Namespace(num_layers=2, params_dtype=torch.bfloat16), "iteration": 10, "checkpoint_version": 3.0}
SCHEDULE = {"max_lr": 0.5, "num_steps": 100}
WEIGHT = torch.arange(24.0).reshape(2, 3, 4)


class Listed:
    """An object that is saved as a list of itself, as Megatron does."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ([self._value],)


def write(folder: Path, *, in_file: bool = False, **objects: Any) -> Path:
    state = {"decoder.layers.mlp.linear_fc1.weight": WEIGHT}
    state |= {key: Listed(value) for key, value in objects.items()}
    common = {**COMMON, "opt_param_scheduler": SCHEDULE}
    if not in_file:
        state["common_state/shard_0_1"] = Listed(common)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    if in_file:
        torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(MARKER))
    return folder


@pytest.mark.parametrize("in_file", [True, False])
def test_common_state_is_read_from_both_of_its_places(tmp_path: Path, in_file: bool) -> None:
    rng = [{"torch_rng_state": torch.ones(4, dtype=torch.uint8), "random": (3, (1, 2))}]
    folder = write(tmp_path / "c", in_file=in_file, **{"rng_state/shard_0.0_1.1": rng})
    checkpoint = bcp.open(folder)
    assert checkpoint.info.step == 10
    objects = plain_leaves(checkpoint)
    assert (objects["args.num_layers"], objects["args.params_dtype"]) == (2, torch.bfloat16)
    assert (objects["opt_param_scheduler.max_lr"], objects["checkpoint_version"]) == (0.5, 3.0)
    assert objects["rng_state/shard_0.0_1.1.0.random"] == (3, (1, 2))
    assert checkpoint["rng_state/shard_0.0_1.1.0.torch_rng_state"][0] == 1
    assert torch.equal(checkpoint["decoder.layers.mlp.linear_fc1.weight"][1], WEIGHT[1])


def test_settings_of_megatrons_own_classes_are_plain_data(tmp_path: Path) -> None:
    module = ModuleType("megatron.core.transformer.enums")
    backend = Enum("AttnBackend", {"flash": 1, "auto": 5}, module=module.__name__)
    vars(module)["AttnBackend"] = backend
    parents = {name: ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.transformer")}
    with mock.patch.dict(sys.modules, {**parents, module.__name__: module}):
        args = Namespace(attention_backend=backend.auto)
        folder = write(tmp_path / "c", **{"settings/shard_0_1": args})
    assert plain_leaves(bcp.open(folder))["settings/shard_0_1.attention_backend"] == 5


def test_plans_and_older_classes_in_the_metadata_are_known(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = next(iter(metadata.storage_data))
    plan = SavePlan([WriteItem(index=index, type=None)], storage_data=_StoragePrefix("__0_"))
    metadata.all_local_plans = [plan]
    name = "megatron.core.dist_checkpointing.strategies.torch"
    module = ModuleType(name)
    vars(module).update({kind: type(kind, (), {"__module__": name}) for kind in ("MCoreMetadata", "MCoreSavePlan")})
    older, old_plan = module.MCoreMetadata(), module.MCoreSavePlan()
    vars(old_plan).update(vars(plan))
    vars(older).update(vars(metadata), all_local_plans=[old_plan], mcore_data={})
    parents = {name.rsplit(".", depth)[0]: ModuleType(name.rsplit(".", depth)[0]) for depth in range(1, 5)}
    with mock.patch.dict(sys.modules, {**parents, name: module}):
        path.write_bytes(pickle.dumps(older))
    assert bcp.open(folder).info.step == 10
    path.write_bytes(pickle.dumps(metadata))
    assert bcp.open(folder).info.step == 10


def other_backend(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({**MARKER, "sharded_backend": "zarr"}))


def only_other_backend(folder: Path) -> None:
    other_backend(folder)
    (folder / ".metadata").unlink()


def lost_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def cut_common(folder: Path) -> None:
    path = folder / "common.pt"
    path.write_bytes(path.read_bytes()[:-20])


def hostile_common(folder: Path) -> None:
    torch.save({"hook": Touch(folder / "marker")}, folder / "common.pt")


def no_dict(folder: Path) -> None:
    torch.save([1], folder / "common.pt")


DAMAGE = {
    other_backend: "unsupported_version",
    only_other_backend: "unsupported_version",
    lost_metadata: "missing_file",
    cut_common: "truncated",
    hostile_common: "pickle_refused",
    no_dict: "bad_manifest",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_one_clear_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = write(tmp_path / "c", in_file=True)
    damage(folder)
    with pytest.raises(bcp.CheckpointError) as caught:
        bcp.open(folder)
    assert caught.value.kind == DAMAGE[damage], caught.value.message
    assert not (folder / "marker").exists()


def test_a_marker_of_another_program_is_no_concern(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    for content in (b"", b"no json", b"[1]", b'{"sharded_backend": 3}'):
        (folder / "metadata.json").write_bytes(content)
        assert torch.equal(bcp.open(folder)["decoder.layers.mlp.linear_fc1.weight"][:], WEIGHT)
