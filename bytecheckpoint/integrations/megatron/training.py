"""`save_checkpoint` and `load_checkpoint` with the signatures of megatron.training."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import distributed as dist
from torch import nn

from bytecheckpoint import api
from bytecheckpoint.adapters.rank_values.rank_local import RankLocal
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.megatron.folder import (
    METADATA,
    RELEASE,
    TRACKER,
    VERSION,
    FoundIteration,
    ReplacedCheckpoints,
    check_has_positions,
    find,
    name_of,
    non_persistent_root,
)
from bytecheckpoint.integrations.megatron.plain import plain_arguments, with_classes, without_classes
from bytecheckpoint.integrations.shared.agreed_folders import record_together
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.shared.tracked_folder import TrackedFolder
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default
from bytecheckpoint.saving.handle import SaveHandle
from bytecheckpoint.storage.credentials import showable_url

try:
    from megatron.core import parallel_state, rerun_state_machine
    from megatron.core.num_microbatches_calculator import update_num_microbatches
    from megatron.training import checkpointing, ft_integration, training
    from megatron.training.checkpointing import load_checkpoint as load_megatrons_own
    from megatron.training.global_vars import get_args
except ImportError as error:
    missing = missing_framework("megatron", "megatron-core")
    missing.add_note("It needs megatron.training too, which no wheel has: put a checkout of Megatron-LM on PYTHONPATH.")
    raise missing from error

logger = logging.getLogger("bytecheckpoint")

_COUNTS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
"""Arguments that are positions of training, which a resumed run takes from the checkpoint."""
_OF_BRIDGE = {"step", "floating_point_operations_so_far"}
"""Names in the state of training that Megatron-Bridge saves in the place of Megatron's arguments."""
_OF_RUN = "bytecheckpoint "
"""Begin of a key in Megatron's context, before the folder."""


def install(*, options: SaveOptions | None = None, storage_options: dict[str, Any] | None = None) -> None:
    """Lets Megatron-LM's training loop save and load by this library. Call it before `pretrain`.

    Args:
        options: Of all saves: see SaveOptions.
        storage_options: For the fsspec backend, where `--save` and `--load` are URLs; never stored.
    """
    save = partial(save_checkpoint, options=options, storage_options=storage_options)
    load = partial(load_checkpoint, storage_options=storage_options)
    for module in (checkpointing, training):  # training.py has imported both by name
        module.save_checkpoint, module.load_checkpoint = save, load


def save_checkpoint(  # noqa: PLR0917 - Megatron's signature
    iteration: int,
    model: Sequence[nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: dict[str, Any] | None = None,
    *,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    release: bool = False,
    options: SaveOptions | None = None,
    storage_options: dict[str, Any] | None = None,
    **others: Any,
) -> SaveHandle:
    """Saves what training goes on from, with all ranks together, at `iter_<iteration>` in the folder of `--save`.

    Returns the handle of the save: with `--async-save` as soon as training may go on. The tracker file is written when
    the checkpoint is committed. With `--save-retain-interval`, the checkpoint before is then deleted, unless its
    iteration is a multiple of the interval.

    Args:
        iteration: Of the step that ended.
        model: The chunks of this rank, in their wrappers or not.
        optimizer: Of `get_megatron_optimizer`, or None.
        opt_param_scheduler: Megatron's scheduler, or None.
        num_floating_point_operations_so_far: As Megatron counts them.
        checkpointing_context: That of the run, in which the object that deletes old checkpoints in the background is
            kept between saves. Without one, the thread that ends the save waits for the deletions.
        non_persistent_ckpt: Save to the folder of checkpoints of which only the newest is kept.
        train_data_iterator: That of training, for the rerun state, and for loaders that save themselves.
        release: Save at `release` in place of `iter_<iteration>`.
        options: See SaveOptions; their `overwrite` has no effect, since a checkpoint of this name is always replaced.
        storage_options: For the fsspec backend; never stored.
        others: Megatron's other arguments. Some that are not supported are refused; the rest, such as process groups,
            have no effect.

    Raises:
        CheckpointMismatchError: An argument of Megatron asks for what is not supported (`conflict`).
        StorageError: The checkpoint is committed, and the tracker file could not be written; and others of the store.
        CheckpointError: As `bytecheckpoint.save` raises it.
    """
    args, options = get_args(), given_or_default(options, SaveOptions)
    _refuse_unsupported(args, others, kind=args.non_persistent_ckpt_type if non_persistent_ckpt else None)
    root = non_persistent_root(args, args.save) if non_persistent_ckpt else args.save
    folder = TrackedFolder(os.fspath(root), TRACKER, storage_options, options.timeout_s)
    ft_integration.on_checkpointing_start()
    rerun = rerun_state_machine.get_rerun_state_machine().state_dict(
        data_iterator=train_data_iterator, ckpt_format="torch_dist"
    )
    checkpointing.maybe_save_dataloader_state(train_data_iterator, iteration, getattr(args, "dataloader_save", None))
    state: dict[str, Any] = {"model": model}
    if not args.no_save_optim:
        state |= optimizer_state(optimizer, opt_param_scheduler)
    if not args.no_save_rng:
        state["rng"] = random_numbers(by_data_rank=args.data_parallel_random_init)
    if rerun:
        rerun["sharded"] = rerun["sharded"].data
        state["rerun"] = RankLocal(without_classes(rerun))
    described = {
        "iteration": iteration,
        "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
        "checkpoint_version": VERSION,
        "args": plain_arguments(args),
    }
    interval = 0 if non_persistent_ckpt else getattr(args, "save_retain_interval", None)
    replaced = None
    if interval is not None and dist.get_rank() == 0:
        known = checkpointing_context if checkpointing_context is not None else {}
        replaced = known.get(_OF_RUN + root) or ReplacedCheckpoints(folder)
        known[_OF_RUN + root] = replaced
    if interval is not None:
        record_together(folder.decisions, None if replaced is None else replaced.folders, iteration)
    handle = folder.save(
        RELEASE if release else name_of(iteration),
        state,
        tracked_as=RELEASE if release else str(iteration),
        async_save=args.async_save,
        metadata=marked("megatron", {METADATA: described}),
        options=options,
        on_tracked=None if replaced is None else replaced.note,
    )
    if replaced is not None:
        replaced.folders.retire_after(handle, iteration, partial(replaced.going, iteration, interval or 0))
        if checkpointing_context is None:
            handle.add_done_callback(partial(replaced.close, timeout_s=options.timeout_s))
    ft_integration.on_checkpointing_end(is_async_finalization=False)
    return handle


def load_checkpoint(  # noqa: PLR0917 - Megatron's signature
    ddp_model: Sequence[nn.Module],
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,  # noqa: FBT001, FBT002 - Megatron's signature
    checkpointing_context: dict[str, Any] | None = None,
    *,
    options: LoadOptions | None = None,
    storage_options: dict[str, Any] | None = None,
    **others: Any,
) -> tuple[int, float]:
    """Fills what training goes on from, in place and with all ranks together, from the folder of `--load`.

    Any number of ranks along any dimension loads what any other saved. Where Megatron itself wrote the checkpoint that
    is to be loaded, Megatron's own function loads it.

    Args:
        ddp_model: The chunks of this rank, in their wrappers or not.
        optimizer: Of `get_megatron_optimizer`, or None.
        opt_param_scheduler: Megatron's scheduler, or None.
        load_arg: The argument of Megatron that has the folder.
        strict: Raise for keys that are missing on either side.
        checkpointing_context: Only used by Megatron's own function.
        options: See LoadOptions.
        storage_options: For the fsspec backend.
        others: Megatron's other arguments. Some that are not supported are refused; the rest, such as process groups,
            are only used by Megatron's own function.

    Returns:
        The iteration to go on from, and the number of floating-point operations of the checkpoint; (0, 0) where there
        is nothing to load. The iteration is that of `--override-ckpt-iteration` if given, else 0 for a release and with
        `--finetune`, else that of the checkpoint.

    Raises:
        CheckpointNotFoundError: The tracker file or `--ckpt-step` names what is not committed, or nothing is there and
            `--exit-on-missing-checkpoint` or `--pretrained-checkpoint` was given.
        CheckpointMismatchError: The checkpoint does not fit or does not say where training was, or an argument of
            Megatron asks for what is not supported; model and optimizer are unchanged.
        CheckpointError: As `bytecheckpoint.load` raises it.
        AssertionError: The arguments are those of another model; model and optimizer are unchanged.
    """
    args, options = get_args(), given_or_default(options, LoadOptions)
    _refuse_unsupported(args, others, kind=args.non_persistent_ckpt_type)
    first = TrackedFolder("", TRACKER, storage_options, options.timeout_s)
    found = first.decide_together(lambda: find(args, getattr(args, load_arg), first), FoundIteration)
    if found.is_of_megatron:
        own = {"load_arg": load_arg, "strict": strict, "checkpointing_context": checkpointing_context, **others}
        iteration, num_operations = load_megatrons_own(ddp_model, optimizer, opt_param_scheduler, **own)
        return iteration, num_operations
    if not found.path:
        return 0, 0
    args.finetune = args.finetune or found.is_pretrained
    is_resumed = not (args.finetune or found.name == RELEASE)
    is_trained = optimizer is not None or opt_param_scheduler is not None
    if is_resumed and is_trained and getattr(args, "override_ckpt_iteration", None) is None:
        check_has_positions(found, "pass --finetune to do so, or --override-ckpt-iteration")
    state: dict[str, Any] = {"model": ddp_model}
    with_optimizer = is_resumed and not args.no_load_optim
    if with_optimizer:
        state |= optimizer_state(optimizer, opt_param_scheduler)
    if is_resumed and not args.no_load_rng and found.has_rng:
        state["rng"] = random_numbers(by_data_rank=args.data_parallel_random_init)
    if is_resumed and found.has_rerun and _has_places_of(args, found.args):
        state["rerun"] = _RerunState()
    checkpointing.set_checkpoint_version(found.checkpoint_version)
    if found.args and not args.finetune:
        _check_arguments(found.args)
    # Weights that an optimizer was saved with are in fp32, and a model alone may have them in another precision.
    api.load(
        found.path, state, strict=strict, cast=not with_optimizer, storage_options=storage_options, options=options
    )
    if not with_optimizer and has_parameters(optimizer) and (args.fp16 or args.bf16):
        optimizer.reload_model_params()
    iteration = found.iteration if is_resumed else 0
    if found.args and not args.finetune:
        _take_positions(args, found.args)
    if getattr(args, "override_ckpt_iteration", None) is not None:
        iteration = args.override_ckpt_iteration
        args.consumed_train_samples, args.skipped_train_samples = iteration * args.global_batch_size, 0
        update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)
    if with_optimizer and getattr(args, "override_opt_param_scheduler", False):
        _override_rates(args, optimizer, opt_param_scheduler)
    if hasattr(checkpointing, "set_loaded_iteration"):  # not in releases of 2025
        checkpointing.set_loaded_iteration(found.iteration)
    if iteration > 0:
        ft_integration.on_checkpoint_loaded(is_local_chkpt=False)
    logger.info("loaded %s at iteration %d", showable_url(found.path), iteration)
    return iteration, found.num_floating_point_operations_so_far


class _RerunState:
    """Target of a load for the state machine by which Megatron repeats a step that looked wrong."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        machine = rerun_state_machine.get_rerun_state_machine()
        machine.load_state_dict(with_classes(state_dict, rerun_state_machine))


def optimizer_state(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Returns optimizer and scheduler, as far as the run has them, under their names in a checkpoint."""
    state = {"optimizer": optimizer} if has_parameters(optimizer) else {}
    return state | ({"scheduler": scheduler} if scheduler is not None else {})


def has_parameters(optimizer: Any) -> bool:
    """Returns False for None and for the optimizer of a rank without parameters."""
    return optimizer is not None and not getattr(optimizer, "is_stub_optimizer", False)


def random_numbers(*, by_data_rank: bool) -> RngState:
    """Returns the generators, to save or to load. Those outside of Megatron's tracker are the same in all ranks of a
    pipeline stage or, with `by_data_rank`, in all ranks of a stage that have the same data-parallel rank.
    """
    at = {"pp": parallel_state.get_pipeline_model_parallel_rank()}
    if by_data_rank:
        at["dp"] = parallel_state.get_data_parallel_rank()
    return RngState(elastic="keep", at=at)


def _has_places_of(args: Namespace, saved: dict[str, Any]) -> bool:
    """Returns True if the sizes of the world and of tensor, pipeline and data parallelism are those of the run that
    saved.
    """
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    return saved.get("world_size") == dist.get_world_size() and all(
        saved.get(name) == getattr(args, name, None) for name in sizes
    )


def _check_arguments(saved: dict[str, Any]) -> None:
    """Compares the arguments of the model with those of the checkpoint, unless Megatron-Bridge saved it, and raises
    AssertionError if they differ. Megatron's comparison depends on the version that was set last.
    """
    if not saved.keys() >= _OF_BRIDGE:  # which has no arguments of Megatron
        checkpointing.check_checkpoint_args(Namespace(**saved))


def _take_positions(args: Namespace, saved: dict[str, Any]) -> None:
    """Copies the positions of training from the checkpoint to `args`."""
    for name in _COUNTS:
        setattr(args, name, saved.get(name, 0))
    update_num_microbatches(consumed_samples=args.consumed_train_samples, verbose=True)


def _override_rates(args: Namespace, optimizer: Any, scheduler: Any) -> None:
    """Puts the run's own bounds of learning rates in the place of the loaded ones, and lets the scheduler compute the
    rates anew for the samples that were consumed.
    """
    for group in optimizer.param_groups if has_parameters(optimizer) and scheduler is not None else []:
        prefix = "decoupled_" if group.get("is_decoupled_lr", False) else ""
        bounds = {"max_lr": f"{prefix}lr", "min_lr": f"{prefix}min_lr"}
        group.update({key: rate for key, name in bounds.items() if (rate := getattr(args, name, None)) is not None})
    if scheduler is not None:
        scheduler.num_steps = args.consumed_train_samples
        scheduler.step(increment=0)


def _refuse_unsupported(args: Namespace, others: dict[str, Any], *, kind: str | None) -> None:
    """Raises CheckpointMismatchError (conflict) for arguments of Megatron that these functions do not follow."""
    ranks = [name for name in ("pipeline_rank", "expert_rank", "tensor_rank") if others.get(name) is not None]
    reasons = {
        f"--non-persistent-ckpt-type {kind}": (
            kind not in {None, "global"},
            "use SaveOptions(local_stage=...) with install",
        ),
        "--freeze-all-layers": (getattr(args, "freeze_all_layers", False), "leave install out"),
        "rng_state_key_prefix": (bool(others.get("rng_state_key_prefix")), "leave install out of runs on many grids"),
        ", ".join(ranks): (bool(ranks), "convert checkpoints with `bcp convert`"),
    }
    for name, (is_given, advice) in reasons.items():
        if is_given:
            raise CheckpointMismatchError(
                f"{name} is not supported; nothing was saved or loaded: {advice}", kind="conflict"
            )
