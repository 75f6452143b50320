"""BcpMegatronCheckpointManager with models and optimizers of megatron-core on gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from rank_programs import run_ranks

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
from verl.workers.engine.megatron import transformer_impl

import bytecheckpoint as bcp
from bytecheckpoint.integrations import verl as bcp_verl
from distributed.workers import WorkerPool
from frameworks.real_megatron import Layout, common
from frameworks.verl import megatron_roles

PROGRAM = Path(__file__).parent / "megatron_program.py"
TRACKER = "latest_checkpointed_iteration.txt"
KILLED = -9
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]


def test_any_layout_loads_what_another_saved_and_old_steps_go(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(megatron_roles.save, Layout(tp=2), str(tmp_path), world_size=2, timeout_s=300)
    assert megatron_roles.names_in(str(tmp_path)) == ["global_step_2", "global_step_3"]
    assert (tmp_path / "global_step_3/actor/transformer_config.json").exists()
    for layout, world_size in ((Layout(tp=2), 2), (Layout(pp=2), 2), (Layout(), 1)):
        for wrong in workers.run(megatron_roles.load, layout, str(tmp_path), world_size=world_size, timeout_s=300):
            assert wrong == []


def test_megatron_fsdp_is_refused(workers: WorkerPool) -> None:
    (told,) = workers.run(megatron_roles.refuse_megatron_fsdp, world_size=1, timeout_s=300)
    assert "use_megatron_fsdp=False" in told


def run(root: Path, last: int, *words: str, ends: int = 0) -> dict[int, float]:
    """The losses of the steps that verl's engine has trained on two ranks."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = run_ranks(PROGRAM, [root, last, *words], world_size=2, environment=environment, exit_codes=[ends] * 2)
    found = re.findall(r"^loss (\d+) (\S+)", ended[0].output, re.MULTILINE)
    return {int(step): float.fromhex(loss) for step, loss in found}


def differences(left: Path, right: Path) -> list[str]:
    one, other = (bcp.open(root / "global_step_6/actor").state_dict() for root in (left, right))
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(common(name, one[name]), common(name, other[name]))]


def test_a_killed_run_with_saves_in_the_background_goes_on_bit_for_bit_also_with_offload(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 6)
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    for name, words in {"plain": ("async",), "offloaded": ("async", "offload")}.items():
        root = tmp_path / name
        assert run(root, 5, *words, "kill", ends=KILLED) == {step: whole[step] for step in range(1, 6)}
        assert (root / TRACKER).read_text() == "4"
        assert run(root, 6, *words) == {step: whole[step] for step in (5, 6)}
        assert (root / TRACKER).read_text() == "6"
        assert differences(tmp_path / "whole", root) == []
        assert sorted(path.name for path in root.iterdir()) == ["global_step_4", "global_step_6", TRACKER]


def test_a_run_goes_on_with_another_tensor_parallelism(tmp_path: Path) -> None:
    run(tmp_path, 4, "async")
    before = bcp.open(tmp_path / "global_step_4/actor").state_dict()
    assert list(run(tmp_path, 6, "async", "tp2")) == [5, 6]
    after = bcp.open(tmp_path / "global_step_4/actor").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert bcp.open(tmp_path / "global_step_6/actor").metadata["global_step"] == 6


@pytest.mark.parametrize("contents", [["hf_model"], ["hf_model", "optimizer"]])
def test_the_bridge_reads_the_model_unless_an_optimizer_brings_it(
    workers: WorkerPool, tmp_path: Path, contents: list[str]
) -> None:
    ((called, wrong),) = workers.run(
        megatron_roles.load_by_bridge, str(tmp_path), contents, world_size=1, timeout_s=300
    )
    path = str(tmp_path / "global_step_1/actor/model/huggingface")
    is_bridged = contents == ["hf_model"]
    assert called == [f"saves {path}", *([f"loads {path}"] if is_bridged else [])]
    assert bool(wrong) == is_bridged


def test_install_puts_the_manager_into_verls_megatron_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_impl, "MegatronCheckpointManager", MegatronCheckpointManager)
    options, load_options = bcp.SaveOptions(staging_bytes=1 << 28), bcp.LoadOptions(timeout_s=7.0)
    bcp_verl.install(options=options, load_options=load_options)
    try:
        manager = transformer_impl.MegatronCheckpointManager
        assert manager is bcp_verl.BcpMegatronCheckpointManager
        assert (manager.bcp_options, manager.bcp_load_options) == (options, load_options)
    finally:
        bcp_verl.install()
