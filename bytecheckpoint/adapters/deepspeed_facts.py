"""What a resumed training with DeepSpeed needs besides tensors: its engine's counters, its scheduler, loss scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What changes in a loss scaler; the rest is configuration, which the one who loads has chosen anew."""


def facts_of(wrapper: Any, engine: Any | None) -> dict[str, Any]:
    """What a resumed training needs besides parameters and their state."""
    facts: dict[str, Any] = {}
    scaler = _dynamic_scaler(wrapper)
    if scaler is not None:
        facts["loss_scaler"] = {name: getattr(scaler, name) for name in _LOSS_SCALE if hasattr(scaler, name)}
    autocast = getattr(wrapper, "torch_autocast_gradscaler", None)
    if autocast is not None:
        facts["grad_scaler"] = autocast.state_dict()
    if engine is not None:
        facts["engine"] = {name: getattr(engine, name) for name in COUNTERS}
        if getattr(engine, "lr_scheduler", None) is not None:
            facts["lr_scheduler"] = engine.lr_scheduler.state_dict()
    return facts


def take_facts(wrapper: Any, engine: Any | None, facts: Mapping[str, Any]) -> None:
    scaler = _dynamic_scaler(wrapper)
    for name, value in facts.get("loss_scaler", {}).items():
        if scaler is not None and hasattr(scaler, name):
            setattr(scaler, name, value)
    autocast = getattr(wrapper, "torch_autocast_gradscaler", None)
    if autocast is not None and facts.get("grad_scaler"):
        autocast.load_state_dict(facts["grad_scaler"])
    if engine is None:
        return
    for name, value in facts.get("engine", {}).items():
        # Gradients of micro steps after the last step are in no checkpoint, so their accumulation starts anew.
        begun = value % engine.gradient_accumulation_steps() if name == "micro_steps" else 0
        setattr(engine, name, value - begun)
    if "lr_scheduler" in facts and getattr(engine, "lr_scheduler", None) is not None:
        engine.lr_scheduler.load_state_dict(facts["lr_scheduler"])


def _dynamic_scaler(wrapper: Any) -> Any | None:
    """What adapts the loss scale; None where that is fixed, as without fp16."""
    of_zero, of_fp16 = getattr(wrapper, "loss_scaler", None), getattr(wrapper, "loss_scale_config", None)
    if getattr(of_zero, "dynamic", False):
        return of_zero
    return of_fp16 if getattr(of_fp16, "dynamic_loss_scale", False) else None
