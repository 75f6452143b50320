"""A data loader whose state_dict() changes what comes next, as that of torchdata.nodes does."""

from __future__ import annotations

from typing import Any


class EarlyLoader:
    """Gives out numbers. Its state_dict() makes an iterator that the next iter() returns, as in torchdata.nodes."""

    def __init__(self) -> None:
        self._it: EarlyLoader | None = None
        self._iter_for_state_dict = False
        self._next = {"at": 0}
        self._at = 0

    def __iter__(self) -> EarlyLoader:
        if self._iter_for_state_dict:
            self._iter_for_state_dict = False
            return self
        self._it, self._at, self._next = self, self._next["at"], {"at": 0}
        return self

    def __next__(self) -> int:
        self._at += 1
        return self._at

    def state_dict(self) -> dict[str, Any]:
        if self._it is None:
            iter(self)
            self._iter_for_state_dict = True
        return {"at": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict
