"""Modules: buffers, extra state, tied weights, wrappers, hooks, and modules that have no memory yet."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from training import Tied, mlp, same_module, same_optimizer, same_value, train

import bytecheckpoint as bcp


def round_trip(path: Path, source: Any, target: Any) -> None:
    bcp.save(path, {"model": source})
    bcp.load(path, {"model": target})


class WithBuffers(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("kept", torch.full((3,), value))
        self.register_buffer("scratch", torch.full((3,), value), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("nothing", None)


def test_persistent_buffers_are_saved_and_others_are_not(tmp_path: Path) -> None:
    target = WithBuffers(0.0)
    round_trip(tmp_path, WithBuffers(1.0), target)
    assert list(bcp.open(tmp_path)) == ["model.kept"]
    assert target.kept.tolist() == [1.0] * 3
    assert target.scratch.tolist() == [0.0] * 3


class WithExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("extra", "initial"),
    [
        ({"scale": 2.0, "history": [1, (2,)]}, {"scale": 0.0, "history": []}),
        (torch.arange(3), torch.zeros(3).long()),
        (torch.arange(3), torch.zeros(0)),
        (torch.arange(3), None),
        ({"amax": torch.arange(3.0), "n": 1, "list": [torch.ones(2)]}, {"amax": torch.zeros(3), "n": 0}),
        (b"bytes", b""),
        (7, None),
        (None, 7),
    ],
    ids=["plain", "tensor", "tensor into another shape", "tensor into none", "both", "bytes", "number", "none"],
)
def test_extra_state_is_given_back_to_set_extra_state(tmp_path: Path, extra: Any, initial: Any) -> None:
    source = nn.ModuleDict({"a": WithExtraState(extra), "b": WithExtraState(1)})
    target = nn.ModuleDict({"a": WithExtraState(initial), "b": WithExtraState(0)})
    round_trip(tmp_path, source, target)
    assert repr(target["a"].extra) == repr(extra)
    assert target["b"].extra == 1


def test_missing_extra_state_is_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"weight": torch.ones(2)}})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"missing_key: model\._extra_state"):
        bcp.load(tmp_path, {"model": WithExtraState(1)})


@pytest.mark.parametrize("is_tied_there", [True, False])
@pytest.mark.parametrize("is_tied_here", [True, False])
def test_tied_weights(tmp_path: Path, is_tied_there: bool, is_tied_here: bool) -> None:
    source, target = Tied(is_tied=is_tied_there), Tied(is_tied=is_tied_here)
    if not is_tied_there:
        source.head.weight.data.copy_(source.embedding.weight.data)
    round_trip(tmp_path, source, target)
    assert torch.equal(target.embedding.weight, source.embedding.weight)
    assert torch.equal(target.head.weight, source.head.weight)
    assert (target.head.weight is target.embedding.weight) == is_tied_here
    opened = bcp.open(tmp_path)
    assert opened.info.num_tensors == (3 if is_tied_there else 4)
    assert len(opened.keys()) == 4
    assert torch.equal(opened["model.head.weight"][...], source.head.weight)
    mlp_state = opened.state_dict("model.")
    assert Tied(is_tied=False).load_state_dict(mlp_state)


@pytest.mark.parametrize("num_outputs", [6, 5], ids=["same shape", "other shape"])
@pytest.mark.parametrize("is_tied_first", [True, False])
def test_a_stage_may_not_use_the_name_of_a_tied_weight_for_another(
    tmp_path: Path, num_outputs: int, is_tied_first: bool
) -> None:
    tied, other = Tied(), nn.ModuleDict({"head": nn.Linear(4, num_outputs, bias=False)})
    stages = [tied, other] if is_tied_first else [other, tied]
    with pytest.raises(bcp.CheckpointSaveError, match=r"model\.head\.weight is the name of two tensors"):
        bcp.save(tmp_path, {"model": stages})


@pytest.mark.parametrize("is_tied_first", [True, False])
def test_a_stage_may_have_a_tied_weight_under_one_of_its_names(tmp_path: Path, is_tied_first: bool) -> None:
    tied, other = Tied(), nn.ModuleDict({"head": nn.Linear(4, 6, bias=False)})
    other["head"].weight = tied.head.weight
    stages = [tied, other] if is_tied_first else [other, tied]
    bcp.save(tmp_path, {"model": stages})
    checkpoint = bcp.open(tmp_path)
    assert torch.equal(checkpoint["model.head.weight"][...], tied.embedding.weight)
    assert torch.equal(checkpoint["model.embedding.weight"][...], tied.embedding.weight)


class Stages(NamedTuple):
    """Of a pipeline: the first one embeds, the last one has a head of the same shape."""

    first: nn.ModuleDict
    last: nn.ModuleDict
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> dict[str, Any]:
        return {"model": [self.first, self.last], "optimizer": self.optimizer}


def stages_after_a_step(*, is_tied: bool) -> Stages:
    first = nn.ModuleDict({"embed": nn.Linear(4, 6, bias=False)})
    last = nn.ModuleDict({"head": nn.Linear(4, 6, bias=False)})
    if is_tied:
        last["head"].weight = first["embed"].weight
    parameters = list(dict.fromkeys([*first.parameters(), *last.parameters()]))
    optimizer = torch.optim.AdamW(parameters)
    for number, parameter in enumerate(parameters, 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    return Stages(first, last, optimizer)


def test_optimizer_state_of_a_weight_that_two_stages_share_has_its_first_name(tmp_path: Path) -> None:
    """Its moments are those of the name by which the weight itself is loaded."""
    saved, loaded = stages_after_a_step(is_tied=False), stages_after_a_step(is_tied=True)
    bcp.save(tmp_path, saved.state)
    bcp.load(tmp_path, loaded.state)
    own, other = saved.first["embed"].weight, loaded.first["embed"].weight
    assert torch.equal(other, own)
    moments = saved.optimizer.state[own]["exp_avg"]
    assert not torch.equal(moments, saved.optimizer.state[saved.last["head"].weight]["exp_avg"])
    assert torch.equal(loaded.optimizer.state[other]["exp_avg"], moments)
    bcp.save(tmp_path / "tied", loaded.state)
    assert "optimizer.state.embed.weight.exp_avg" in bcp.open(tmp_path / "tied").keys()


@pytest.mark.parametrize("view", [lambda values: values.conj(), lambda values: values.conj().imag])
def test_a_view_that_conjugates_or_negates_a_buffer_is_not_tied_to_it(tmp_path: Path, view: Any) -> None:
    values = torch.arange(4) * (1 + 2j)
    source, target = nn.Module(), nn.Module()
    for module, of_both in ((source, values), (target, torch.zeros_like(values))):
        module.register_buffer("plain", of_both if view(of_both).is_complex() else of_both.imag)
        module.register_buffer("other", view(of_both))
    target.other = target.other.clone()
    bcp.save(tmp_path, {"it": source})
    bcp.load(tmp_path, {"it": target})
    assert torch.equal(target.plain, source.plain)
    assert torch.equal(target.other, source.other)


def test_tensors_that_share_memory_in_part_are_each_saved(tmp_path: Path) -> None:
    memory = torch.arange(12.0)
    source, target = nn.Module(), nn.Module()
    for module, base in ((source, memory), (target, torch.zeros(12))):
        module.register_buffer("all", base)
        module.register_buffer("first", base[:6])
        module.register_buffer("square", base.view(3, 4))
    round_trip(tmp_path, source, target)
    assert same_module(source, target)


class Compiled(nn.Module):
    """Names as torch.compile gives them, without compiling."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    inner = nn.ModuleDict({"block": Compiled(mlp(0))})
    source = Compiled(inner)
    target = nn.ModuleDict({"block": mlp(1)})
    round_trip(tmp_path / "wrapped", source, target)
    assert same_module(target["block"], mlp(0))
    assert "model.block.0.weight" in bcp.open(tmp_path / "wrapped").keys()
    wrapped = Compiled(nn.ModuleDict({"block": mlp(2)}))
    optimizer = torch.optim.Adam(wrapped.parameters())
    plain = nn.ModuleDict({"block": mlp(0)})
    plain_optimizer = torch.optim.Adam(plain.parameters())
    train(plain["block"], [plain_optimizer], 2)
    bcp.save(tmp_path / "plain", {"model": plain, "optimizer": plain_optimizer})
    bcp.load(tmp_path / "plain", {"model": wrapped, "optimizer": optimizer})
    assert same_module(wrapped._orig_mod["block"], plain["block"])
    assert same_optimizer(optimizer, plain_optimizer)


class Counting(nn.Module):
    """Keeps data that is not a tensor in its state_dict, by means of its own."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1.0))
        self.count = count

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = self.count

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.count = state_dict.pop(f"{prefix}count")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize("count", [5, None, "text", {"seen": [1, (2,)], "sums": torch.arange(3.0)}])
def test_data_in_a_state_dict_that_is_no_tensor_is_saved_and_given_back(tmp_path: Path, count: Any) -> None:
    source, target = nn.Sequential(Counting(count), Counting(1)), nn.Sequential(Counting(0), Counting(0))
    source[0].weight.data.fill_(7.0)
    weight = target[0].weight
    round_trip(tmp_path, source, target)
    assert repr(target[0].count) == repr(count)
    assert target[1].count == 1
    assert target[0].weight is weight
    assert weight.tolist() == [7.0, 7.0]


class Scaled(nn.Module):
    """Resets its scale when it loads the state of its first version, as torch's observers do."""

    _version = 2

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([scale]))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = torch.tensor([1.0])
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_modules_beside_such_data_do_not_take_their_state_for_one_of_an_old_version(tmp_path: Path) -> None:
    target = nn.Sequential(Scaled(5.0), Counting(0))
    round_trip(tmp_path, nn.Sequential(Scaled(3.0), Counting(1)), target)
    assert (target[0].scale.tolist(), target[1].count) == ([3.0], 1)


def test_data_in_a_state_dict_that_is_missing_is_named_and_that_is_left_out_stays(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": nn.ModuleList([Counting(5), nn.ReLU()])})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"missing_key: model\.1\.count"):
        bcp.load(tmp_path, {"model": nn.ModuleList([Counting(0), Counting(8)])})
    target = nn.ModuleList([Counting(0), Counting(8)])
    bcp.load(tmp_path, {"model": target}, strict=False)
    assert [counting.count for counting in target] == [5, 8]
    with pytest.raises(bcp.CheckpointMismatchError, match=r"unexpected_key: model\.0\.count"):
        bcp.load(tmp_path, {"model": nn.ModuleList([nn.LayerNorm(2, bias=False)])})
    bcp.load(tmp_path, {"model": nn.ModuleList([nn.LayerNorm(2, bias=False)])}, exclude="*.count")


def test_data_in_a_state_dict_that_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=r"model\.0\.count is an object of type"):
        bcp.save(tmp_path, {"model": nn.Sequential(Counting(object()))})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_a_module_that_torch_compile_has_wrapped(tmp_path: Path) -> None:
    target = torch.compile(mlp(1))
    round_trip(tmp_path, mlp(0), target)
    assert same_module(target._orig_mod, mlp(0))


def test_activation_checkpointing_does_not_change_names(tmp_path: Path) -> None:
    wrappers = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    target = nn.Sequential(*(wrappers.checkpoint_wrapper(layer) for layer in mlp(1)))
    round_trip(tmp_path, mlp(0), target)
    assert torch.equal(target[0].weight, mlp(0)[0].weight)


class Fused(nn.Module):
    """Holds one matrix, and shows the three that others know it as: its state_dict makes new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(6, 2))
        self.bias = nn.Parameter(torch.randn(2))
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        fused = state.pop(f"{prefix}fused")
        for index, name in enumerate("qkv"):
            state[f"{prefix}{name}"] = fused.detach()[2 * index : 2 * index + 2].clone()

    @staticmethod
    def _join(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if f"{prefix}q" in state:
            state[f"{prefix}fused"] = torch.cat([state.pop(f"{prefix}{name}") for name in "qkv"])


def test_tensors_that_state_dict_hooks_make_are_loaded_through_load_state_dict(tmp_path: Path) -> None:
    source, target = nn.Sequential(Fused(), nn.Linear(2, 2)), nn.Sequential(Fused(), nn.Linear(2, 2))
    parameter = target[0].fused
    round_trip(tmp_path, source, target)
    assert {"model.0.q", "model.0.k", "model.0.v", "model.0.bias"} < set(bcp.open(tmp_path).keys())
    assert torch.equal(target[0].fused, source[0].fused)
    assert target[0].fused is parameter
    assert same_module(source, target)


class Quantized(nn.Module):
    """Shows, as 4-bit layers of bitsandbytes do, scales that are no buffer and an offset that is packed anew each time,
    and takes neither back.
    """

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((4,), int(offset), dtype=torch.uint8))
        self.scales, self.offset = torch.full((2,), offset), offset

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {f"{prefix}weight.scales": self.scales, f"{prefix}weight.packed": torch.tensor([self.offset])}
        destination[f"{prefix}weight.facts"] = {"offset": self.offset}


def test_what_a_module_shows_and_does_not_take_back_is_warned_of_where_it_differs(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": nn.Sequential(Quantized(1))})
    same, other = nn.Sequential(Quantized(1)), nn.Sequential(Quantized(2))
    bcp.load(tmp_path, {"model": same})  # a warning would be an error
    told = r"model\.0\.weight\.packed, model\.0\.weight\.facts: .*does not take it, and it differs from the checkpoint"
    with pytest.warns(UserWarning, match=told):
        bcp.load(tmp_path, {"model": other})
    assert torch.equal(other[0].scales, torch.ones(2))


class Summed(nn.Module):
    """Shows a sum of its weight, and does not take it back."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}total"] = self.weight.detach().sum()[None]


@pytest.mark.parametrize("how", ["excluded", "absent", "NaN"])
def test_what_a_module_does_not_take_back_is_not_warned_of_where_it_is_not_loaded_or_equal_to_the_bit(
    tmp_path: Path, how: str
) -> None:
    source = Summed(float("nan") if how == "NaN" else 1.0)
    bcp.save(tmp_path, {"model": {"weight": source.weight.detach()} if how == "absent" else source})
    target = Summed(2.0)  # its sum was another one when the load began
    bcp.load(tmp_path, {"model": target}, exclude="model.total" if how == "excluded" else None, strict=how != "absent")
    assert same_value(target.weight, source.weight)


def test_what_a_wrapped_module_does_not_take_back_is_warned_of_by_its_name_in_the_checkpoint(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": nn.Sequential(Quantized(1))})
    wrapped = torch.compile(nn.Sequential(Quantized(2)))
    with pytest.warns(UserWarning, match=r"\Amodel\.0\.weight\.packed, "):
        bcp.load(tmp_path, {"model": wrapped})


def test_optimizer_state_of_what_a_hook_splits_loads_from_a_file_with_the_bare_names_of_the_model(
    tmp_path: Path,
) -> None:
    """As torchtitan's manager saves its models. No tensor of the model says where such state belongs."""
    source, target = nn.Sequential(Fused(), nn.Linear(2, 2)), nn.Sequential(Fused(), nn.Linear(2, 2))
    optimizer, loaded = (torch.optim.AdamW(model.named_parameters()) for model in (source, target))
    for parameter in source.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.save({**source.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    bcp.load(tmp_path / "state.pt", {"model": target, "optimizer": loaded})
    assert same_module(source, target)
    assert same_optimizer(optimizer, loaded)


def test_optimizer_state_of_what_a_hook_splits_loads_into_a_wrapped_model(tmp_path: Path) -> None:
    source, target = nn.Sequential(Fused(), nn.Linear(2, 2)), nn.Sequential(Fused(), nn.Linear(2, 2))
    wrapped = nn.ModuleDict({"model": target})
    optimizer, loaded = (torch.optim.AdamW(model.named_parameters()) for model in (source, wrapped))
    for parameter in source.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    bcp.save(tmp_path / "saved", {"model": source, "optimizer": optimizer})

    def put_below_model(name: str) -> str:
        return name if name.startswith("optimizer.") else f"model.{name}"

    bcp.load(tmp_path / "saved", {"model": wrapped, "optimizer": loaded}, key_map=put_below_model)
    assert same_module(source, target)
    for saved, parameter in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(optimizer.state[saved]["exp_avg"], loaded.state[parameter]["exp_avg"])


class Doubled(nn.Module):
    """Keeps what it derives from a parameter, and computes it again after load_state_dict()."""

    def __init__(self, extra: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.extra = extra
        self.num_calls = 0
        self.register_buffer("doubled", 2 * self.weight.detach(), persistent=False)
        self.register_load_state_dict_post_hook(self._derive)

    @staticmethod
    def _derive(module: Any, _: Any) -> None:
        module.doubled = 2 * module.weight.detach()
        module.num_calls += 1

    def get_extra_state(self) -> int | None:
        return self.extra

    def set_extra_state(self, state: int | None) -> None:
        self.extra = state


class DoubledWithoutExtra(Doubled):
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


# The first torch.compile of a process imports modules of torch that use what torch deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("build", [Doubled, DoubledWithoutExtra])
@pytest.mark.parametrize("wrap", [nn.Sequential, torch.compile], ids=["plain", "compiled"])
def test_what_a_module_derives_from_its_parameters_is_computed_again(tmp_path: Path, build: Any, wrap: Any) -> None:
    source, inner = build(), build()
    bcp.save(tmp_path, {"model": wrap(source), "n": 3})
    state = {"model": wrap(inner), "n": 0}
    bcp.load(tmp_path, state, include="n")
    assert inner.num_calls == 0
    bcp.load(tmp_path, state)
    assert inner.num_calls == 1
    assert torch.equal(inner.doubled, source.doubled)


def test_load_hooks_run_in_the_order_of_torch(tmp_path: Path) -> None:
    def build(calls: list[str]) -> nn.Module:
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
        for name, module in model.named_modules():
            module.register_load_state_dict_post_hook(lambda _, __, name=name: calls.append(name))
        return model

    source_calls, calls = list[str](), list[str]()
    source, target = build(source_calls), build(calls)
    bcp.save(tmp_path, {"model": source})
    bcp.load(tmp_path, {"model": target})
    source.load_state_dict(source.state_dict())
    assert calls == source_calls == ["0.0", "0.1", "0", "1", ""]


@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 4), lambda: nn.Conv2d(2, 3, 2)], ids=["linear", "conv"])
@pytest.mark.parametrize(
    "norm",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
def test_parametrized_modules(tmp_path: Path, build: Any, norm: Any) -> None:
    if norm is nn.utils.parametrizations.orthogonal and isinstance(build(), nn.Conv2d):
        pytest.skip("orthogonal takes matrices")
    source, target = norm(build()), norm(build())
    round_trip(tmp_path, source, target)
    assert same_module(source, target)
    assert torch.equal(source.eval().weight, target.eval().weight)


def test_frozen_parameters_and_modes_stay(tmp_path: Path) -> None:
    target = mlp(1).eval()
    target[0].requires_grad_(False)
    round_trip(tmp_path, mlp(0), target)
    assert same_module(target, mlp(0))
    assert [parameter.requires_grad for parameter in target.parameters()] == [False, False, True, True, True, True]
    assert not target.training


def test_a_list_of_modules_with_the_names_of_the_whole(tmp_path: Path) -> None:
    layers = mlp(0)
    stages = [nn.ModuleDict({"0": layers[0], "1": layers[1]}), nn.ModuleDict({"3": layers[3]})]
    target = mlp(1)
    round_trip(tmp_path / "stages", stages, target)
    assert same_module(target, mlp(0))
    others = mlp(2)
    parts = (nn.ModuleDict({"3": others[3]}), nn.ModuleDict({"1": others[1], "0": others[0]}))
    round_trip(tmp_path / "whole", mlp(0), parts)
    assert same_module(others, mlp(0))


def compiled_beside_its_name() -> nn.Module:
    module = Compiled(nn.Linear(2, 2))
    module.weight = nn.Parameter(torch.ones(2))
    return module


@pytest.mark.parametrize(
    ("model", "name", "own_name"),
    [([mlp(0), mlp(1)], "0.weight", "0.weight"), (compiled_beside_its_name(), "weight", "_orig_mod.weight")],
    ids=["two modules of a list", "one module"],
)
def test_two_tensors_with_the_same_name_are_refused(tmp_path: Path, model: Any, name: str, own_name: str) -> None:
    text = rf"model\.{name} is the name of two tensors, .* the module calls '{own_name}'.*several models as a dict"
    with pytest.raises(bcp.CheckpointSaveError, match=text) as error:
        bcp.save(tmp_path, {"model": model})
    assert error.value.kind == "unsupported_value"


@pytest.mark.parametrize("call", [bcp.save, bcp.load])
def test_lazy_modules_are_refused_by_name(tmp_path: Path, call: Any) -> None:
    bcp.save(tmp_path / "there", {"model": nn.Sequential(nn.Linear(3, 3))})
    path = tmp_path / ("there" if call is bcp.load else "new")
    with pytest.raises(bcp.CheckpointSaveError, match=r"model\.0\.weight.*not been initialised.*forward") as error:
        call(path, {"model": nn.Sequential(nn.LazyLinear(3))})
    assert error.value.kind == "unsupported_value"
    assert not (tmp_path / "new").exists()


def test_modules_in_nested_containers(tmp_path: Path) -> None:
    def build(seed: int) -> dict[str, Any]:
        return {
            "nets": {"a": mlp(seed), "more": [1, {"b": mlp(seed + 1)}]},
            "pair": (mlp(seed + 2), torch.full((2,), seed)),
        }

    source, target = build(0), build(5)
    target["nets"]["more"][0] = 7
    bcp.save(tmp_path, source)
    bcp.load(tmp_path, target)
    assert same_module(target["nets"]["a"], mlp(0))
    assert same_module(target["nets"]["more"][1]["b"], mlp(1))
    assert same_module(target["pair"][0], mlp(2))
    assert target["nets"]["more"][0] == 1
    assert target["pair"][1].tolist() == [0, 0]


def test_one_module_under_two_names(tmp_path: Path) -> None:
    model = mlp(0)
    bcp.save(tmp_path, {"a": model, "b": model})
    first, second = mlp(1), mlp(2)
    bcp.load(tmp_path, {"a": first, "b": second})
    assert same_module(first, model)
    assert same_module(second, model)


def test_a_module_without_tensors(tmp_path: Path) -> None:
    round_trip(tmp_path, nn.ReLU(), nn.ReLU())


def test_an_averaged_model(tmp_path: Path) -> None:
    source = torch.optim.swa_utils.AveragedModel(mlp(0))
    source.update_parameters(mlp(1))
    target = torch.optim.swa_utils.AveragedModel(mlp(2))
    round_trip(tmp_path, source, target)
    assert same_module(source, target)
    assert target.n_averaged.item() == 1


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_a_module_on_the_meta_device_is_materialised_with_its_ties(tmp_path: Path) -> None:
    source, target = Tied(), on_meta(Tied)
    parameters = list(target.parameters())
    round_trip(tmp_path, source, target)
    assert same_module(source, target)
    assert target.head.weight is target.embedding.weight
    assert all(map(lambda a, b: a is b, parameters, target.parameters()))
    assert torch.equal(source(torch.arange(6)), target(torch.arange(6)))


@pytest.mark.parametrize("how", ["context", "default"])
def test_loading_while_the_default_device_is_meta_loads_into_the_host(tmp_path: Path, how: str) -> None:
    bcp.save(tmp_path, {"model": mlp(0)})
    before = torch.get_default_device()
    try:
        with torch.device("meta") if how == "context" else nullcontext():
            if how == "default":
                torch.set_default_device("meta")
            target = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
            bcp.load(tmp_path, {"model": target})
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)
    assert same_module(target, mlp(0))


def test_an_optimizer_that_was_built_on_meta_parameters_stays_valid(tmp_path: Path) -> None:
    source, target = mlp(0), on_meta(lambda: mlp(1))
    optimizer = torch.optim.Adam(source.parameters(), lr=0.1)
    restored = torch.optim.Adam(target.parameters())
    train(source, [optimizer], 3)
    bcp.save(tmp_path, {"model": source, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": target, "optimizer": restored})
    assert same_optimizer(optimizer, restored)
    train(source, [optimizer], 2)
    train(target, [restored], 2)
    assert same_module(source, target)


def test_a_meta_module_stays_on_the_meta_device_when_the_load_fails(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": mlp(0)})
    target = on_meta(lambda: mlp(1).append(nn.Linear(1, 1)))
    with pytest.raises(bcp.CheckpointMismatchError, match=r"model\.4\.weight"):
        bcp.load(tmp_path, {"model": target})
    assert all(parameter.is_meta for parameter in target.parameters())


def test_a_meta_module_with_another_dtype_or_partly_on_the_host(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": mlp(0)})
    target = on_meta(lambda: mlp(1).double())
    bcp.load(tmp_path, {"model": target}, cast=True)
    assert target[0].weight.dtype == torch.float64
    assert torch.equal(target[0].weight, mlp(0)[0].weight.double())
    mixed = mlp(1)
    mixed[3] = on_meta(lambda: nn.Linear(8, 3))
    first = mixed[0].weight
    bcp.load(tmp_path, {"model": mixed})
    assert same_module(mixed, mlp(0))
    assert mixed[0].weight is first


def test_buffers_that_no_checkpoint_holds_stay_on_meta_with_a_warning(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": WithBuffers(1.0)})
    target = on_meta(lambda: WithBuffers(0.0))
    with pytest.warns(UserWarning, match=r"scratch.*not persistent"):
        bcp.load(tmp_path, {"model": target})
    assert target.kept.tolist() == [1.0] * 3


def test_meta_parameters_that_were_not_loaded_are_no_memory_full_of_noise(tmp_path: Path) -> None:
    """With strict=False or exclude a parameter may get no values: it must not look as if it had."""
    bcp.save(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2))})
    target = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    bcp.load(tmp_path, {"model": target}, strict=False)
    assert not target[0].weight.is_meta
    assert target[1].weight.is_meta


def test_meta_parameters_of_another_dtype_stay_on_the_meta_device_without_cast(tmp_path: Path) -> None:
    source, target = mlp(0), on_meta(lambda: mlp(1).bfloat16())
    target[3] = on_meta(lambda: nn.Linear(8, 3))
    optimizer, restored = torch.optim.Adam(source.parameters()), torch.optim.Adam(target.parameters())
    train(source, [optimizer], 1)
    bcp.save(tmp_path, {"model": source, "optimizer": optimizer})
    report = bcp.load(tmp_path, {"model": target, "optimizer": restored}, strict=False)
    assert any(text.startswith("model.0.weight: dtype") for text in report.mismatched)
    assert target[0].weight.is_meta
    assert torch.equal(target[3].weight, source[3].weight)
    assert set(restored.state) == set(target[3].parameters())  # moments of the others fit neither
    for own, loaded in zip(source[3].parameters(), target[3].parameters(), strict=True):
        assert torch.equal(optimizer.state[own]["exp_avg"], restored.state[loaded]["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_meta_parameters_get_memory_only_for_what_fills_them(tmp_path: Path, dtype: torch.dtype) -> None:
    """Under the first of their names there may be something else in the checkpoint than under the second."""
    source, target = Tied(is_tied=False), on_meta(Tied)
    source.embedding.weight = nn.Parameter(source.embedding.weight.to(dtype))
    bcp.save(tmp_path, {"model": source})
    bcp.load(tmp_path, {"model": target}, strict=False)
    assert target.embedding.weight.is_meta == (dtype != torch.float32)
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.body.weight, source.body.weight)


def quantizer() -> FakeQuantize:
    kind = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
    return FakeQuantize(MovingAveragePerChannelMinMaxObserver, **kind)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_observers_of_quantization_get_the_shape_that_they_had(tmp_path: Path, device: str) -> None:
    source = nn.Sequential(nn.Linear(3, 4), quantizer())
    source[1](source[0].weight)
    with torch.device(device):
        target = nn.Sequential(nn.Linear(3, 4), quantizer())
    own = target.state_dict(keep_vars=True)
    assert source.state_dict()["1.scale"].shape == (4,) != own["1.scale"].shape
    bcp.save(tmp_path, {"model": source})
    bcp.load(tmp_path, {"model": target})
    assert same_module(source, target)
    assert device == "meta" or target.state_dict(keep_vars=True)["1.scale"] is own["1.scale"]


def test_observers_keep_their_shape_where_a_load_is_refused_or_leaves_them_out(tmp_path: Path) -> None:
    source, target = quantizer(), quantizer()
    source(torch.ones(4, 3))
    target.scale = target.scale.double()
    bcp.save(tmp_path, {"it": source})
    with pytest.raises(bcp.CheckpointMismatchError, match=r"it\.scale: dtype float32"):
        bcp.load(tmp_path, {"it": target})
    assert target.zero_point.shape == (1,)
    bcp.load(tmp_path, {"it": target}, strict=False)
    assert target.scale.tolist() == [1.0]
    assert target.zero_point.shape == (4,)
    bcp.load(tmp_path, {"it": target}, exclude="it.scale")
    assert target.scale.tolist() == [1.0]
    bcp.load(tmp_path, {"it": target}, cast=True)
    assert torch.equal(target.scale, source.scale.double())
