"""The choice of `elastic`: what a save refuses, and how a load treats the state of another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from bytecheckpoint.adapters.data.loader_state import DataLoaderState

_OF_RANKS = "its state belongs to one process, and no other number of ranks can go on from it"


class LoadRule(NamedTuple):
    """The treatment of a stored state."""

    action: Literal["assign", "prefix", "restart", "refuse"]
    """assign: deal the streams out to ranks. prefix: go on after the samples that all ranks have passed. restart: put
    the loader back to its start, one with the state of one rank to the start of its epoch, or leave a new one as it is.
    refuse: refuse the load.
    """
    why: str = ""
    """Reason for the action; empty for assign."""


def why_inexact(state: DataLoaderState) -> str | None:
    """Returns why a loader's state may be inexact on another number of ranks, or None."""
    if state.keyed_by == "rank":
        return _OF_RANKS
    refuse = getattr(state.streams, "refuse_inexact", None)
    why: str | None = refuse() if refuse is not None else None  # it raises nothing: it returns the reason or None
    return why


def why_not_saved(state: DataLoaderState) -> str | None:
    """Returns why a save must not take the state of a loader, or None."""
    # If states belong to ranks, only a load on another number of ranks can tell whether they count samples.
    may_refuse = state.elastic == "exact" or (state.elastic == "at_least_once" and state.keyed_by == "stream")
    return why_inexact(state) if may_refuse else None


def load_rule(state: DataLoaderState, tree: Mapping[str, Any]) -> LoadRule:
    """Returns how a load treats the stored state of a loader."""
    saved_size, size, keyed_by = tree["size"], state.size, tree["keyed_by"]
    if keyed_by != state.keyed_by:
        by, own_by = (f"a state for each {each}" for each in (keyed_by, state.keyed_by))
        return LoadRule("refuse", f"the checkpoint has {by}, and this loader takes {own_by}; load it into one like it")
    if saved_size == size:
        return LoadRule("assign")
    changed = f"saved by {saved_size} data-parallel ranks, to be loaded by {size}"
    if state.elastic == "same":
        advice = "load it on as many, or choose another `elastic`"
        return LoadRule("refuse", f'{changed}, and elastic="same" refuses any change; {advice}')
    why = why_inexact(state)
    if why is None:
        return LoadRule("assign")
    why = f"{changed}, and {why}"
    if state.elastic == "restart":
        return LoadRule("restart", why)
    if state.elastic == "at_least_once" and keyed_by == "rank":
        return LoadRule("prefix", changed)
    return LoadRule("refuse", f"{why}; load it on as many, or choose another `elastic`, which docs/data.md explains")
