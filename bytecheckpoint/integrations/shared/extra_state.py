"""Extra state in a part of a model, which is made of plain modules and saved in the place of the model."""

from __future__ import annotations

from typing import Any

from torch import nn


class WithExtraState(nn.Module):
    """A module with the extra state of another one."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def get_extra_state(self) -> Any:
        return self._value

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError("a part of a model is saved, and never loaded")
