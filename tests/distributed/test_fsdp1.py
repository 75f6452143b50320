"""FSDP1 models as training scripts have them, and in the middle of what these do. What is true of a model is asked of
torch, which gathers it; the library must come to the same without a collective, and training must go on as if nobody
had looked.
"""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, Seen, before, seen
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import Training

import bytecheckpoint as bcp
from bytecheckpoint.adapters.native.module_walk import stages_of
from bytecheckpoint.adapters.native.modules import ModuleEntry
from bytecheckpoint.saving import global_plan
from distributed.collectives import Collectives, sequence_number
from distributed.workers import WorkerPool

OPTIONS = bcp.SaveOptions(timeout_s=60)
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
CPU = torch.device("cpu")


class Block(nn.Module):
    """Scaled by a buffer, and with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("scale", torch.rand(5))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.norm(self.linear(x)) * self.scale

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


class Net(nn.Module):
    """With a tied weight, one whose memory is not by rows, one that does not train, and one that FSDP1 ignores."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.turned = nn.Linear(6, 5)
        self.turned.weight = nn.Parameter(torch.randn(6, 5).t())
        self.blocks = nn.ModuleList([Block(), Block()])
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(requires_grad=False)
        self.ignored = nn.Linear(5, 5)
        self.last = nn.Linear(5, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.turned(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        x = self.frozen(x)
        x = self.ignored(x.float()).to(x.dtype)
        return self.head(self.last(x))


STRATEGIES = {
    "full": {"sharding_strategy": ShardingStrategy.FULL_SHARD},
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "low": {"mixed_precision": LOW},
    "low kept": {"mixed_precision": LOW, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "low whole": {"mixed_precision": LOW, "sharding_strategy": ShardingStrategy.NO_SHARD},
}
CASES = [(name, use_orig_params) for name in STRATEGIES for use_orig_params in (True, False)]


@contextmanager
def quiet() -> Iterator[None]:
    """FSDP1 warns of its own old age."""
    with warnings.catch_warnings(action="ignore"):
        yield


def wrap(net: nn.Module, *, checkpointed: bool = False, **options: Any) -> FullyShardedDataParallel:
    """One unit for each block and for what does not train, and one for the rest."""
    if options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    unit = partial(FullyShardedDataParallel, device_id=CPU, **options)
    with quiet():
        for index, block in enumerate(net.blocks):
            inner = checkpoint_wrapper(block) if checkpointed and index == 0 else block
            wrapped = unit(inner)
            net.blocks[index] = checkpoint_wrapper(wrapped) if checkpointed and index == 1 else wrapped
        net.frozen = unit(net.frozen)
        return unit(net, ignored_modules=[net.ignored])


class Trained(Training):
    """A model and its optimizer after some steps."""

    def __init__(self, *, seed: int, num_steps: int, **options: Any) -> None:
        self.model = wrap(Net(seed), **options)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        for step in range(num_steps):
            self.step(step)

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return self.model(torch.randint(0, 11, (9,), generator=generator)).float().square().sum()

    def whole(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds, by FQN, as torch gathers it. Buffers in their own precision."""
        found: dict[str, torch.Tensor] = {}
        with quiet():
            with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
                for name, parameter in self.model.named_parameters():
                    found[f"model.{plain(name)}"] = parameter.detach().clone()
            for name, buffer in self.model.named_buffers():
                if "scratch" not in name:
                    found[f"model.{plain(name)}"] = buffer.float()
            options = StateDictOptions(full_state_dict=True)
            # Where there is no state, torch would make some by a step.
            state = (
                self.optimizer.state and get_optimizer_state_dict(self.model, self.optimizer, options=options)["state"]
            )
        for name, entries in state.items():
            for key, value in entries.items():
                found[f"optimizer.state.{name}.{key}"] = value.clone()
        return found


def plain(name: str) -> str:
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    wrong = [f"only in one: {name}" for name in found.keys() ^ expected.keys()]
    wrong += [
        f"{name}: found {found[name]}, expected {expected[name]}"
        for name in found.keys() & expected.keys()
        if found[name].dtype != expected[name].dtype or not torch.equal(found[name], expected[name])
    ]
    return sorted(wrong)


def stored_tensors(path: str) -> dict[str, torch.Tensor]:
    checkpoint = bcp.open(path)
    return {fqn: checkpoint[fqn][...] for fqn in checkpoint.keys() if "groups" not in fqn and "extra" not in fqn}


def there_and_back(rank: int, world_size: int, path: str, case: str, *, use_orig_params: bool) -> list[str]:
    """What is wrong with a checkpoint, with models that load it, and with how all of them are trained on."""
    options = STRATEGIES[case] | {"use_orig_params": use_orig_params}
    wrong: list[str] = []

    def check(what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        wrong.extend(f"{what}: {problem}" for problem in differing(found, expected))

    trained = Trained(seed=0, num_steps=2, **options)
    expected = trained.whole()
    fresh = Trained(seed=1, num_steps=0, **options)
    used = Trained(seed=2, num_steps=1, **options)
    used.evaluate()  # leaves the outermost unit whole
    before_saving = sequence_number()
    with Collectives() as collectives:
        bcp.save(path, trained.state, "fsdp", options=OPTIONS)
        for target in (fresh, used):
            bcp.load(path, target.state, "fsdp")
    if (collectives.calls, collectives.num_bytes, sequence_number()) != (Counter(), 0, before_saving):
        wrong.append(f"collectives: {collectives.calls}, {collectives.num_bytes} bytes")
    tied = {name.replace("head.", "embedding.") if "head" in name else name for name in stored_tensors(path)}
    if tied != set(expected):
        wrong.append(f"stored: {tied ^ set(expected)}")
    check("stored", {name: tensor for name, tensor in stored_tensors(path).items() if "head" not in name}, expected)
    check("fresh", fresh.whole(), expected)
    check("used", used.whole(), expected)
    for each in (trained, fresh, used):
        each.step(2)
    after = trained.whole()
    check("fresh, a step later", fresh.whole(), after)
    check("used, a step later", used.whole(), after)
    calls = {each.model.blocks[0].num_calls for each in (trained, fresh)}
    if len(calls) > 1:
        wrong.append(f"extra state: {calls}")
    return wrong


@pytest.mark.parametrize(("case", "use_orig_params"), CASES)
def test_a_checkpoint_is_the_whole_model_and_training_goes_on_from_it(
    workers: WorkerPool, tmp_path: Path, case: str, use_orig_params: bool
) -> None:
    world_size = 4 if case == "hybrid" else 2
    function = there_and_back_orig if use_orig_params else there_and_back_flat
    assert workers.run(function, str(tmp_path), case, world_size=world_size) == [[]] * world_size


def there_and_back_orig(rank: int, world_size: int, path: str, case: str) -> list[str]:
    return there_and_back(rank, world_size, path, case, use_orig_params=True)


def there_and_back_flat(rank: int, world_size: int, path: str, case: str) -> list[str]:
    return there_and_back(rank, world_size, path, case, use_orig_params=False)


def count_of_a_forward_pass(rank: int, world_size: int) -> tuple[bool, int]:
    trained = Trained(seed=0, num_steps=0)
    number = sequence_number()
    with Collectives() as collectives:
        trained.evaluate()
    return collectives.num_bytes > 0, sequence_number() - number


def test_collectives_are_seen_where_there_are_some(workers: WorkerPool) -> None:
    for has_sent, num_collectives in workers.run(count_of_a_forward_pass, world_size=2):
        assert has_sent
        assert num_collectives >= 4


PLACES = ("before the first forward pass", "after a forward pass", "before the backward pass", "after a failure")


class FailureError(Exception):
    """Raised in the middle of a forward pass."""


def fail_in_forward(trained: Trained) -> None:
    """Leaves the model where an error in the second block leaves it."""

    def fail(*_: object) -> None:
        raise FailureError

    handle = trained.model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(FailureError):
        trained.forward(0)
    handle.remove()


def save_in_the_middle(rank: int, world_size: int, root: str, case: str) -> list[str]:
    """What is wrong with checkpoints made in the middle of things, and with models that make them and are trained on,
    and with models in the middle of things that load them.
    """
    wrong: list[str] = []
    for use_orig_params in (True, False):
        options = STRATEGIES[case] | {"use_orig_params": use_orig_params}
        for place in PLACES:
            num_steps = 0 if place == PLACES[0] else 2
            undisturbed = Trained(seed=0, num_steps=num_steps, **options)
            saved, restored = (Trained(seed=seed, num_steps=num_steps, **options) for seed in (0, 1))
            expected = saved.whole() if place != PLACES[0] else Trained(seed=0, num_steps=0, **options).whole()
            path = f"{root}/{place}/{use_orig_params}"
            save = partial(bcp.save, path, saved.state, options=OPTIONS)
            load = partial(bcp.load, path, restored.state)
            if place == PLACES[2]:
                saved.step(2, save)
            else:
                # Other cases torch itself does not bring through graphs that meet no backward pass.
                with torch.set_grad_enabled(case in {"full", "kept"}):
                    for each in (saved, restored):
                        if place == PLACES[1]:
                            each.forward(0)
                        elif place == PLACES[3]:
                            fail_in_forward(each)
                save()
                if place != PLACES[3]:
                    saved.step(2)
            load()
            if place != PLACES[3]:  # where torch gathers nothing until there was a whole step
                wrong += [f"{place}, restored: {problem}" for problem in differing(restored.whole(), expected)]
            undisturbed.step(2)
            restored.step(2)
            after = undisturbed.whole()
            wrong += [f"{place}, restored, later: {problem}" for problem in differing(restored.whole(), after)]
            if place != PLACES[3]:
                wrong += [f"{place}, saved: {problem}" for problem in differing(saved.whole(), after)]
    return wrong


@pytest.mark.parametrize("case", ["full", "kept", "whole", "low"])
def test_a_model_is_saved_and_loaded_wherever_training_stands(workers: WorkerPool, tmp_path: Path, case: str) -> None:
    assert workers.run(save_in_the_middle, str(tmp_path), case, world_size=2, timeout_s=120) == [[]] * 2


class Compiled(nn.Module):
    """Names as torch.compile gives them, without compiling."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any) -> Any:
        return self._orig_mod(*args)


def plain_state(seed: int) -> dict[str, Any]:
    """Of one process, with optimizer state."""
    net = Net(seed)
    optimizer = torch.optim.AdamW([parameter for parameter in net.parameters() if parameter.requires_grad])
    for parameter in optimizer.param_groups[0]["params"]:
        values = {"exp_avg": torch.randn_like(parameter), "exp_avg_sq": torch.rand_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(7.0), **values}
    return {"model": net, "optimizer": optimizer}


def tensors_of_plain(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    named = dict(state["model"].named_parameters())
    buffers = {name: buffer for name, buffer in state["model"].named_buffers() if "scratch" not in name}
    found = {f"model.{name}": tensor.detach() for name, tensor in {**named, **buffers}.items()}
    for name, parameter in named.items():
        entries = state["optimizer"].state.get(parameter, {})
        found |= {f"optimizer.state.{name}.{key}": value for key, value in entries.items()}
    return found


def from_plain_and_back(rank: int, world_size: int, root: str) -> list[str]:
    """One process saves, four ranks load into wrappers of all kinds, and each loads what they save."""
    wrong: list[str] = []
    source = plain_state(seed=3)
    expected = tensors_of_plain(source)
    alone = torch.distributed.new_subgroups(1)[0]
    bcp.save(f"{root}/plain{rank}", source, process_group=alone, options=OPTIONS)
    for use_orig_params in (True, False):
        trained = Trained(seed=4, num_steps=1, use_orig_params=use_orig_params, checkpointed=True)
        state = {"model": Compiled(trained.model), "optimizer": trained.optimizer}
        bcp.load(f"{root}/plain0", state)
        path = f"{root}/{use_orig_params}"
        bcp.save(path, state, options=OPTIONS)
        wrong += differing(stored_tensors(path), stored_tensors(f"{root}/plain0"))
        target = plain_state(seed=5)
        bcp.load(path, target, process_group=alone)
        wrong += differing(tensors_of_plain(target), expected)
        if target["model"].blocks[0].num_calls != source["model"].blocks[0].num_calls:
            wrong.append("extra state")
    return wrong


def test_names_and_shapes_are_those_of_the_model_without_wrappers(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(from_plain_and_back, str(tmp_path), world_size=4) == [[]] * 4
    assert bcp.open(tmp_path / "True")["model.turned.weight"].shape == (5, 6)


class Shared(nn.Module):
    """One wrapped unit under two names, with a wrapped unit inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(3, 3), FullyShardedDataParallel(nn.Linear(3, 5), device_id=CPU))
        self.first = FullyShardedDataParallel(inner, device_id=CPU, use_orig_params=True)
        self.second = self.first
        self.own = nn.Linear(2, 2)


def save_shared(rank: int, world_size: int, path: str) -> None:
    bcp.save(path, {"model": Shared()}, options=OPTIONS)


def test_a_unit_under_two_names_in_a_model_that_is_none_itself_is_stored_once(
    workers: WorkerPool, tmp_path: Path
) -> None:
    workers.run(save_shared, str(tmp_path), world_size=2)
    torch.manual_seed(0)
    first, second, own = nn.Linear(3, 3), nn.Linear(3, 5), nn.Linear(2, 2)
    sequence = nn.Sequential(first, second)
    target = nn.ModuleDict({"first": sequence, "second": sequence, "own": own})
    expected = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    for parameter in target.parameters():
        nn.init.zeros_(parameter)
    bcp.load(tmp_path, {"model": target})
    assert not differing(target.state_dict(), expected)
    alone = nn.ModuleDict({"second": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))})
    bcp.load(tmp_path, {"model": alone}, strict=False)
    assert torch.equal(alone["second"][1].weight, expected["first.1.weight"])


def save_in_all_ways(rank: int, world_size: int, root: str) -> list[Any]:
    """What is wrong with checkpoints of a model that goes on at once, and how often there was planning."""
    wrong: list[str] = []
    planned: list[int] = []
    trained = Trained(seed=0, num_steps=1, use_orig_params=True)
    flat = Trained(seed=0, num_steps=1)

    def save(name: str, source: Trained, **arguments: Any) -> bcp.SaveHandle:
        count: list[int] = []
        with before(Seam(global_plan, "plan_save"), lambda: count.append(1)):
            # Workers know the plans of earlier tests.
            handle = bcp.save(f"{root}/{name}", source.state | {"only_here": torch.zeros(3)}, **arguments)
            handle.staged()
        planned.append(len(count))
        return handle

    for snapshot in ("none", "copy", "lazy"):
        for name, source in {"orig": trained, "flat": flat}.items():
            expected = source.whole()
            if snapshot == "none":
                handle = save(f"{snapshot}-{name}", source, options=OPTIONS)
            elif snapshot == "lazy":
                options = bcp.SaveOptions(timeout_s=60, snapshot="lazy")
                handle = bcp.save(f"{root}/lazy-{name}", source.state, options=options, async_save=True)
            else:
                options = bcp.SaveOptions(timeout_s=60, snapshot=snapshot)
                handle = save(f"{snapshot}-{name}", source, options=options, async_save=True)
            source.step(5)
            handle.result()
            stored = stored_tensors(f"{root}/{snapshot}-{name}")
            stored.pop("only_here", None)
            wrong += [f"{snapshot} {name}: {problem}" for problem in differing(without_ties(stored), expected)]
    with quiet():
        whole = Trained(seed=0, num_steps=1, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    save("changed", whole, options=OPTIONS).result()
    return [wrong, planned]


def without_ties(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "head" not in name}


def test_every_snapshot_holds_what_was_there_at_the_call_and_plans_are_kept(
    workers: WorkerPool, tmp_path: Path
) -> None:
    outcomes = workers.run(save_in_all_ways, str(tmp_path), world_size=2)
    assert [wrong for wrong, _ in outcomes] == [[], []]
    on_coordinator = outcomes[0][1]
    assert on_coordinator == [1, 1, 0, 0, 1]


def offload(rank: int, world_size: int, path: str) -> list[str]:
    """Without an accelerator there is no pinned memory, but another place for the local shard, which is what counts."""
    wrong: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
        patch.setattr(torch.cpu.Stream, "synchronize", lambda _: None, raising=False)
        for use_orig_params in (True, False):
            options = {"cpu_offload": CPUOffload(offload_params=True), "use_orig_params": use_orig_params}
            trained = Trained(seed=0, num_steps=2, **options)
            expected = trained.whole()
            fresh, used = Trained(seed=1, num_steps=0, **options), Trained(seed=2, num_steps=1, **options)
            used.evaluate()
            gathered = Trained(seed=3, num_steps=0, **options)
            gathered.whole()  # a first use that is no forward pass
            targets = {"fresh": fresh, "used": used, "gathered": gathered}
            bcp.save(f"{path}/{use_orig_params}", trained.state, options=OPTIONS)
            for name, target in targets.items():
                bcp.load(f"{path}/{use_orig_params}", target.state)
                wrong += [f"{name}: {problem}" for problem in differing(target.whole(), expected)]
                target.step(3)
            trained.step(3)
            # Without an accelerator, torch itself adds up gradients of offloaded original parameters.
            for name, target in () if use_orig_params else targets.items():
                wrong += [f"{name}, later: {problem}" for problem in differing(target.whole(), trained.whole())]
    return wrong


def test_offloaded_parameters_are_filled_where_they_are(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(offload, str(tmp_path), world_size=2) == [[]] * 2


def replace_memory(rank: int, world_size: int, path: str) -> list[str]:
    trained = Trained(seed=0, num_steps=1, use_orig_params=True)
    for parameter in trained.model.parameters():
        parameter.data = parameter.data * 2
    bcp.save(path, trained.state, options=OPTIONS)
    target = Trained(seed=1, num_steps=1, use_orig_params=True)
    for parameter in target.model.parameters():
        parameter.data = parameter.data.clone()
    bcp.load(path, target.state)
    for each in (trained, target):
        each.evaluate()
    expected = trained.whole()
    return differing(without_ties(stored_tensors(path)), expected) + differing(target.whole(), expected)


def test_memory_that_was_put_in_place_of_a_parameters_is_taken_over(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(replace_memory, str(tmp_path), world_size=2) == [[]] * 2


class Listing(nn.Linear):
    """Decides itself what is saved of it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # torch's
        super()._save_to_state_dict(destination, prefix, keep_vars)


class Factored(torch.optim.Optimizer):
    """Keeps a mean of each row, as optimizers with factored moments do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["row"] = torch.zeros(2)


def wrong_uses(rank: int, world_size: int, root: str) -> dict[str, Seen | None]:
    """What each of them raised."""
    errors: dict[str, Seen | None] = {}

    def save(what: str, state: dict[str, Any]) -> None:
        errors[what] = seen(lambda: bcp.save(f"{root}/{what}", state, options=OPTIONS))

    flat, orig = (Trained(seed=0, num_steps=1, use_orig_params=use_orig) for use_orig in (False, True))
    bcp.save(f"{root}/orig", orig.state, options=OPTIONS)
    for name, trained in {"flat": flat, "orig": orig}.items():
        with quiet(), FullyShardedDataParallel.summon_full_params(trained.model):
            save(f"summoned {name}", trained.state)
            errors[f"summoned {name}, load"] = seen(lambda trained=trained: bcp.load(f"{root}/orig", trained.state))
        save(f"alone {name}", {"optimizer": trained.optimizer})
        save(f"unwrapped {name}", {"model": trained.model.module})
        save(f"part {name}", {"model": Compiled(trained.model.turned)})
        factored = Factored(trained.model.parameters())
        factored.step()
        save(f"factored {name}", {"model": trained.model, "optimizer": factored})
    hook = orig.model.blocks[0].register_state_dict_post_hook(lambda *_: None)
    save("hook", orig.state)
    hook.remove()
    save("listing", {"model": wrap_alone(nn.Sequential(Listing(2, 2)))})
    save("parallel", {"model": wrapped_tensor_parallel()})
    on_meta = wrap_alone(nn.Linear(2, 2))
    on_meta._fsdp_wrapped_module.register_buffer("extra", torch.empty(2, device="meta"))
    save("meta", {"model": on_meta})
    errors["meta, load"] = seen(lambda: bcp.load(f"{root}/orig", {"model": on_meta}))
    uneven = torch.optim.AdamW([parameter for parameter in orig.model.parameters() if parameter.requires_grad])
    for number, parameter in enumerate(uneven.param_groups[0]["params"]):
        if parameter in orig.optimizer.state:
            uneven.state[parameter] = orig.optimizer.state[parameter] | {"step": torch.tensor(5.0 + number % 2)}
    bcp.save(f"{root}/uneven", {"model": orig.model, "optimizer": uneven}, options=OPTIONS)
    errors["uneven"] = seen(lambda: bcp.load(f"{root}/uneven", flat.state))
    return errors


def wrapped_tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    layer = parallelize_module(nn.Linear(4, 4), mesh["tensor"], ColwiseParallel())
    with quiet():
        return FullyShardedDataParallel(layer, device_mesh=mesh["data"], device_id=CPU, use_orig_params=True)


def wrap_alone(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True)


WRONG_USES = {
    "summoned flat": ("unsupported_value", "model is an FSDP1 model within summon_full_params"),
    "summoned flat, load": ("unsupported_value", "model is an FSDP1 model within summon_full_params"),
    "summoned orig": ("unsupported_value", "model is an FSDP1 model within summon_full_params"),
    "summoned orig, load": ("unsupported_value", "model is an FSDP1 model within summon_full_params"),
    "alone flat": ("unsupported_value", "pass the model beside it"),
    "alone orig": ("unsupported_value", "pass the model beside it"),
    "factored flat": ("unsupported_value", r"\.row is optimizer state of shape \[2\] for flat parameters"),
    "factored orig": ("unsupported_value", r"\.row is optimizer state of shape \[2\] for flat parameters"),
    "hook": ("unsupported_value", "blocks.0.* is a .* with the state_dict hook <lambda> in an FSDP1 model"),
    "listing": ("unsupported_value", "model._fsdp_wrapped_module.0 is a Listing with its own _save_to_state_dict"),
    "unwrapped flat": ("unsupported_value", "model is a module of an FSDP1 model without its wrapper"),
    "unwrapped orig": ("unsupported_value", "model.embedding is a module of an FSDP1 model without its wrapper"),
    "part flat": ("unsupported_value", "model._orig_mod is a module of an FSDP1 model without its wrapper"),
    "part orig": ("unsupported_value", "model._orig_mod is a module of an FSDP1 model without its wrapper"),
    "parallel": ("unsupported_value", "model.weight is a DTensor in an FSDP1 model"),
    "meta": ("unsupported_value", "extra is on the meta device in an FSDP1 model"),
    "meta, load": ("unsupported_value", "extra is on the meta device in an FSDP1 model"),
    "uneven": ("conflict", "this rank keeps both parameters in one flat buffer"),
}


def test_what_cannot_be_saved_or_loaded_is_refused_by_name(workers: WorkerPool, tmp_path: Path) -> None:
    outcomes = workers.run(wrong_uses, str(tmp_path), world_size=2)
    for what, (kind, message) in WRONG_USES.items():
        for errors in outcomes:
            error = errors[what]
            assert error is not None, what
            assert error.kind == kind, what
            assert re.search(message, error.message), f"{what}: {error.message}"
    assert outcomes[0].keys() == WRONG_USES.keys()


@contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """As if there were other ranks, with which nothing is exchanged."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class Holder(nn.Module):
    """Parameters of these shapes, with elements numbered through; some by columns."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        first = 0
        for number, shape in enumerate(shapes):
            numel = prod(shape)
            values = torch.arange(first, first + numel, dtype=torch.float32)
            value = (
                values.view(shape[::-1]).permute(*reversed(range(len(shape))))
                if number % 3 == 2
                else values.view(shape)
            )
            self.register_parameter(f"p{number}", nn.Parameter(value))
            first += numel


def random_model(chooser: random.Random) -> tuple[list[tuple[int, ...]], int, dict[str, Any]]:
    """Shapes of parameters, from one element to many dimensions; a world size, maybe larger than all; and options."""
    shapes = [tuple(chooser.randint(1, 5) for _ in range(chooser.randint(1, 4))) for _ in range(chooser.randint(1, 6))]
    if chooser.random() < 0.3:
        shapes = [(chooser.randint(1, 3),) for _ in shapes]
    low = chooser.choice([None, torch.bfloat16])
    options = {"use_orig_params": chooser.random() < 0.6, "mixed_precision": MixedPrecision(param_dtype=low)}
    return shapes, chooser.choice([2, 3, 4, 7, 16]), options


def held_by_all(
    shapes: list[tuple[int, ...]], world_size: int, options: dict[str, Any]
) -> list[dict[str, torch.Tensor]]:
    """By rank, tensors of the whole shapes with what the rank holds, and -1 elsewhere."""
    by_rank = []
    for rank in range(world_size):
        whole = {f"p{number}": torch.full(shape, -1.0) for number, shape in enumerate(shapes)}
        with fake_ranks(rank, world_size):
            model = FullyShardedDataParallel(Holder(shapes), device_id=CPU, **options)
            for shard in ModuleEntry("", stages_of(model)).collect().shards:
                ranges = zip(shard.region.offsets, shard.region.ends, strict=True)
                place = whole[shard.fqn][tuple(slice(start, end) for start, end in ranges)]
                assert torch.equal(place, torch.full_like(place, -1.0)), "held twice"
                place.copy_(shard.tensor)
        by_rank.append(whole)
    return by_rank


def hold_random_models(_rank: int, _world_size: int, seeds: range) -> Counter[str]:
    """Checks that all ranks together hold every element once, with its value. Gives what there was to see."""
    met: Counter[str] = Counter()
    for seed in seeds:
        shapes, world_size, options = random_model(random.Random(seed))
        by_rank = held_by_all(shapes, world_size, options)
        for name, expected in Holder(shapes).named_parameters():
            held = torch.stack([whole[name] for whole in by_rank])
            is_held = held >= 0
            assert torch.equal(is_held.sum(0), torch.ones(expected.shape, dtype=torch.int64)), (seed, name)
            assert torch.equal(held.max(0).values, expected.detach()), (seed, name)
            by_this = is_held.flatten(1).any(1)
            met["one over all ranks"] += bool(by_this.all()) and world_size > 2
            met["one element"] += expected.numel() == 1
            met["nothing of one"] += not bool(by_this.all())
        met["ranks with nothing"] += any(all(bool((each < 0).all()) for each in whole.values()) for whole in by_rank)
    return met


def test_random_models_are_held_once_by_any_number_of_ranks(workers: WorkerPool) -> None:
    [met] = workers.run(hold_random_models, range(60), world_size=1, process_group=False)
    assert min(met[what] for what in ("one over all ranks", "one element", "nothing of one", "ranks with nothing")) > 2
