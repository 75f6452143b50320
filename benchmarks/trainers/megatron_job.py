"""Saves of a GPT model of megatron-core and its distributed optimizer by `megatron.core.dist_checkpointing`, and by
this library's functions for Megatron-LM's loop. megatron.training is in no wheel: the tests' stand-in makes its calls,
and what its `save_checkpoint` calls in megatron-core is called here.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers.digests import digest
from trainers.meter import Meter, by_age
from trainers.options import save_options

TESTS = Path(__file__).parents[2] / "tests"
sys.path += [str(TESTS), str(TESTS / "frameworks" / "megatron" / "doubles")]

from frameworks.megatron.train_gpt import Training, parse_arguments, tracker_on_host  # noqa: E402
from frameworks.real_megatron import Built, Layout, held_by, on_host, sharded_parameters  # noqa: E402
from megatron.core import dist_checkpointing, num_microbatches_calculator, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.serialization import (  # noqa: E402
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper  # noqa: E402
from megatron.core.utils import unwrap_model  # noqa: E402
from megatron.training import training  # noqa: E402
from megatron.training.global_vars import get_args, set_args  # noqa: E402

from bytecheckpoint.integrations import megatron  # noqa: E402

DISTRIBUTION = "megatron-core"
OWN = ("own", "own-async")
CANDIDATES = {
    "own": "megatron-core, dist_checkpointing",
    "own-async": "megatron-core, dist_checkpointing, async",
    "bcp": "bytecheckpoint, save_checkpoint",
    "bcp-async": "bytecheckpoint, save_checkpoint, async",
    "bcp-lazy-async": "bytecheckpoint, save_checkpoint, async, lazy",
}
HIDDEN = 512
GLOBAL_BATCH = 12
"""For 1, 2 and 3 ranks."""
BYTES_A_LAYER = 4 * 16 * HIDDEN * HIDDEN


def checkpoints(folder: Path) -> list[Path]:
    return [path for path in by_age(folder) if path.is_dir()]


def train(candidate: str, folder: Path, meter: Meter, *, mb: float, num_steps: int, save_every: int) -> None:
    queue, handles = AsyncCallsQueue(), []
    with training_of(candidate, folder, mb=mb, num_steps=num_steps, save_every=save_every) as run:
        if candidate.startswith("own"):
            save = meter.timed(partial(save_by_megatron_core, queue))
        else:
            megatron.install(options=save_options(candidate))
            save = meter.timed(noted(training.save_checkpoint, handles))
        training.save_checkpoint = partial(unless_at_end, save)
        meter.holds(partial(digests_of, run))

        def step(iteration: int) -> None:
            run.step(iteration)
            meter.step()
            queue.maybe_finalize_async_calls()

        training.train(step, run.model, run.optimizer, run.scheduler, lambda: False)
        queue.maybe_finalize_async_calls(blocking=True)
        for handle in handles:
            handle.result()
    dist.barrier()


def resume(candidate: str, folder: Path, *, mb: float, num_steps: int) -> dict[str, str]:
    with training_of(candidate, folder, mb=mb, num_steps=num_steps, save_every=num_steps) as run:
        if candidate.startswith("own"):
            load_by_megatron_core(run, checkpoints(folder)[-1])
        else:
            megatron.install()
            run.args.load = run.args.save
            training.setup(run.model, run.optimizer, run.scheduler, {})
        return digests_of(run)


@contextmanager
def training_of(candidate: str, folder: Path, *, mb: float, num_steps: int, save_every: int) -> Iterator[Training]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    args = arguments(folder, mb=mb, num_steps=num_steps, save_every=save_every)
    args.async_save = candidate.endswith("async")
    set_args(args)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.global_batch_size // args.world_size, args.world_size
    )
    enter_layout()
    with tracker_on_host():
        yield Training(args)


@cache
def enter_layout() -> ExitStack:
    """Makes Megatron's groups, once in a process: each of gloo's has threads that look for work as long as it lives."""
    stack = ExitStack()
    stack.enter_context(on_host(Layout()))
    return stack


def digests_of(run: Training) -> dict[str, str]:
    """Returns those of parameters, and of masters and optimizer states, of which each rank holds a part."""
    built = Built(run.model, run.optimizer)
    parts = {
        id(parameter): (elements, {"master": held, **inner.state[held]})
        for parameter, _, held, elements, inner in held_by(built)
    }
    found = {}
    for parameter, sharded in sharded_parameters(built):
        elements, states = parts.get(id(parameter), (slice(0), {}))
        found[sharded.key] = digest(parameter)
        for key in ("master", "exp_avg", "exp_avg_sq"):
            whole = torch.zeros(parameter.numel())
            if key in states:
                whole[elements] = states[key].detach().reshape(-1)
            dist.all_reduce(whole)
            found[f"{sharded.key}, {key}"] = digest(whole)
        step = torch.tensor(float(states.get("step", 0)))
        dist.all_reduce(step, dist.ReduceOp.MAX)
        found[f"{sharded.key}, step"] = digest(step)
    return found


def arguments(folder: Path, *, mb: float, num_steps: int, save_every: int) -> Namespace:
    """Returns Megatron's, for a model of so many MB in float32 that saves at each `save_every`."""
    num_layers = max(1, round(mb * 1e6 / BYTES_A_LAYER))
    given = {"train-iters": num_steps, "save-interval": save_every, "num-layers": num_layers, "hidden-size": HIDDEN}
    given |= {"global-batch-size": GLOBAL_BATCH}
    args = parse_arguments(
        ["--save", str(folder), *(word for name, n in given.items() for word in (f"--{name}", f"{n}"))]
    )
    args.bf16, args.params_dtype = False, torch.float32
    return args


def unless_at_end(save: Callable[..., None], iteration: int, *arguments: Any, **named: Any) -> None:
    """Saves, but for the checkpoint that the loop ends with: no steps follow it."""
    if iteration < get_args().train_iters:
        save(iteration, *arguments, **named)


def noted(save: Callable[..., Any], handles: list[Any]) -> Callable[..., None]:
    def call(*arguments: Any, **named: Any) -> None:
        handles.append(save(*arguments, **named))

    return call


def save_by_megatron_core(  # noqa: PLR0917 - Megatron's order
    queue: AsyncCallsQueue,
    iteration: int,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    num_operations: float,
    context: dict[str, Any],
    **_others: Any,
) -> None:
    """Saves in the format torch_dist, each rank a part of what data-parallel ranks share, as Megatron-LM's defaults."""
    args, metadata = get_args(), {"distrib_optim_sharding_type": "dp_reshardable"}
    path = Path(args.save) / f"iter_{iteration:07d}"
    if args.rank == 0:
        path.mkdir()
    (chunk,) = unwrap_model(model)
    weights = chunk.sharded_state_dict(metadata=metadata)
    rng = ShardedObject("rng_state", [torch.get_rng_state()], (1, 1), (0, 0), replica_id=args.rank)
    state = {
        "args": args,
        "iteration": iteration,
        "num_floating_point_operations_so_far": num_operations,
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
        "opt_param_scheduler": scheduler.state_dict(),
        "rng_state": [rng],
    }
    if "strategy" not in context:  # kept from save to save, as in Megatron-LM
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        context["strategy"] = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    dist.barrier()
    request = dist_checkpointing.save(
        state,
        str(path),
        context["strategy"],
        async_sharded_save=args.async_save,
        preprocess_common_before_consistancy_check=without_rank,
        content_metadata=metadata,
    )
    if request is not None:
        queue.schedule_async_request(request)


def without_rank(common: dict[str, Any]) -> dict[str, Any]:
    """Returns what ranks have in common, which is compared."""
    kept = vars(common["args"]).items()
    return {**common, "args": {name: value for name, value in kept if name != "rank"}}


def load_by_megatron_core(run: Training, path: Path) -> None:
    """Fills what training goes on from, as Megatron-LM's `load_checkpoint` does."""
    (chunk,) = unwrap_model(run.model)
    for owner in run.optimizer.chained_optimizers:  # without Apex it takes no optimizer that has made no step
        owner._init_optimizer_states_with_dummy_values()
    metadata = dist_checkpointing.load_content_metadata(str(path))
    weights = chunk.sharded_state_dict(metadata=metadata)
    state = {
        "model": weights,
        "optimizer": run.optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata),
        "rng_state": [ShardedObject("rng_state", [torch.get_rng_state()], (1, 1), (0, 0), replica_id=run.args.rank)],
    }
    loaded = dist_checkpointing.load(state, str(path), get_default_load_sharded_strategy(str(path)))
    chunk.load_state_dict(loaded["model"])
    with torch.no_grad():  # masters of fp32 are views of parameters
        run.optimizer.load_state_dict(loaded["optimizer"])
    # Adam of Apex and Transformer Engine counts steps in its groups, which were loaded. torch's counts them by
    # parameter, and megatron-core 0.16 then puts the count from before the load over the one that it has loaded.
    num_steps = loaded["optimizer"]["optimizer"]["param_groups"][0]["step"]
    for owner in run.optimizer.chained_optimizers:
        for state in owner.optimizer.state.values():
            state["step"].fill_(num_steps)
    run.scheduler.load_state_dict(loaded["opt_param_scheduler"])
