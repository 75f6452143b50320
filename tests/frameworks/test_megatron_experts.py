"""Real mixtures of experts of megatron-core, on gloo: what any number of expert, tensor, pipeline and data-parallel
ranks has saved, any other loads, and Megatron finds the groups of its optimizer by their flags afterwards.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.real_megatron import Experts, Layout, common, go_on, load_all, save_truth

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(600),
]

LAYOUTS = {
    "one": (1, Layout(experts=Experts())),
    "dp3": (3, Layout(experts=Experts())),
    "ep2": (2, Layout(experts=Experts(ep=2))),
    "tp2": (2, Layout(tp=2, experts=Experts())),
    "pp2": (2, Layout(pp=2, experts=Experts())),
    "pp2_chunks": (2, Layout(pp=2, num_chunks=2, experts=Experts())),
    "ep4": (4, Layout(experts=Experts(ep=4))),
    "ep2_dp2": (4, Layout(experts=Experts(ep=2))),
    "ep2_pp2": (4, Layout(pp=2, experts=Experts(ep=2))),
    "ep2_tp2": (4, Layout(tp=2, experts=Experts(ep=2))),
    "ep2_tp2_whole": (4, Layout(tp=2, experts=Experts(ep=2, etp=1))),
    "tp2_pp2": (4, Layout(tp=2, pp=2, experts=Experts())),
    "replicated_ep2_pp2": (4, Layout(pp=2, is_distributed=False, experts=Experts(ep=2))),
}
OTHER_MODELS = {
    "every second layer": lambda layout: layout._replace(experts=layout.experts._replace(every=2)),
    "layers with names": lambda layout: layout._replace(is_homogeneous=False),
    "fp32": lambda layout: layout._replace(is_half=False),
    "replicated fp32": lambda layout: layout._replace(is_half=False, is_distributed=False),
}
SOME = ("one", "ep2", "pp2", "ep2_pp2", "ep2_tp2")
"""The layouts for other models."""


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("megatron_experts")
    for name, (world_size, layout) in LAYOUTS.items():
        workers.run(save_truth, layout, str(folder / name), world_size=world_size, timeout_s=300)
    return {name: str(folder / name) for name in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_any_layout_saved_is_loaded_bit_equal(workers: WorkerPool, saved: dict[str, str], name: str) -> None:
    world_size, layout = LAYOUTS[name]
    for wrong in workers.run(load_all, layout, saved, world_size=world_size, timeout_s=300):
        assert not any(wrong.values()), wrong


@pytest.mark.parametrize("model", OTHER_MODELS)
def test_other_models_with_experts_are_loaded_bit_equal(workers: WorkerPool, tmp_path: Path, model: str) -> None:
    layouts = {name: (LAYOUTS[name][0], OTHER_MODELS[model](LAYOUTS[name][1])) for name in SOME}
    paths = {name: str(tmp_path / name) for name in layouts}
    for name, (world_size, layout) in layouts.items():
        workers.run(save_truth, layout, paths[name], world_size=world_size, timeout_s=300)
    for world_size, layout in layouts.values():
        for wrong in workers.run(load_all, layout, paths, world_size=world_size, timeout_s=300):
            assert not any(wrong.values()), wrong


def test_training_goes_on_to_the_same_bits(workers: WorkerPool, saved: dict[str, str], tmp_path: Path) -> None:
    names = ("one", "ep2", "pp2", "ep2_tp2", "ep2_tp2_whole", "replicated_ep2_pp2")
    for name in names:
        world_size, layout = LAYOUTS[name]
        workers.run(go_on, layout, saved["ep4"], str(tmp_path / name), world_size=world_size, timeout_s=300)
    wanted, *others = (bcp.open(tmp_path / name).state_dict() for name in names)
    key = "model.decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert not torch.equal(wanted[key], bcp.open(saved["ep4"])[key][...])
    for name, found in zip(names[1:], others, strict=True):
        assert found.keys() == wanted.keys()
        wrong = [fqn for fqn in found if not torch.equal(common(fqn, found[fqn]), common(fqn, wanted[fqn]))]
        assert not wrong, f"{name}: {wrong}"
