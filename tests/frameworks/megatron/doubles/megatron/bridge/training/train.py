"""The calls of Megatron-Bridge's loop to its checkpoint manager, with the arguments and in the order of Bridge's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def train(
    step: Callable[[], None],
    manager: Any,
    ctx: Any,
    is_signalled: Callable[[], bool],
    *,
    train_iters: int,
    save_interval: int,
    global_batch_size: int,
) -> None:
    """Loads, trains up to `train_iters`, and saves at intervals and at a signal, as with `exit_signal_handler`."""
    manager.load(ctx)
    state = ctx.state
    is_stopped = is_saved = False
    while state.train_state.step < train_iters and not is_stopped:
        manager.finalize_async_saves(state, blocking=False)
        step()
        state.train_state.step += 1
        state.train_state.consumed_train_samples += global_batch_size
        state.train_state.floating_point_operations_so_far += 1000.0
        ctx.num_floating_point_operations_so_far = state.train_state.floating_point_operations_so_far
        is_stopped = is_signalled()
        is_saved = is_stopped or state.train_state.step % save_interval == 0
        if is_saved:
            manager.save(ctx, callback_manager=None)
    manager.finalize_async_saves(state, blocking=True, terminate=is_stopped)
    if not is_saved:
        manager.save(ctx, callback_manager=None)
    manager.finalize_async_saves(state, blocking=True, terminate=True)
