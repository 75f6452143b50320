"""Trains a GPT model of megatron-core, with dropout, on the ranks of torchrun, by the calls of Megatron-LM's loop.
examples/megatron_install.py runs it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist

warnings.simplefilter("ignore")  # Megatron warns of what is not installed
sys.path.insert(0, str(Path(__file__).parents[2]))

from frameworks.real_megatron import HEADS, LAYERS, VOCABULARY, WIDTH, Layout, build, on_host  # noqa: E402

SAMPLES, LENGTH = 64, 8
SIZES = {"train-iters": 6, "save-interval": 2, "global-batch-size": 8, "num-layers": LAYERS, "hidden-size": WIDTH}


def parse_arguments(given: Sequence[str] | None = None) -> Namespace:
    """Names and defaults of Megatron's arguments, and those of this program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--pretrained-checkpoint")
    parser.add_argument("--non-persistent-ckpt-type")
    parser.add_argument("--non-persistent-global-ckpt-dir")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("ckpt-step", "save-retain-interval", "non-persistent-save-interval", "override-ckpt-iteration"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("tensor", "pipeline"):
        parser.add_argument(f"--{name}-model-parallel-size", type=int, default=1)
    for name in ("async-save", "finetune", "no-load-optim", "no-load-rng", "no-save-optim", "no-save-rng"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("exit-on-missing-checkpoint", "data-parallel-random-init", "override-opt-param-scheduler"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--min-lr", type=float, default=0.0)
    args = parser.parse_args(given)
    args.bf16, args.fp16, args.use_dist_ckpt = True, False, True
    args.params_dtype, args.rank, args.world_size = torch.bfloat16, dist.get_rank(), dist.get_world_size()
    args.num_attention_heads = HEADS
    args.data_parallel_size = args.world_size // args.tensor_model_parallel_size // args.pipeline_model_parallel_size
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    return args


@contextmanager
def tracker_on_host() -> Iterator[None]:
    """Megatron's tracker of random numbers, over torch's generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get(*_: object, **__: object) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *_: object, **__: object) -> None:
        torch.set_rng_state(state)

    with ExitStack() as stack:
        for module, name, on_host in (
            (megatron_random, "_get_cuda_rng_state", get),
            (megatron_random, "_set_cuda_rng_state", put),
            (torch.cuda, "get_rng_state", get),
            (torch.cuda, "set_rng_state", put),
            (torch.cuda, "manual_seed", torch.manual_seed),
        ):
            stack.enter_context(mock.patch.object(module, name, on_host))
        yield


class Training:
    """Model, optimizer and scheduler, and one step of them."""

    def __init__(self, args: Namespace) -> None:
        from megatron.core import parallel_state
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel import random as megatron_random

        self.args = args
        self.received: list[int] = []
        torch.manual_seed(3)
        megatron_random.model_parallel_cuda_manual_seed(5)
        layout = Layout(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, is_half=args.bf16)
        built = build(layout, num_layers=args.num_layers, width=args.hidden_size)
        self.model, self.optimizer = built.chunks, built.optimizer
        for group in self.optimizer.param_groups:
            group["max_lr"], group["min_lr"] = args.lr, args.min_lr
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, args.lr, args.min_lr, 16, 400, "cosine", 0.0, 0.1, 400, "linear",
            override_opt_param_scheduler=args.override_opt_param_scheduler,
        )  # fmt: skip
        self.rank, self.size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        generator = torch.Generator().manual_seed(0)
        self.samples = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)

    def batch(self) -> torch.Tensor:
        """The part of this rank in the next shuffled samples, by the number of those that were consumed."""
        consumed, global_batch = self.args.consumed_train_samples, self.args.global_batch_size
        epoch, offset = divmod(consumed, SAMPLES)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        return self.samples[order[offset : offset + global_batch][self.rank :: self.size]]

    def is_signalled(self) -> bool:
        """True on all ranks if one has received a signal."""
        stopping = torch.tensor(len(self.received))
        dist.all_reduce(stopping)
        return bool(stopping)

    def step(self, iteration: int) -> None:
        (chunk,) = self.model
        tokens = self.batch()
        chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        places = torch.arange(LENGTH).expand(len(tokens), -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        loss = chunk(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        chunk.finish_grad_sync()
        self.optimizer.step()
        self.scheduler.step(increment=self.args.global_batch_size)
        print(f"iteration {iteration + 1}: loss {loss.item()!r}", flush=True)  # noqa: T201


def run_on_host(train: Callable[[Training], None]) -> None:
    """Lets `train` train what the arguments of the program say."""
    dist.init_process_group("gloo")
    args = parse_arguments()
    from megatron.core import num_microbatches_calculator
    from megatron.training.global_vars import set_args

    set_args(args)
    with on_host(Layout(args.tensor_model_parallel_size, args.pipeline_model_parallel_size)), tracker_on_host():
        num_microbatches_calculator.init_num_microbatches_calculator(
            args.rank, None, args.global_batch_size, args.global_batch_size // args.data_parallel_size,
            args.data_parallel_size,
        )  # fmt: skip
        run = Training(args)
        signal.signal(signal.SIGTERM, lambda number, _: run.received.append(number))
        train(run)


def train_by_megatron(run: Training) -> None:
    from megatron.training import training

    args = run.args
    training.train(run.step, run.model, run.optimizer, run.scheduler, run.is_signalled)
    print(f"ended at {args.iteration} with {args.num_floating_point_operations_so_far}", flush=True)  # noqa: T201


if __name__ == "__main__":
    run_on_host(train_by_megatron)
