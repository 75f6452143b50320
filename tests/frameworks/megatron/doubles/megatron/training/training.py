"""The calls of the training loop, with the arguments and in the order of Megatron-LM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import get_args

GROUPS = ("tp_group", "pp_group", "dp_cp_group", "dp_group", "expt_dp_group")


def setup(model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any, context: dict[str, Any]) -> None:
    args = get_args()
    args.iteration = args.num_floating_point_operations_so_far = 0
    if args.load is not None or args.pretrained_checkpoint is not None:
        args.iteration, args.num_floating_point_operations_so_far = load_checkpoint(
            model,
            optimizer,
            opt_param_scheduler,
            checkpointing_context=context,
            skip_load_to_model_and_opt=False,
            **dict.fromkeys(GROUPS),
            rng_state_key_prefix="",
        )


def save_checkpoint_and_time(
    iteration: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_operations: float,
    context: dict[str, Any],
    *,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
) -> None:
    save_checkpoint(
        iteration,
        model,
        optimizer,
        opt_param_scheduler,
        num_operations,
        context,
        non_persistent_ckpt=non_persistent_ckpt,
        train_data_iterator=train_data_iterator,
        preprocess_common_state_dict_fn=dict,
        **dict.fromkeys(GROUPS),
        rng_state_key_prefix="",
    )


def train(
    step: Callable[[int], None],
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    is_signalled: Callable[[], bool],
) -> None:
    """Trains up to `--train-iters`, and saves at intervals and at a signal."""
    args, context = get_args(), dict[str, Any]()
    setup(model, optimizer, opt_param_scheduler, context)
    saved = model, optimizer, opt_param_scheduler
    while args.iteration < args.train_iters:
        step(args.iteration)
        args.iteration += 1
        args.consumed_train_samples += args.global_batch_size
        args.num_floating_point_operations_so_far += 1000.0
        num_operations = args.num_floating_point_operations_so_far
        if is_signalled():
            save_checkpoint_and_time(args.iteration, *saved, num_operations, context)
            return
        if args.save_interval and args.iteration % args.save_interval == 0:
            save_checkpoint_and_time(args.iteration, *saved, num_operations, context)
        elif args.non_persistent_save_interval and args.iteration % args.non_persistent_save_interval == 0:
            save_checkpoint_and_time(args.iteration, *saved, num_operations, context, non_persistent_ckpt=True)
    if args.iteration % (args.save_interval or 1):
        save_checkpoint_and_time(args.iteration, *saved, args.num_floating_point_operations_so_far, context)
