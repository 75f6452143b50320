"""A lazy snapshot reads the state after `save` has returned: what waits for it by itself, what is copied before, and
what has to ask.
"""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, before
from sample_tensors import bits_of
from snapshot_cases import OPTIONS, bits_of_all, differing, saved_bits
from torch.optim.optimizer import _global_optimizer_pre_hooks

import bytecheckpoint as bcp
from bytecheckpoint.saving import commit, prepare
from bytecheckpoint.staging import file_image

GATHER = Seam(file_image.LiveFile, "gather")


@contextmanager
def staging_held() -> Iterator[threading.Event]:
    """Nothing is staged in the background until the event is set; it is in the end."""
    go = threading.Event()

    def wait() -> None:
        assert go.wait(20)

    with before(GATHER, wait):
        try:
            yield go
        finally:
            go.set()


def lazily(path: object, state: dict[str, Any], **arguments: Any) -> bcp.SaveHandle:
    return bcp.save(str(path), state, async_save=True, options=OPTIONS["lazy"], **arguments)


def trained(optimizer_class: Any, **arguments: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = optimizer_class(model.parameters(), **arguments)
    closure(model)()
    optimizer.step(closure(model)) if optimizer_class is torch.optim.LBFGS else optimizer.step()
    return model, optimizer


def closure(model: torch.nn.Module) -> Any:
    def loss() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        result = model(torch.randn(4, 8)).square().sum()
        result.backward()
        return result

    return loss


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_a_step_of_an_optimizer_in_the_state_waits_by_itself(tmp_path: Path, optimizer_class: Any) -> None:
    model, optimizer = trained(optimizer_class, lr=0.1)
    # A gradient of before: what a forward pass changes is another test's.
    loss = closure(model) if optimizer_class is torch.optim.LBFGS else None
    assert_steps_wait(tmp_path, model, {"model": model, "optimizer": optimizer}, lambda: optimizer.step(loss))


class Wrapper(torch.optim.Optimizer):
    """Like Accelerate's: an optimizer of torch's by its class, without its __init__."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def assert_steps_wait(path: Path, model: torch.nn.Module, state: dict[str, Any], step: Callable[[], object]) -> None:
    """After a lazy save, `step` changes the model only when what was saved is out of its reach."""
    expected = {f"model.{name}": bits_of(value) for name, value in model.state_dict().items()}
    with staging_held() as go:
        handle = lazily(path, state)
        threading.Timer(0.2, go.set).start()
        step()
        assert go.is_set()
        handle.result(20)
    saved = {name: bits for name, bits in saved_bits(path).items() if name.startswith("model.")}
    assert differing(saved, expected) == []


def test_a_step_of_a_wrapped_optimizer_waits_at_every_save(tmp_path: Path) -> None:
    model, inner = trained(torch.optim.AdamW, lr=0.1)
    wrapper = Wrapper(inner)
    for number in range(2):
        closure(model)()
        assert_steps_wait(tmp_path / str(number), model, {"model": model, "optimizer": wrapper}, wrapper.step)


class Nested(Wrapper):
    """Like a hand-made Muon + AdamW, with lists of optimizers in a dict."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.inner = {"matrices": [optimizers[0]], "others": list(optimizers[1:])}

    @property
    def each(self) -> list[torch.optim.Optimizer]:
        return [optimizer for of_kind in self.inner.values() for optimizer in of_kind]

    @property
    def state(self) -> Any:
        return {key: value for optimizer in self.each for key, value in optimizer.state.items()}

    @property
    def param_groups(self) -> Any:
        return [group for optimizer in self.each for group in optimizer.param_groups]

    def state_dict(self) -> Any:
        return {"inner": [optimizer.state_dict() for optimizer in self.each]}

    def step(self, closure: Any = None) -> None:
        for optimizer in self.each:
            optimizer.step(closure)


def test_a_step_of_an_optimizer_waits_that_has_others_in_lists_in_a_dict(tmp_path: Path) -> None:
    """Wherever a save finds the state of inner optimizers, a lazy one finds that they wait."""
    model = torch.nn.Linear(8, 8)
    optimizer = Nested(torch.optim.SGD([model.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([model.bias], lr=0.1))
    closure(model)()
    optimizer.step()
    assert_steps_wait(tmp_path, model, {"model": model, "optimizer": optimizer}, optimizer.step)


def test_a_step_of_an_optimizer_that_is_not_in_the_state_waits(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW, lr=0.1)
    closure(model)()
    assert_steps_wait(tmp_path, model, {"model": model}, optimizer.step)


def test_a_step_waits_although_others_have_removed_all_hooks(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW, lr=0.1)
    lazily(tmp_path / "first", {"model": model}).result(20)
    _global_optimizer_pre_hooks.clear()
    closure(model)()
    assert_steps_wait(tmp_path / "second", model, {"model": model, "optimizer": optimizer}, optimizer.step)


def test_steps_within_a_backward_pass_wait(tmp_path: Path) -> None:
    """As those of optimizers that are stepped as soon as a gradient is there."""
    model = torch.nn.Linear(8, 8)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    assert_steps_wait(tmp_path, model, {"model": model}, closure(model))


class WithoutHooks(torch.optim.Optimizer):
    """Changes its parameters itself, and runs nobody's hooks."""

    def __init__(self, params: Any) -> None:
        self.param_groups, self.state, self.defaults = [{"params": list(params), "lr": 0.1}], {}, {}

    def state_dict(self) -> Any:
        return {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}

    def step(self, closure: Any = None) -> None:  # noqa: ARG002  the signature of torch
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(1.0)


class StepsMoreThanItsInner(Wrapper):
    """Has an optimizer inside, which is not the one of all of its parameters."""

    def __init__(self, inner: torch.optim.Optimizer, other: torch.Tensor) -> None:
        super().__init__(inner)
        self._groups = [*inner.param_groups, {"params": [other]}]

    @property
    def param_groups(self) -> Any:
        return self._groups


def test_an_optimizer_that_cannot_wait_is_refused_at_every_save(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD([model.weight], lr=0.1)
    replaced = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced.step = lambda: None
    for optimizer in (WithoutHooks(model.parameters()), StepsMoreThanItsInner(inner, model.bias), replaced):
        state = {"model": model, "optimizer": optimizer}
        for _ in range(2):
            with pytest.raises(bcp.CheckpointSaveError, match=r"optimizer is an .*run torch's step hooks") as caught:
                lazily(tmp_path, state)
            assert caught.value.kind == "unsupported_value"
        bcp.save(tmp_path, state, async_save=True, options=OPTIONS["copy"]).result(20)
        shutil.rmtree(tmp_path)


def test_a_step_waits_only_until_staging_is_over(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    go = threading.Event()
    with before(Seam(commit, "encode_report"), lambda: go.wait(20)):
        handle = lazily(tmp_path, {"model": model, "optimizer": optimizer})
        optimizer.step()
        assert not handle.done()
        go.set()
        handle.result(20)


def test_buffers_may_change_at_once(tmp_path: Path) -> None:
    """A forward pass changes those of a BatchNorm; nobody can wait for it."""
    model, optimizer = trained(torch.optim.AdamW)
    expected = bits_of_all(model.state_dict())
    with staging_held() as go:
        handle = lazily(tmp_path, {"model": model, "optimizer": optimizer})
        closure(model)()
        assert bits_of_all(model.state_dict()) != expected
        go.set()
        handle.result(20)
    names = {f"model.{name}": bits for name, bits in expected.items()}
    saved = {name: bits for name, bits in saved_bits(tmp_path).items() if name in names}
    assert differing(saved, names) == []


def test_buffers_that_views_and_other_names_share_may_change_at_once(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(8)
    alias = model.running_mean
    part = model.running_mean[3:6]
    with staging_held() as go:
        handle = lazily(tmp_path, {"model": model, "alias": alias, "part": part})
        model.running_mean.fill_(5.0)
        go.set()
        handle.result(20)
    saved = bcp.open(tmp_path).state_dict()
    assert saved["model.running_mean"].tolist() == [0.0] * 8
    assert saved["alias"].tolist() == [0.0] * 8
    assert saved["part"].tolist() == [0.0] * 3


NOT_SAVED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize")
@pytest.mark.parametrize("kind", NOT_SAVED)
def test_a_buffer_that_is_not_saved_may_be_of_any_kind(tmp_path: Path, kind: str) -> None:
    model = torch.nn.BatchNorm1d(8)
    model.register_buffer("mask", NOT_SAVED[kind](), persistent=False)
    model.register_buffer("part", model.weight.detach()[2:4], persistent=False)
    with staging_held() as go:
        handle = lazily(tmp_path, {"model": model})
        model.running_mean.fill_(5.0)
        model.part.fill_(5.0)
        go.set()
        handle.result(20)
    saved = bcp.open(tmp_path).state_dict()
    assert saved["model.running_mean"].tolist() == [0.0] * 8
    assert saved["model.weight"].tolist() == [1.0] * 8


@pytest.mark.parametrize("fault", [None, OSError("no"), KeyboardInterrupt()])
def test_who_waits_for_staging_takes_part_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException | None
) -> None:
    """The background is held in its first gather; who waits does the rest, and what failed there is done again."""
    monkeypatch.setattr(prepare, "_MAX_COPY_THREADS", 2)  # one in the background
    state = {f"x{number}": torch.full((1 << 18,), float(number)) for number in range(8)}
    options = bcp.SaveOptions(snapshot="lazy", max_file_bytes=1 << 20)
    go, begun = threading.Event(), threading.Event()
    waiter = threading.current_thread()
    faults = [fault] if fault is not None else []
    num_gathered = 0

    def gathering() -> None:
        nonlocal num_gathered
        if threading.current_thread() is not waiter:
            begun.set()
            assert go.wait(20)
            return
        assert begun.wait(20)
        if faults:
            threading.Timer(0.3, go.set).start()
            raise faults.pop()
        num_gathered += 1
        if num_gathered == 7:
            go.set()

    with before(GATHER, gathering):
        handle = bcp.save(tmp_path, state, async_save=True, options=options)
        assert begun.wait(20)
        if fault is None:
            handle.staged()
            assert num_gathered == 7
        else:
            with pytest.raises(KeyboardInterrupt) if isinstance(fault, KeyboardInterrupt) else nullcontext():
                handle.staged()
            handle.staged()
    for tensor in state.values():
        tensor.fill_(-1.0)
    handle.result(20)
    assert [float(bcp.open(tmp_path)[name][0]) for name in state] == [float(number) for number in range(8)]


def test_what_changes_the_state_otherwise_asks_the_handle(tmp_path: Path) -> None:
    tensor = torch.zeros(3 << 20)
    with staging_held() as go:
        handle = lazily(tmp_path, {"x": tensor})
        threading.Timer(0.1, go.set).start()
        handle.staged()
        assert go.is_set()
        tensor.fill_(1.0)
        handle.result(20)
    assert bcp.open(tmp_path)["x"][:].unique().tolist() == [0.0]


def test_a_load_waits_until_staging_is_over(tmp_path: Path) -> None:
    tensor = torch.full((1000,), 1.0)
    bcp.save(tmp_path / "first", {"x": tensor})
    tensor.fill_(2.0)
    with staging_held() as go:
        handle = lazily(tmp_path / "second", {"x": tensor})
        threading.Timer(0.2, go.set).start()
        bcp.load(tmp_path / "first", {"x": tensor})
        assert go.is_set()
        handle.result(20)
    assert tensor.unique().tolist() == [1.0]
    assert bcp.open(tmp_path / "second")["x"][:].unique().tolist() == [2.0]


def test_the_call_returns_before_anything_is_staged(tmp_path: Path) -> None:
    with staging_held() as go:
        handle = lazily(tmp_path, {"x": torch.ones(100)})
        assert not handle.done()
        time.sleep(0.05)
        go.set()
        info = handle.result(20)
    assert info.seconds["stall"] < info.seconds["total"]


def own_hooks() -> list[Any]:
    """Those of this library among the hooks that every optimizer of the process runs."""
    hooks = _global_optimizer_pre_hooks.values()
    return [hook for hook in hooks if "bytecheckpoint" in hook.__module__]


def test_the_process_gets_one_hook_however_often_it_saves_and_optimizers_stay_what_they_were(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    for step in range(3):
        lazily(tmp_path, {"model": model, "optimizer": optimizer}, step=step).result(20)
    assert len(own_hooks()) == 1
    assert not optimizer._optimizer_step_pre_hooks
    copied_model, copied = copy.deepcopy((model, optimizer))
    lazily(tmp_path, {"model": copied_model, "optimizer": copied}, step=3).result(20)
    pickle.loads(pickle.dumps(optimizer)).step()


def test_an_optimizer_steps_after_a_lazy_save_that_failed(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)

    def fail() -> None:
        raise OSError(5, "the disk fell off")

    with before(GATHER, fail):
        handle = lazily(tmp_path, {"model": model, "optimizer": optimizer})
        optimizer.step()
        with pytest.raises(bcp.CheckpointSaveError, match="the disk fell off"):
            handle.result(20)
    optimizer.step()
    lazily(tmp_path, {"model": model, "optimizer": optimizer}).result(20)


def test_an_optimizer_whose_steps_may_be_replayed_is_refused(tmp_path: Path) -> None:
    """A CUDA graph runs no hooks, and only capturable optimizers can be in one."""
    model = torch.nn.Linear(4, 4)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), capturable=True)}
    with pytest.raises(bcp.CheckpointSaveError, match=r'capturable.*snapshot="copy"') as raised:
        lazily(tmp_path, state)
    assert raised.value.kind == "unsupported_value"
    bcp.save(tmp_path, state, async_save=True, options=OPTIONS["copy"]).result(20)
