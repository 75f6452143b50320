"""BcpFSDPCheckpointManager with a model of transformers under fully_shard on gloo, and with verl's own driver."""

from __future__ import annotations

import gc
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_programs import run_ranks

pytest.importorskip("verl")

from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.workers.engine.fsdp import transformer_impl

import bytecheckpoint as bcp
from bytecheckpoint.integrations import verl as bcp_verl
from bytecheckpoint.integrations.shared import numbered_folders
from bytecheckpoint.integrations.verl import BcpFSDPCheckpointManager
from bytecheckpoint.integrations.verl.steps import RoleSaves
from bytecheckpoint.staging.host_buffers import StagingMemory
from bytecheckpoint.tools.analysis.diagnosis.checkpoint_diagnosis import diagnose
from frameworks.going_on import line_of
from frameworks.verl import verl_program

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]

PROGRAM = Path(verl_program.__file__)
KILLED = -9


def run(root: Path, last: int, *words: str, world_size: int = 2, ends: int = 0) -> dict[int, float]:
    """The losses of the steps that were trained."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    codes = [ends] * world_size
    arguments = [root, last, *words]
    ended = run_ranks(PROGRAM, arguments, world_size=world_size, environment=environment, exit_codes=codes)
    return {
        int(step): float.fromhex(loss) for step, loss in re.findall(r"^loss (\d+) (\S+)", ended[0].output, re.MULTILINE)
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run(tmp_path_factory.mktemp("whole"), 6)


def test_a_killed_run_goes_on_bit_for_bit_and_three_ranks_go_on_from_two(
    tmp_path: Path, whole: dict[int, float]
) -> None:
    run(tmp_path / "two", 5, "kill", ends=KILLED)
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    shutil.copytree(tmp_path / "two", tmp_path / "part")
    assert run(tmp_path / "two", 6) == {step: whole[step] for step in (5, 6)}
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        "global_step_4",
        "global_step_6",
        "latest_checkpointed_iteration.txt",
    ]
    again = run(tmp_path / "three", 6, world_size=3)
    assert again == pytest.approx({step: whole[step] for step in (5, 6)}, rel=1e-4)
    part = run(tmp_path / "part", 6, "no-optimizer")
    assert part[5] == whole[5]
    assert part[6] != whole[6]


def test_seeds_of_ranks_shuffled_streams_and_saves_in_the_background_go_on_bit_for_bit(tmp_path: Path) -> None:
    words = ("streams", "async")
    expected = run(tmp_path / "whole", 6, *words)
    run(tmp_path / "again", 5, *words, "kill", ends=KILLED)
    assert (tmp_path / "again/latest_checkpointed_iteration.txt").read_text() == "4"
    assert run(tmp_path / "again", 6, *words) == {step: expected[step] for step in (5, 6)}
    ends = [bcp.open(tmp_path / name / "global_step_6/actor").state_dict() for name in ("whole", "again")]
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_adapters_alone_are_saved_and_loaded_and_the_background_writes_the_tracker(tmp_path: Path) -> None:
    together = run(tmp_path / "whole", 6, "lora")
    saved = bcp.open(tmp_path / "whole/global_step_6/actor")
    assert {name.split(".")[0] for name in saved} == {"model", "optimizer"}
    assert all("lora_" in name for name in saved)
    run(tmp_path / "part", 4, "lora", "async")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (tmp_path / "part/latest_checkpointed_iteration.txt").exists():
        time.sleep(0.05)
    assert (tmp_path / "part/latest_checkpointed_iteration.txt").read_text() == "4"
    assert run(tmp_path / "part", 6, "lora", "async") == {step: together[step] for step in (5, 6)}


class Loader:
    """The driver's loader."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 100

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Job:
    """verl's driver with its workers in this process: its own methods, on doubles of what they use."""

    def __init__(self, root: Path, *, seed: int, async_save: bool, k: int | None = None) -> None:
        checkpoint = CheckpointConfig(async_save=async_save)
        self.actor, self.critic = (self.manager(seed + number, checkpoint) for number in (0, 1))
        trainer = {"default_local_dir": str(root), "default_hdfs_dir": None, "resume_mode": "auto"}
        trainer |= {"max_actor_ckpt_to_keep": k, "max_critic_ckpt_to_keep": k, "del_local_ckpt_after_load": False}
        self.driver = SimpleNamespace(
            config=SimpleNamespace(
                trainer=Namespace(**trainer),
                actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(checkpoint=checkpoint)),
            ),
            global_steps=0,
            use_critic=True,
            actor_rollout_wg=self.actor,
            critic_wg=self.critic,
            train_dataloader=Loader(),
        )

    def manager(self, seed: int, checkpoint: CheckpointConfig) -> BcpFSDPCheckpointManager:
        model, optimizer, scheduler = verl_program.parts(seed=seed)
        return BcpFSDPCheckpointManager(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, checkpoint_config=checkpoint
        )

    def train(self, step: int) -> None:
        for each in (self.actor, self.critic):
            verl_program.step_on(each.model, each.optimizer, each.lr_scheduler, step)
        self.driver.global_steps = self.driver.train_dataloader.position = step

    def save(self) -> None:
        RayPPOTrainer._save_checkpoint(self.driver)

    def load(self) -> None:
        RayPPOTrainer._load_checkpoint(self.driver)

    def wait(self) -> None:
        self.actor.wait()
        self.critic.wait()


class Namespace(SimpleNamespace):
    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@pytest.fixture(autouse=True)
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def same(first: Any, second: Any) -> bool:
    states = [each.state_dict() for each in (first, second)]
    return all(torch.equal(states[0][name].full_tensor(), states[1][name].full_tensor()) for name in states[0])


@pytest.mark.parametrize("async_save", [False, True])
def test_actor_and_critic_are_roles_of_one_step_with_the_drivers_loader(tmp_path: Path, async_save: bool) -> None:
    job = Job(tmp_path, seed=0, async_save=async_save)
    for step in (1, 2):
        job.train(step)
        job.save()
    job.wait()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    wait_until(lambda: tracker.exists() and tracker.read_text() == "2")
    again = Job(tmp_path, seed=5, async_save=async_save)
    again.load()
    assert (again.driver.global_steps, again.driver.train_dataloader.position) == (2, 2)
    assert same(again.actor.model, job.actor.model)
    assert same(again.critic.model, job.critic.model)
    assert not same(again.critic.model, job.actor.model)
    model = verl_program.tiny(lora=False, seed=9)
    bcp.load(tmp_path / "global_step_2", {"model": model}, role="critic", step=None)
    assert torch.equal(model.model.norm.weight, job.critic.model.model.norm.weight.full_tensor())


def test_doctor_says_what_a_step_of_verl_is_and_its_line_loads_a_role(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, async_save=False)
    job.train(3)
    job.save()
    step = diagnose(str(tmp_path / "global_step_3"), {})
    assert [(Path(each.path).name, each.format) for each in step.neighbours] == [
        ("actor", "bytecheckpoint"),
        ("critic", "bytecheckpoint"),
        ("data.pt", "torch.save"),
    ]
    critic = diagnose(str(tmp_path / "global_step_3/critic"), {})
    options = dict(option.split("=") for option in line_of(tmp_path / "global_step_3/critic", "verl").split())
    again = Job(tmp_path / "elsewhere", seed=5, async_save=False)
    vars(again.driver.config.trainer).update({name.removeprefix("trainer."): options[name] for name in options})
    again.load()
    assert same(again.critic.model, job.critic.model)
    assert critic.step == 3
    (alone,) = (code for code in critic.code if code.does == "load the model alone")
    names: dict[str, Any] = {"bcp": bcp, "model": verl_program.tiny(lora=False, seed=9)}
    exec("\n".join(alone.lines), names)
    assert torch.equal(names["model"].model.norm.weight, job.critic.model.model.norm.weight.full_tensor())


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_tracker_waits_for_all_roles_and_the_loader(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, async_save=True)
    job.train(1)
    job.actor.save_checkpoint(str(tmp_path / "global_step_1/actor"), None, 1)
    job.actor.wait()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    time.sleep(0.5)
    assert not tracker.exists()
    (tmp_path / "global_step_1/critic").mkdir()
    torch.save({}, tmp_path / "global_step_1/data.pt")
    time.sleep(0.5)
    assert not tracker.exists()
    job.critic.save_checkpoint(str(tmp_path / "global_step_1/critic"), None, 1)
    wait_until(tracker.exists)
    job.wait()


def trackers() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "bcp-tracker"}


def saved_role(root: Path, *, timeout_s: float) -> RoleSaves:
    """A role whose step is committed, without the state of the driver's loader."""
    saves = RoleSaves(bcp.SaveOptions(timeout_s=timeout_s), bcp.LoadOptions())
    state = {"model": {"w": torch.ones(2)}}
    path = str(root / "global_step_1/actor")
    saves.save(path, state, global_step=1, num_kept=None, async_save=True, metadata={})
    saves.wait()
    return saves


def test_the_wait_for_the_drivers_loader_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = saved_role(tmp_path, timeout_s=1.0)
    wait_until(lambda: "does not name global_step_1" in caplog.text)
    torch.save({}, tmp_path / "global_step_1/data.pt")
    saves.wait()  # as the next save does
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_the_wait_for_the_drivers_loader_ends_with_the_manager(tmp_path: Path) -> None:
    before = trackers()
    saves = saved_role(tmp_path, timeout_s=600.0)
    assert trackers() - before
    del saves
    gc.collect()
    wait_until(lambda: not trackers() - before)


def test_old_steps_go_with_all_that_verl_wrote_also_after_a_restart(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, async_save=False, k=2)
    for step in (1, 2):
        job.train(step)
        job.save()
    again = Job(tmp_path, seed=0, async_save=False, k=2)
    again.load()
    for step in (3, 4):
        again.train(step)
        again.save()
    wait_until(lambda: not (tmp_path / "global_step_2").exists())
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_3", "global_step_4"]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_waits_for_no_deletion_of_old_steps(
    tmp_path: Path, async_save: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, released = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        begun.set()
        released.wait(60)

    monkeypatch.setattr(numbered_folders, "_delete", hang)
    monkeypatch.setattr(numbered_folders, "_HANGING_S", 0.2)  # a wait for the deletion ends with a warning then
    job = Job(tmp_path, seed=0, async_save=async_save, k=1)
    for step in (1, 2, 3):
        job.train(step)
        job.save()
    assert begun.wait(60)
    job.train(4)
    job.save()
    assert not released.is_set()
    assert "are not finished" not in caplog.text
    monkeypatch.undo()
    released.set()
    job.wait()


def test_a_damaged_step_stops_no_run_that_goes_on_from_another_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, seed=0, async_save=False, k=2)
    for step in (1, 2):
        job.train(step)
        job.save()
    job.wait()
    damaged = tmp_path / "global_step_1/actor/manifest.bcp"
    damaged.write_bytes(b"damaged")
    again = Job(tmp_path, seed=0, async_save=False, k=1)
    again.load()
    assert again.driver.global_steps == 2
    assert "global_step_1/actor is passed over" in caplog.text
    for step in (3, 4):
        again.train(step)
        again.save()
        again.wait()
    assert damaged.exists()
    assert not (tmp_path / "global_step_2/actor").exists()
    with pytest.raises(bcp.CheckpointCorruptError):
        again.actor.load_checkpoint(str(damaged.parent))


def save_actor(job: Job, root: Path, step: int) -> None:
    job.train(step)
    job.actor.save_checkpoint(str(root / f"global_step_{step}/actor"), None, step, 1)
    job.actor.wait()


@pytest.mark.parametrize("async_save", [False, True])
def test_the_step_that_a_restart_takes_stays_until_the_next_one_is_whole(tmp_path: Path, async_save: bool) -> None:
    job = Job(tmp_path, seed=0, async_save=async_save, k=1)
    job.train(1)
    job.save()
    job.wait()
    save_actor(job, tmp_path, 2)
    again = Job(tmp_path, seed=5, async_save=async_save, k=1)
    again.load()
    assert again.driver.global_steps == 1
    for step in (2, 3):
        again.train(step)
        again.save()
        again.wait()
    assert not (tmp_path / "global_step_1").exists()


def test_the_tracker_names_the_step_when_the_last_wait_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoleSaves, "_track", lambda *_: None)  # as where the process ends before the thread looks
    job = Job(tmp_path, seed=0, async_save=True)
    job.train(1)
    job.save()
    job.wait()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_a_step_that_is_saved_again_is_not_whole_with_a_role_of_the_earlier_run(tmp_path: Path) -> None:
    earlier = Job(tmp_path, seed=0, async_save=True)
    earlier.train(1)
    earlier.save()
    earlier.wait()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    job = Job(tmp_path, seed=1, async_save=True)
    save_actor(job, tmp_path, 1)
    time.sleep(0.5)
    assert not tracker.exists()
    job.save()
    job.wait()
    assert tracker.read_text() == "1"


def test_an_unfinished_checkpoint_is_never_a_silent_fresh_start(tmp_path: Path) -> None:
    job = Job(tmp_path, seed=0, async_save=False)
    for step in (1, 2):
        job.train(step)
        job.save()
    (tmp_path / "global_step_2/critic/manifest.bcp").unlink()
    with pytest.raises(bcp.CheckpointNotFoundError, match="global_step_1"):
        Job(tmp_path, seed=0, async_save=False).load()


class GoingOver(BcpFSDPCheckpointManager):
    """Loads what verl has written, and saves with this library."""

    load_checkpoint = FSDPCheckpointManager.load_checkpoint


def test_a_checkpoint_of_verl_itself_is_refused_and_a_run_may_go_over(tmp_path: Path) -> None:
    model, optimizer, scheduler = verl_program.parts()
    config = CheckpointConfig()
    theirs = FSDPCheckpointManager(model=model, optimizer=optimizer, lr_scheduler=scheduler, checkpoint_config=config)
    verl_program.step_on(model, optimizer, scheduler, 1)
    path = str(tmp_path / "global_step_1/actor")
    theirs.save_checkpoint(path, None, 1)
    job = Job(tmp_path, seed=3, async_save=False)
    with pytest.raises(bcp.CheckpointMismatchError, match="of verl itself"):
        job.actor.load_checkpoint(path)
    model2, optimizer2, scheduler2 = verl_program.parts(seed=3)
    going = GoingOver(model=model2, optimizer=optimizer2, lr_scheduler=scheduler2, checkpoint_config=config)
    going.load_checkpoint(path)
    assert same(model2, model)
    going.save_checkpoint(str(tmp_path / "global_step_2/actor"), None, 2)
    job.actor.load_checkpoint(str(tmp_path / "global_step_2/actor"))
    assert same(job.actor.model, model)


def test_weights_for_hugging_face_are_written_without_a_gather(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    config = CheckpointConfig(save_contents=["model", "hf_model"], load_contents=["model"])
    model, optimizer, _ = verl_program.parts()
    manager = BcpFSDPCheckpointManager(model=model, optimizer=optimizer, checkpoint_config=config)
    manager.save_checkpoint(str(tmp_path / "global_step_1/actor"), None, 1)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "global_step_1/actor/huggingface")
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.full_tensor())
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.full_tensor())


def test_weights_for_hugging_face_with_adapters_are_refused(tmp_path: Path) -> None:
    config = CheckpointConfig(save_contents=["model", "hf_model"], load_contents=["model"])
    model, optimizer, _ = verl_program.parts(lora=True)
    manager = BcpFSDPCheckpointManager(model=model, optimizer=optimizer, checkpoint_config=config)
    with pytest.raises(bcp.CheckpointMismatchError, match="leave hf_model out"):
        manager.save_checkpoint(str(tmp_path / "global_step_1/actor"), None, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_role_that_has_no_optimizer_is_saved_and_loaded(tmp_path: Path) -> None:
    path, model, fresh = tmp_path / "global_step_1/actor", verl_program.parts()[0], verl_program.parts(seed=1)[0]
    BcpFSDPCheckpointManager(model=model, checkpoint_config=CheckpointConfig()).save_checkpoint(str(path), None, 1)
    BcpFSDPCheckpointManager(model=fresh, checkpoint_config=CheckpointConfig()).load_checkpoint(str(path))
    assert same(fresh, model)


@pytest.mark.parametrize("async_save", [False, True])
def test_no_save_stages_more_than_staging_bytes(
    tmp_path: Path, async_save: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = verl_program.sharded(verl_program.tiny(lora=False, seed=0, hidden_size=1024, intermediate_size=1024))
    optimizer = torch.optim.AdamW(model.parameters())
    verl_program.step_on(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), 1)
    num_bytes = 3 * sum(each.numel() * each.element_size() for each in model.parameters())
    options = bcp.SaveOptions(staging_bytes=num_bytes // 4)
    monkeypatch.setattr(BcpFSDPCheckpointManager, "bcp_options", options)
    staged: list[int] = []
    take = StagingMemory.take
    monkeypatch.setattr(StagingMemory, "take", lambda self, length: (staged.append(length), take(self, length))[1])
    config = CheckpointConfig(async_save=async_save)
    manager = BcpFSDPCheckpointManager(model=model, optimizer=optimizer, checkpoint_config=config)
    path = tmp_path / "global_step_1/actor"
    manager.save_checkpoint(str(path), None, 1)
    manager.wait()
    assert bcp.open(path).info.num_bytes >= num_bytes
    assert max(staged, default=0) <= num_bytes // 4
    assert bool(staged) == async_save


def test_install_puts_the_manager_into_verls_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_impl, "FSDPCheckpointManager", FSDPCheckpointManager)
    options = bcp.SaveOptions(staging_bytes=1 << 28)
    bcp_verl.install(options=options)
    try:
        assert transformer_impl.FSDPCheckpointManager is BcpFSDPCheckpointManager
        assert BcpFSDPCheckpointManager.bcp_options is options
    finally:
        BcpFSDPCheckpointManager.bcp_options = bcp.SaveOptions()


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[3] / "docs/integrations/verl.md"
    change, load, going_over = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.setattr(transformer_impl, "FSDPCheckpointManager", FSDPCheckpointManager)
    monkeypatch.setattr(BcpFSDPCheckpointManager, "bcp_options", bcp.SaveOptions())
    exec(compile(change, str(page), "exec"), {})
    assert BcpFSDPCheckpointManager.bcp_options.staging_bytes == 8 << 30
    job = Job(tmp_path, seed=0, async_save=False)
    job.train(100)
    job.save()
    model = verl_program.tiny(lora=False, seed=9)
    exec(compile(load, str(page), "exec"), {"bcp": bcp, "default_local_dir": tmp_path, "model": model})
    assert torch.equal(model.model.norm.weight, job.actor.model.model.norm.weight.full_tensor())
    names: dict[str, Any] = {}
    exec(compile(going_over, str(page), "exec"), names)
    assert names["GoingOver"].load_checkpoint is FSDPCheckpointManager.load_checkpoint


def test_the_example_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples/verl_manager.py"
    for steps, world_size in ((2, 1), (4, 2)):
        ended = run_ranks(example, ["--out", tmp_path, "--steps", steps], world_size=world_size)
        assert re.findall(r"^step (\d+): loss \d", ended[0].output, re.MULTILINE) == [str(steps)]
    assert bcp.open(tmp_path / "global_step_4/actor").info.world_size == 2
    assert len(example.read_text().splitlines()) <= 80
