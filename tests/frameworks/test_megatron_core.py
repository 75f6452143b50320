"""Real models and optimizers of megatron-core, on gloo: what they save is what they load on other ranks, and training
goes on to the same bits.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import bytecheckpoint as bcp
from distributed.workers import WorkerPool
from frameworks.real_megatron import Layout, build, common, fill, go_on, load_all, on_host, save_truth, step

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of what is not installed
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.timeout(600),
]

LAYOUTS = {
    "one": (1, Layout()),
    "dp3": (3, Layout()),
    "tp2": (2, Layout(tp=2)),
    "pp2": (2, Layout(pp=2)),
    "pp2_chunks": (2, Layout(pp=2, num_chunks=2)),
    "tp2_dp2": (4, Layout(tp=2)),
    "replicated_tp2_pp2": (4, Layout(tp=2, pp=2, is_distributed=False)),
}


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("megatron_core")
    for name, (world_size, layout) in LAYOUTS.items():
        workers.run(save_truth, layout, str(folder / name), world_size=world_size, timeout_s=300)
    return {name: str(folder / name) for name in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_any_layout_saved_is_loaded_bit_equal(workers: WorkerPool, saved: dict[str, str], name: str) -> None:
    world_size, layout = LAYOUTS[name]
    for wrong in workers.run(load_all, layout, saved, world_size=world_size, timeout_s=300):
        assert not any(wrong.values()), wrong


def test_training_goes_on_to_the_same_bits(workers: WorkerPool, saved: dict[str, str], tmp_path: Path) -> None:
    for name, (world_size, layout) in LAYOUTS.items():
        if name != "dp3":  # the mean of three equal gradients may be another number
            args = layout, saved["tp2_dp2"], str(tmp_path / name)
            workers.run(go_on, *args, world_size=world_size, timeout_s=300)
    wanted = bcp.open(tmp_path / "one").state_dict()
    before = bcp.open(saved["one"]).state_dict()
    key = "model.decoder.layers.mlp.linear_fc1.weight"
    assert not torch.equal(wanted[key], before[key])
    for name in sorted(path.name for path in tmp_path.iterdir()):
        found = bcp.open(tmp_path / name).state_dict()
        assert found.keys() == wanted.keys()
        wrong = [fqn for fqn in found if not torch.equal(common(fqn, found[fqn]), common(fqn, wanted[fqn]))]
        assert not wrong, f"{name}: {wrong}"


def save_after_a_step(rank: int, world_size: int, layout: Layout, path: str) -> bool:
    """Whether this rank has parameters that are as they were before the step."""
    with on_host(layout):
        built = build(layout)
        fill(built)
        step(built)
        bcp.save(path, built.state)
        before = [parameter.detach().clone() for chunk in built.chunks for parameter in chunk.parameters()]
        for chunk in built.chunks:
            chunk.start_param_sync(force_sync=True)
        after = [parameter for chunk in built.chunks for parameter in chunk.parameters()]
        return not all(map(torch.equal, before, after))


@pytest.mark.parametrize("is_half", [True, False])
def test_a_save_does_not_wait_for_parameters_to_be_gathered(workers: WorkerPool, tmp_path: Path, is_half: bool) -> None:
    layout = Layout(is_half=is_half)
    overlapping = layout._replace(overlaps=True)
    workers.run(save_after_a_step, layout, str(tmp_path / "one"), world_size=1, timeout_s=300)
    stale = workers.run(save_after_a_step, overlapping, str(tmp_path / "two"), world_size=2, timeout_s=300)
    assert stale == [True, True]
    wanted, found = (bcp.open(tmp_path / name).state_dict() for name in ("one", "two"))
    assert found.keys() == wanted.keys()
    assert [fqn for fqn in found if not torch.equal(found[fqn], wanted[fqn])] == []


def test_layers_may_have_names_of_their_own(workers: WorkerPool, tmp_path: Path) -> None:
    layout = Layout(pp=2, is_homogeneous=False)
    workers.run(save_truth, layout, str(tmp_path / "c"), world_size=2, timeout_s=300)
    assert "model.decoder.layers.3.mlp.linear_fc2.weight" in bcp.open(tmp_path / "c")
    paths = {"pp2": str(tmp_path / "c")}
    for wrong in workers.run(load_all, layout._replace(tp=2, pp=1), paths, world_size=2, timeout_s=300):
        assert not any(wrong.values()), wrong
