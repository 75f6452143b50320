"""DeepSpeed's engines as they lie in memory: every way to keep parameters saves, and loads what any other has saved,
bit for bit. What a rank should hold is cut from whole tensors by tests/deepspeed_like.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed_like
import pytest
import torch
from deepspeed_like import Engine, Status, Wrapper, differences
from torch import nn
from torch.optim.lr_scheduler import StepLR

import bytecheckpoint as bcp
from bytecheckpoint.adapters.frameworks.zero_partitions import part_of_partition, part_of_rank
from distributed import truth
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
State = dict[str, Any]

WRAP: dict[str, Callable[..., Wrapper]] = {
    "zero_1": deepspeed_like.zero_1,
    "zero_1_aligned": partial(deepspeed_like.zero_1, round_robin=True, gap=4),
    "bf16": deepspeed_like.bf16,
    "fp16": deepspeed_like.fp16,
    "fp16_unfused": deepspeed_like.fp16_unfused,
    "zero_3": deepspeed_like.zero_3,
    "zero_3_in_sub_groups": partial(deepspeed_like.zero_3, num_in_sub_group=2, persistent=3),
}


class Net(nn.Module):
    """The parameters of FRAMEWORKS.md's tables, smaller ones, some that do not train, two that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.p0 = nn.Parameter(torch.zeros(5))
        self.p1 = nn.Parameter(torch.zeros(2, 3))
        self.p2 = nn.Parameter(torch.zeros(2, 2, 2))
        self.tiny = nn.Parameter(torch.zeros(1))
        self.inner = nn.ParameterDict({"w": nn.Parameter(torch.zeros(3, 5)), "v": nn.Parameter(torch.zeros(2))})
        self.frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.inner["tied"] = self.p1
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


TRAINED = ("p0", "p1", "p2", "tiny", "inner.w", "inner.v")


def plain_state(prefix: str, *, step: float, keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> State:
    model = Net()
    truth.fill(model, lambda name, tensor: truth.value(prefix + name, tensor))
    parameters = dict(model.named_parameters())
    large = [parameters[name] for name in TRAINED if parameters[name].numel() > 2]
    small = [parameters[name] for name in TRAINED if parameters[name].numel() <= 2]
    groups = [{"params": large, "weight_decay": step / 100}, {"params": small, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=step / 1000)
    if "momentum_buffer" in keys:
        optimizer = torch.optim.SGD(groups, lr=step / 1000, momentum=0.9)
    for name in TRAINED if step else ():
        for key in keys:
            value = truth.value(f"{prefix}{name}.{key}", parameters[name].detach())
            optimizer.state[parameters[name]][key] = value
        if "exp_avg" in keys:
            optimizer.state[parameters[name]]["step"] = torch.tensor(step)
    return {"model": model, "optimizer": optimizer}


def engine_state(kind: str, prefix: str, *, step: float, **options: Any) -> State:
    """The same in an engine; with step 0 an optimizer that has no state yet."""
    return deepspeed_like.engine_state(plain_state(prefix, step=step, **options), WRAP[kind])


def save(rank: int, world_size: int, kind: str, path: str) -> None:
    bcp.save(path, engine_state(kind, "", step=7.0), options=OPTIONS)


def load(rank: int, world_size: int, kind: str, path: str, saved_to: str | None = None) -> list[str]:
    expected = engine_state(kind, "", step=7.0)
    wrong = []
    for step in (0.0, 3.0):
        state = engine_state(kind, "noise.", step=step)
        report = bcp.load(path, state)
        assert not report.cast
        wrong += differences(state, expected)
    if saved_to is not None:
        bcp.save(saved_to, state, options=OPTIONS)
    return wrong


PARTITIONS = [
    (2, 10, [[(0, 5, 0), (0, 5, 5), None], [None, (5, 1, 0), (0, 8, 1)]]),
    (
        4,
        6,
        [
            [(0, 5, 0), (0, 1, 5), None],
            [None, (1, 5, 0), (0, 1, 5)],
            [None, None, (1, 6, 0)],
            [None, None, (7, 1, 0)],
        ],
    ),
]


@pytest.mark.parametrize(("size", "partition", "ranks"), PARTITIONS)
def test_parameters_lie_in_equal_partitions(size: int, partition: int, ranks: list[list[Any]]) -> None:
    for rank, of_parameters in enumerate(ranks):
        found = [part_of_partition(*each, partition, rank) for each in (((5,), 0), ((2, 3), 5), ((2, 2, 2), 11))]
        assert [(each.start, each.numel, each.position) if each.numel else None for each in found] == of_parameters


def test_ranks_hold_nothing_of_what_is_smaller_than_the_padding() -> None:
    assert [part_of_partition((3,), 0, 2, rank).numel for rank in range(4)] == [2, 1, 0, 0]


@pytest.mark.parametrize(
    ("size", "valid"), [(2, [[3, 3, 4], [2, 3, 4]]), (4, [[2, 2, 2], [2, 2, 2], [1, 2, 2], [0, 0, 2]])]
)
def test_every_rank_has_an_equal_part_of_each_parameter(size: int, valid: list[list[int]]) -> None:
    for rank, of_parameters in enumerate(valid):
        found = [part_of_rank((numel,), -(-numel // size), rank, 0) for numel in (5, 6, 8)]
        assert [each.numel for each in found] == of_parameters
        assert all(each.start == rank * -(-each.shape[0] // size) for each in found if each.numel)


@pytest.mark.parametrize("kind", WRAP)
def test_engines_reshard_from_two_ranks_to_three_to_four_to_one(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    workers.run(save, kind, str(tmp_path / "2"), world_size=2)
    for before, size in ((2, 3), (3, 4), (4, 1)):
        paths = str(tmp_path / str(before)), str(tmp_path / str(size))
        assert workers.run(load, kind, *paths, world_size=size, process_group=True) == [[]] * size


@pytest.mark.parametrize("source", ["zero_1", "zero_3"])
def test_every_engine_loads_what_another_one_saved(workers: WorkerPool, tmp_path: Path, source: str) -> None:
    workers.run(save, source, str(tmp_path), world_size=2)
    assert workers.run(load_all, str(tmp_path), world_size=3) == [[]] * 3


def load_all(rank: int, world_size: int, path: str) -> list[str]:
    return [f"{kind}: {name}" for kind in WRAP for name in load(rank, world_size, kind, path)]


@pytest.mark.parametrize("kind", WRAP)
def test_engines_and_plain_models_exchange_checkpoints(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    workers.run(save, kind, str(tmp_path / "engine"), world_size=2)
    state, expected = plain_state("noise.", step=3.0), plain_state("", step=7.0)
    bcp.load(tmp_path / "engine", state)
    for name, tensor in expected["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[name], tensor), name
    found, wanted = state["optimizer"].state_dict(), expected["optimizer"].state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert all(torch.equal(value, wanted["state"][i][k]) for i, of in found["state"].items() for k, value in of.items())
    bcp.save(tmp_path / "plain", expected)
    assert workers.run(load, kind, str(tmp_path / "plain"), world_size=2) == [[]] * 2


def test_no_padding_is_stored_and_no_parameter_twice(workers: WorkerPool, tmp_path: Path) -> None:
    for kind in ("zero_1", "zero_3"):
        workers.run(save, kind, str(tmp_path / kind), world_size=4)
        checkpoint = bcp.open(tmp_path / kind)
        names = {f"model.{name}" for name in (*TRAINED, "inner.tied", "frozen", "seen")}
        names |= {f"optimizer.state.{name}.{key}" for name in TRAINED for key in ("exp_avg", "exp_avg_sq", "step")}
        assert set(checkpoint.keys()) == names
        assert {checkpoint[f"model.{name}"].dtype for name in TRAINED} == {torch.float32}
        assert torch.equal(checkpoint["model.inner.w"][...], truth.value("inner.w", torch.empty(3, 5)))


def any_state(rank: int, world_size: int, path: str) -> list[str]:
    options: dict[str, Any] = {"keys": ("momentum_buffer",)}
    wrong = []
    for kind in ("zero_1", "zero_3"):
        bcp.save(f"{path}/{kind}", engine_state(kind, "", step=7.0, **options), options=OPTIONS)
        state = engine_state(kind, "noise.", step=0.0, **options)
        bcp.load(f"{path}/{kind}", state)
        wrong += differences(state, engine_state(kind, "", step=7.0, **options))
    return wrong


def test_optimizer_state_is_saved_whatever_it_is_called(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(any_state, str(tmp_path), world_size=2) == [[], []]
    assert "optimizer.state.p2.momentum_buffer" in bcp.open(tmp_path / "zero_1").keys()


def weights_only(rank: int, world_size: int, kind: str, path: str) -> list[str]:
    """An engine alone is its weights: masters and low precision are loaded, the optimizer is as it was."""
    bcp.save(path, {"model": engine_state(kind, "", step=7.0)["model"]}, options=OPTIONS)
    state, expected = engine_state(kind, "noise.", step=3.0), engine_state(kind, "", step=7.0)
    bcp.load(path, {"model": state["model"]})
    return [name for name in differences(state, expected) if "exp_avg" not in name and "step" not in name]


@pytest.mark.parametrize("kind", WRAP)
def test_an_engine_alone_is_its_weights(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    assert workers.run(weights_only, kind, str(tmp_path), world_size=3) == [["groups"]] * 3
    assert not any(name.startswith("optimizer") for name in bcp.open(tmp_path).keys())


def module_beside(rank: int, world_size: int, kind: str, path: str) -> list[str]:
    state, expected = engine_state(kind, "", step=7.0), engine_state(kind, "", step=7.0)
    bcp.save(path, {"model": state["model"].module, "optimizer": state["optimizer"]}, options=OPTIONS)
    other = engine_state(kind, "noise.", step=3.0)
    bcp.load(path, {"model": other["model"].module, "optimizer": other["optimizer"]})
    return differences(other, expected)


@pytest.mark.parametrize("kind", WRAP)
def test_the_module_may_stand_beside_the_optimizer(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    assert workers.run(module_beside, kind, str(tmp_path), world_size=2) == [[], []]


def actor_and_critic(kind: str, prefixes: tuple[str, str], *, step: float, names: tuple[str, ...]) -> State:
    """Two engines, and those of their optimizers that are in the state."""
    states = dict(zip(("actor", "critic"), (engine_state(kind, each, step=step) for each in prefixes), strict=True))
    state = {name: of_one["model"] for name, of_one in states.items()}
    return state | {f"{name}_optimizer": states[name]["optimizer"] for name in names}


def two_engines(rank: int, world_size: int, kind: str, names: tuple[str, ...], path: str) -> list[str]:
    bcp.save(path, actor_and_critic(kind, ("", "critic."), step=7.0, names=names), options=OPTIONS)
    state = actor_and_critic(kind, ("noise.", "noise.critic."), step=3.0, names=names)
    bcp.load(path, state)
    wrong = []
    for name, prefix in (("actor", ""), ("critic", "critic.")):
        found = {"model": state[name], "optimizer": state[name].optimizer}
        wrong += [
            f"{name} {each}"
            for each in differences(found, engine_state(kind, prefix, step=7.0))
            if name in names or not re.search("exp_avg|step|groups", each)
        ]
    return wrong


@pytest.mark.parametrize("names", [(), ("actor",), ("critic",), ("actor", "critic")], ids="-".join)
@pytest.mark.parametrize("kind", ["zero_1", "zero_3"])
def test_engines_in_one_state_keep_their_masters_apart(
    workers: WorkerPool, tmp_path: Path, kind: str, names: tuple[str, ...]
) -> None:
    assert workers.run(two_engines, kind, names, str(tmp_path), world_size=2) == [[], []]
    checkpoint = bcp.open(tmp_path)
    assert {checkpoint[f"{engine}.p1"].dtype for engine in ("actor", "critic")} == {torch.float32}


def two_in_one_list(rank: int, world_size: int, path: str) -> None:
    state = actor_and_critic("zero_1", ("", "critic."), step=7.0, names=("actor", "critic"))
    state["optimizer"] = [state.pop(f"{name}_optimizer").optimizer for name in ("actor", "critic")]
    bcp.save(f"{path}/alike", state, options=OPTIONS)
    state["critic"].global_steps = 500
    what = r"optimizer\.facts\.engine is .*500.* of a list.* name of its own"
    with pytest.raises(bcp.CheckpointSaveError, match=what):
        bcp.save(f"{path}/differing", state, options=OPTIONS)


def test_engines_whose_counters_differ_need_optimizers_of_different_names(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(two_in_one_list, str(tmp_path), world_size=2)


def two_in_one_module(rank: int, world_size: int, path: str) -> list[str]:
    def of(prefix: str, step: float) -> tuple[State, list[State]]:
        states = [engine_state("zero_3", prefix + each, step=step) for each in ("", "critic.")]
        model = nn.ModuleList(state["model"].module for state in states)
        return {"model": model, "first": states[0]["optimizer"], "second": states[1]["optimizer"]}, states

    bcp.save(path, of("", 7.0)[0], options=OPTIONS)
    whole, states = of("noise.", 3.0)
    bcp.load(path, whole)
    return [name for found, wanted in zip(states, of("", 7.0)[1], strict=True) for name in differences(found, wanted)]


def test_a_module_may_have_parameters_of_two_optimizers(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(two_in_one_module, str(tmp_path), world_size=2) == [[], []]


def with_torch_optimizer(rank: int, world_size: int, kind: str, path: str) -> list[str]:
    state = engine_state(kind, "", step=7.0)
    bcp.save(path, {"model": state["model"], "optimizer": state["optimizer"].optimizer}, options=OPTIONS)
    other = engine_state(kind, "noise.", step=3.0)
    bcp.load(path, {"model": other["model"], "optimizer": other["optimizer"].optimizer}, framework="deepspeed")
    wrong = differences(other, engine_state(kind, "", step=7.0))
    bcp.load(path, engine_state(kind, "noise.", step=0.0))
    return wrong


@pytest.mark.parametrize("kind", WRAP)
def test_the_torch_optimizer_given_to_an_engine_is_the_engines_own(
    workers: WorkerPool, tmp_path: Path, kind: str
) -> None:
    assert workers.run(with_torch_optimizer, kind, str(tmp_path), world_size=2) == [[], []]
    assert {f"optimizer.state.{name}.exp_avg" for name in TRAINED} <= set(bcp.open(tmp_path).keys())


class Counter:
    """What somebody has called as DeepSpeed calls masters."""

    def __init__(self, count: int) -> None:
        self.fp32_groups = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.fp32_groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fp32_groups = state_dict["count"]


def test_an_object_without_an_optimizer_in_it_is_no_optimizer(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"counter": Counter(5)})
    counter = Counter(2)
    bcp.load(tmp_path, {"counter": counter})
    assert counter.fp32_groups == 5


def zero_3_module(rank: int, world_size: int, path: str) -> list[str]:
    """Parameters of ZeRO 3 know their optimizer, and without any the partition is all there is."""
    bcp.save(path, {"model": engine_state("zero_3", "", step=7.0)["model"].module}, options=OPTIONS)
    state, expected = engine_state("zero_3", "noise.", step=7.0), engine_state("zero_3", "", step=7.0)
    bcp.load(path, {"model": state["model"].module})
    wrong = [name for name in differences(state, expected) if "exp_avg" not in name]
    model = Net()
    truth.fill(model)
    for parameter in model.parameters():
        deepspeed_like.partition_parameter(parameter, torch.float32, is_persistent=parameter.numel() == 8)
    other = Net()
    for parameter in other.parameters():
        deepspeed_like.partition_parameter(parameter, torch.float32, is_persistent=parameter.numel() == 8)
        parameter.ds_secondary_tensor = torch.zeros(4)  # what hpZ has gathered before
    bcp.load(path, {"model": Engine(other, SimpleNamespace())})
    assert all(parameter.ds_secondary_tensor is None for parameter in other.parameters())
    for parameter, same_one in zip(other.parameters(), model.parameters(), strict=True):
        equal = torch.equal(parameter.data, same_one.data) and torch.equal(parameter.ds_tensor, same_one.ds_tensor)
        wrong += [] if equal else [str(same_one.ds_shape)]
    return wrong


def test_modules_of_zero_3_need_no_optimizer(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(zero_3_module, str(tmp_path), world_size=3) == [[]] * 3


def counted(step: float, *, accumulation: int = 2) -> State:
    state = engine_state("zero_1", "", step=step)
    engine, wrapper = state["model"], state["optimizer"]
    engine._accumulation = accumulation
    engine.global_steps, engine.global_samples, engine.skipped_steps = int(step), int(step) * 16, 1
    engine.micro_steps = int(step) * 2 + 1
    engine.lr_scheduler = StepLR(wrapper.optimizer, step_size=2)
    engine.lr_scheduler.last_epoch = int(step)
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    scaler = dict(zip(names, (2.0**step, step * 3, step, 2), strict=True))
    wrapper.torch_autocast_gradscaler = torch.amp.GradScaler("cpu", init_scale=2.0**step)
    wrapper.loss_scaler = SimpleNamespace(**scaler, dynamic=True, scale_window=1000)
    return state


def resume(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, counted(7.0), options=OPTIONS)
    state = counted(3.0)
    state["optimizer"].loss_scaler.scale_window = 5
    bcp.load(path, state)
    engine = state["model"]
    counters = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps
    assert counters == (7, 112, 1, 14), "micro steps after the last step are not in the checkpoint"
    assert engine.lr_scheduler.last_epoch == 7
    scaler = state["optimizer"].loss_scaler
    assert (scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter) == (128.0, 21.0, 7.0)
    assert state["optimizer"].torch_autocast_gradscaler.state_dict()["scale"] == 128.0
    assert scaler.scale_window == 5, "what the new run was configured with"

    state = counted(3.0, accumulation=4)
    state["optimizer"].loss_scaler = SimpleNamespace(cur_scale=1.0, dynamic=False)
    bcp.load(path, state, exclude="optimizer.facts.lr_scheduler.*")
    assert state["model"].micro_steps == 12
    assert state["model"].lr_scheduler.last_epoch == 3
    assert state["optimizer"].loss_scaler.cur_scale == 1.0, "a fixed scale stays"


def test_a_resumed_engine_knows_how_far_it_came(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(resume, str(tmp_path), world_size=2)
    bcp.load(tmp_path, plain_state("noise.", step=3.0))


def stage_0(rank: int, world_size: int, path: str) -> None:
    """Without ZeRO and low precision the engine has the torch optimizer itself."""
    state = plain_state("", step=7.0)
    engine = Engine(state["model"], state["optimizer"])
    engine.global_steps = 9
    bcp.save(path, {"model": engine, "optimizer": engine.optimizer}, options=OPTIONS)
    other = plain_state("noise.", step=3.0)
    engine = Engine(other["model"], other["optimizer"])
    bcp.load(path, {"model": engine, "optimizer": engine.optimizer}, framework="deepspeed")
    assert engine.global_steps == 9
    assert torch.equal(engine.module.p2, state["model"].p2)


def test_an_engine_without_zero_has_a_torch_optimizer(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(stage_0, str(tmp_path), world_size=2)


def low_precision(rank: int, world_size: int, path: str) -> tuple[str, list[str]]:
    """Masters are loaded from low precision only on request, as everything is."""
    state = plain_state("", step=7.0)
    bcp.save(path, {"model": state["model"].bfloat16()}, options=OPTIONS)
    engine = engine_state("zero_1", "noise.", step=3.0)["model"]
    with pytest.raises(bcp.CheckpointMismatchError) as caught:
        bcp.load(path, {"model": engine})
    report = bcp.load(path, {"model": engine}, cast=True)
    wanted = state["model"].p1
    assert torch.equal(engine.module.p1, wanted)
    return caught.value.kind, list(report.cast)


def test_masters_take_low_precision_only_on_request(workers: WorkerPool, tmp_path: Path) -> None:
    kind, cast = workers.run(low_precision, str(tmp_path), world_size=2)[0]
    assert kind == "dtype"
    assert "model.p1" in cast


def spoiled(case: str) -> State:
    state = engine_state(
        "zero_3" if case in {"inflight", "mics", "nvme parameter", "emptied"} else "zero_1", "", step=7.0
    )
    wrapper, module = state["optimizer"], state["model"].module
    match case:
        case "nvme":
            wrapper.swap_optimizer = True
        case "offloaded":
            wrapper.offloaded_states = {"hp_params"}
        case "zenflow":
            wrapper.zenflow = True
        case "model parallel":
            wrapper.mpu = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
        case "experts":
            wrapper.real_dp_process_group[0] = torch.distributed.new_group([0])
        case "inflight":
            module.p1.ds_status = Status.INFLIGHT
        case "nvme parameter":
            module.p1.ds_tensor.status = Status.NOT_AVAILABLE
        case "mics":
            module.p1.ds_tensor.ds_numel = 6
        case "half a module":
            del module.p1, module.inner["tied"]
        case "unknown":
            for name in TRAINED:
                module.get_parameter(name)._hp_mapping = None
            return {"model": module}
        case "unknown but the first":
            # Neither the first parameter nor the first that trains is one that the optimizer has.
            module.inner["v"]._hp_mapping = None
            return {"model": module}
        case "emptied":
            return {"model": module, "optimizer": wrapper.optimizer}
    return state


REFUSED = {
    "nvme": "NVMe",
    "offloaded": r"reload_states\(\)",
    "zenflow": "ZenFlow",
    "model parallel": "model parallelism",
    "experts": "MoE experts",
    "inflight": "being gathered",
    "nvme parameter": "NVMe",
    "mics": "MiCS",
    "half a module": "5 of the 6 parameters",
    "unknown": "pass the engine",
    "unknown but the first": r"as inner\.v.*pass the engine",
    "emptied": r"has state and no parameters.*engine\.optimizer",
}


def try_to_save(rank: int, world_size: int, case: str, path: str) -> tuple[str, str]:
    with pytest.raises(bcp.CheckpointSaveError) as caught:
        bcp.save(path, spoiled(case), options=OPTIONS)
    return caught.value.kind, str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_right_is_refused_by_name(workers: WorkerPool, tmp_path: Path, case: str) -> None:
    kind, text = workers.run(try_to_save, case, str(tmp_path), world_size=2)[0]
    assert kind == "unsupported_value"
    assert re.search(REFUSED[case], text), text


def test_a_state_without_an_engine_is_no_state_of_deepspeed(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointMismatchError, match=r"found were model \(a \w+\)"):
        bcp.save(tmp_path, plain_state("", step=7.0), framework="deepspeed")
