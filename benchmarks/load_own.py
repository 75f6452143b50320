"""How bytecheckpoint loads in benchmarks/load.py: with each kind of exchange that it has; a slice without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from load_contender import Contender, Place
from load_states import Held

import bytecheckpoint as bcp


def contestants() -> dict[str, Contender]:
    contenders = {"bcp": Contender(save, load(None))}
    if "exchange" in {field.name for field in fields(bcp.LoadOptions)}:
        contenders |= {f"bcp-{kind}": Contender(save, load(kind)) for kind in ("always", "never")}
    return contenders


def save(folder: Path, held: Held) -> None:
    bcp.save(folder, held.state)


def load(exchange: str | None) -> Callable[[Place, Held], None]:
    options = {} if exchange is None else {"exchange": exchange}

    def run(place: Place, held: Held) -> None:
        if held.layout.kind == "slice":
            held.state["model"]["tensor"].copy_(bcp.open(place.folder)["model.tensor"][held.part])
            return
        bcp.load(
            place.url or place.folder,
            held.state,
            storage_options=place.options if place.url else None,
            options=bcp.LoadOptions(**options),
        )

    return run
