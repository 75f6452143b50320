"""Trains as train_gpt.py, by the calls of Megatron-Bridge's loop, which has our manager by its configuration."""

from __future__ import annotations

from types import SimpleNamespace

from frameworks.megatron.bridge_parts import TrainState, config_of, context_of
from frameworks.megatron.train_gpt import Training, run_on_host
from frameworks.real_megatron import Built


def train(run: Training) -> None:
    from megatron.bridge.training.train import train as train_by_bridge

    from bytecheckpoint.integrations.megatron_bridge import BcpBridgeManager

    args, state = run.args, TrainState()
    manager = BcpBridgeManager(config_of(args.save, async_save=args.async_save))

    def step() -> None:
        args.consumed_train_samples = state.consumed_train_samples  # by which Megatron's samplers go on
        run.step(state.step)

    built = Built(run.model, run.optimizer)
    ctx: SimpleNamespace = context_of(built, run.scheduler, state, num_floating_point_operations_so_far=0.0)
    train_by_bridge(
        step, manager, ctx, run.is_signalled,
        train_iters=args.train_iters, save_interval=args.save_interval, global_batch_size=args.global_batch_size,
    )  # fmt: skip
    print(f"ended at {state.step} with {state.floating_point_operations_so_far}", flush=True)  # noqa: T201


if __name__ == "__main__":
    run_on_host(train)
