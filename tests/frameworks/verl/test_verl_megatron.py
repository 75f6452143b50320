"""BcpMegatronCheckpointManager with models and optimizers of megatron-core on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

from distributed.workers import WorkerPool
from frameworks.real_megatron import Layout
from frameworks.verl import megatron_roles

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
