"""What the campaigns break: a small training run, and the ways in which libraries save and load it. Each trial knows by
the number of steps which bits must come back.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint as bcp

WIDE = 132_000
"""Elements of the largest tensor: files of it and its momentum are written past the page cache, as large files are."""
NARROW = 6_000
"""For trials that read the same checkpoint thousands of times."""


class _Model(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.linspace(-1, 1, width))
        self.narrow = torch.nn.Parameter(torch.linspace(0, 3, 33 * 7).to(torch.bfloat16).view(33, 7))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.int64))


class Training:
    """A model and its optimizer, whose every bit follows from the number of steps that were done."""

    def __init__(self, width: int = WIDE, *, steps: int = 0) -> None:
        self.model = _Model(width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        self.extra: dict[str, Any] = {"steps": 0}
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """As in a training loop: with a lazy save under way nothing but the optimizer's step may change it."""
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number + self.extra["steps"])
        self.optimizer.step()
        self.model.seen += 1
        self.extra = {"steps": self.extra["steps"] + 1}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, by names of their own."""
        found = dict(self.model.state_dict())
        for index, of_one in self.optimizer.state_dict()["state"].items():
            found |= (
                {f"momentum {index}": of_one["momentum_buffer"]} if of_one.get("momentum_buffer") is not None else {}
            )
        return found


@functools.lru_cache(maxsize=64)
def _tensors_after(width: int, steps: int) -> dict[str, torch.Tensor]:
    return Training(width, steps=steps).tensors()


class WrongBytesError(AssertionError):
    """Something was loaded without an error, and is not what was saved."""


class Saver(ABC):
    """A library, as the campaigns use it."""

    @abstractmethod
    def save(self, root: Path, training: Training, *, in_place: bool) -> None:
        """At a step of its own, or at the root in place of what is there."""

    @abstractmethod
    def steps(self, root: Path) -> list[int]:
        """Which steps a reader sees, rising."""

    @abstractmethod
    def load(self, root: Path, training: Training, *, step: int | None) -> None:
        """The checkpoint of this step; None for the one at the root."""

    def steps_loaded(self, root: Path, *, step: int | None, width: int = WIDE) -> int:
        """Loads into a training run that has not begun: how many steps were done when it was saved.

        Raises WrongBytesError where it is not bit by bit what it was then, and whatever loading raises.
        """
        found = Training(width)
        self.load(root, found, step=step)
        steps = found.extra["steps"]
        if not isinstance(steps, int) or not 0 <= steps < 10_000 or (step is not None and steps != step):
            raise WrongBytesError(f"says that {steps} steps were done")
        tensors, expected = found.tensors(), _tensors_after(width, steps)
        wrong = [name for name, tensor in expected.items() if not _same_bits(tensors.get(name), tensor)]
        if wrong or len(tensors) != len(expected):
            raise WrongBytesError(f"{', '.join(wrong) or 'a tensor more'} is not as it was after {steps} steps")
        return steps


class OwnSaver(Saver):
    """This library."""

    def save(self, root: Path, training: Training, *, in_place: bool) -> None:
        options = bcp.SaveOptions(overwrite=in_place, timeout_s=8)
        bcp.save(root, self._state(training), step=_step_of(training, in_place=in_place), options=options)

    def begin(self, root: Path, training: Training, *, in_place: bool, snapshot: str) -> Callable[[], object]:
        """Saves behind the training's back; the function that is returned waits until that is acknowledged."""
        options = bcp.SaveOptions(overwrite=in_place, timeout_s=8, snapshot=snapshot)
        step = _step_of(training, in_place=in_place)
        return bcp.save(root, self._state(training), step=step, async_save=True, options=options).result

    def steps(self, root: Path) -> list[int]:
        return bcp.steps(root)

    def load(self, root: Path, training: Training, *, step: int | None) -> None:
        bcp.load(root, self._state(training), step=step)

    def _state(self, training: Training) -> dict[str, Any]:
        return {"model": training.model, "optimizer": training.optimizer, "extra_state": training.extra}


class ReusingSaver(OwnSaver):
    """This library, where a save takes the files of frozen parameters from the checkpoint before it."""

    def save(self, root: Path, training: Training, *, in_place: bool) -> None:
        options = bcp.SaveOptions(overwrite=in_place, timeout_s=8, reuse=True)
        bcp.save(root, self._with_frozen(training), step=_step_of(training, in_place=in_place), options=options)

    def load(self, root: Path, training: Training, *, step: int | None) -> None:
        state = self._with_frozen(training)
        expected = state["frozen"].wide.clone()
        torch.nn.init.zeros_(state["frozen"].wide)
        bcp.load(root, state, step=step)
        if not _same_bits(state["frozen"].wide, expected):
            raise WrongBytesError("the frozen parameters are not as they were")

    def _with_frozen(self, training: Training) -> dict[str, Any]:
        return {**self._state(training), "frozen": _Model(WIDE).requires_grad_(False)}


class TorchSaver(Saver):
    """torch.distributed.checkpoint, called as its tutorial does, with a folder for each step."""

    def save(self, root: Path, training: Training, *, in_place: bool) -> None:
        folder = root if in_place else self._folder(root, training.extra["steps"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self._state(training), checkpoint_id=folder)

    def steps(self, root: Path) -> list[int]:
        """Those with a `.metadata`, which it writes last."""
        return sorted(int(file.parent.name.removeprefix("step")) for file in root.glob("step*/.metadata"))

    def load(self, root: Path, training: Training, *, step: int | None) -> None:
        training.step()  # its optimizer has no momentum to load into before
        state = self._state(training)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=root if step is None else self._folder(root, step))
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.extra = state["extra"]

    def _folder(self, root: Path, step: int) -> Path:
        return root / f"step{step}"

    def _state(self, training: Training) -> dict[str, Any]:
        return {
            "model": training.model.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "extra": training.extra,
        }


OWN = OwnSaver()
SAVERS: dict[str, Saver] = {"own": OWN, "reusing": ReusingSaver(), "torch": TorchSaver()}


def warm_up() -> None:
    """Imports what a first step of an optimizer, a first save and a first load import."""
    for saver in SAVERS.values():
        with tempfile.TemporaryDirectory() as folder:
            saver.save(Path(folder), Training(steps=1), in_place=True)
            saver.steps_loaded(Path(folder), step=None)


def _step_of(training: Training, *, in_place: bool) -> int | None:
    return None if in_place else training.extra["steps"]


def _same_bits(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return (
        found is not None
        and found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(found.detach().reshape(-1).view(torch.uint8), expected.detach().reshape(-1).view(torch.uint8))
    )
