"""Loads of bytecheckpoint with each kind of exchange; a slice without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import bytecheckpoint as bcp
from loads.candidate import LoadFunctions, StoredAt
from shared.states import HeldState


def candidates() -> dict[str, LoadFunctions]:
    exchanging = {f"bcp-{exchange}": LoadFunctions(save, load(exchange)) for exchange in ("on", "off")}
    return {"bcp": LoadFunctions(save, load("auto"))} | exchanging


def save(folder: Path, held: HeldState) -> None:
    bcp.save(folder, held.state)


def load(exchange: Literal["auto", "on", "off"]) -> Callable[[StoredAt, HeldState], None]:
    def run(stored: StoredAt, held: HeldState) -> None:
        if held.layout.kind == "slice":
            held.state["model"]["tensor"].copy_(bcp.open(stored.folder)["model.tensor"][held.part])
            return
        bcp.load(
            stored.url or stored.folder,
            held.state,
            storage_options=stored.options if stored.url else None,
            options=bcp.LoadOptions(exchange=exchange),
        )

    return run
