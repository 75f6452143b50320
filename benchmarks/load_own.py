"""How bytecheckpoint loads in benchmarks/load.py: with each kind of exchange that it has; a slice without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from load_contender import Contender, Place
from load_states import Held

import bytecheckpoint as bcp


def contestants() -> dict[str, Contender]:
    exchanging = {f"bcp-{exchange}": Contender(save, load(exchange)) for exchange in ("on", "off")}
    return {"bcp": Contender(save, load("auto"))} | exchanging


def save(folder: Path, held: Held) -> None:
    bcp.save(folder, held.state)


def load(exchange: Literal["auto", "on", "off"]) -> Callable[[Place, Held], None]:
    def run(place: Place, held: Held) -> None:
        if held.layout.kind == "slice":
            held.state["model"]["tensor"].copy_(bcp.open(place.folder)["model.tensor"][held.part])
            return
        bcp.load(
            place.url or place.folder,
            held.state,
            storage_options=place.options if place.url else None,
            options=bcp.LoadOptions(exchange=exchange),
        )

    return run
