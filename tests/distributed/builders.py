"""What the builders of states in the layouts of frameworks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class StateBuilder(ABC):
    """Builds the true state on one rank, one with other values, and that one before its optimizer's first step."""

    def truth(self, optimizer: str) -> dict[str, Any]:
        return self._state(optimizer, "", has_state=True)

    def noise(self, optimizer: str) -> dict[str, Any]:
        return self._state(optimizer, "noise.", has_state=True)

    def stateless(self, optimizer: str) -> dict[str, Any]:
        return self._state(optimizer, "noise.", has_state=False)

    @abstractmethod
    def _state(self, name: str, prefix: str, *, has_state: bool) -> dict[str, Any]:
        """With the optimizer of this name; values are those of truth.py under names that start with the prefix."""
