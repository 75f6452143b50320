"""The mixin for the Trainer of transformers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from bytecheckpoint import api
from bytecheckpoint.adapters.data.loader_state import DataLoaderState, Elastic
from bytecheckpoint.adapters.rank_values.rng_state import RngState
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.info import LoadReport
from bytecheckpoint.integrations.shared.adapter_parts import adapters_of, has_adapters
from bytecheckpoint.integrations.shared.agreed_stop import AgreedStop
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.integrations.transformers.folders import (
    Resume,
    find_given,
    find_newest,
    find_record,
    put_trainer_state,
)
from bytecheckpoint.integrations.transformers.uncalled_saves import warn_of_saves
from bytecheckpoint.manager.agreement.decisions import Decisions
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.storage.credentials import showable_url
from bytecheckpoint.storage.open_store import is_plain_path

try:
    from transformers import Trainer
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

    from bytecheckpoint.integrations.transformers.saves import Limit, TrainerSaves, beside_files
    from bytecheckpoint.integrations.transformers.train_loader import PassOrder, RestOfPass, train_loader_state
except ImportError as error:
    raise missing_framework("transformers", "transformers[torch] >= 5.23") from error

logger = logging.getLogger("bytecheckpoint")


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Returns the path of the checkpoint of a run that was committed last, for `resume_from_checkpoint`; None if there
    is none. A warning then names unfinished checkpoints and those that the Trainer itself wrote, if there are any.

    Raises what `bytecheckpoint.open` raises if all committed checkpoints are damaged; otherwise skips damaged ones.
    """
    found = find_newest(os.fspath(output_dir))
    if found.others:
        logger.warning("%s", found.refusal)
    return found.path or None


class BcpTrainerMixin(Trainer):
    """Makes a Trainer save and load with this library: `class Mine(BcpTrainerMixin, Theirs)`, where `Theirs` is the
    Trainer or any subclass of it.
    """

    bcp_async_save: bool = True
    """Training goes on while a checkpoint is written."""
    bcp_options: SaveOptions = SaveOptions()
    """Options of each save; an existing checkpoint of the same step is always replaced. Loads have their timeout_s."""
    bcp_save_base: bool = False
    """With PEFT, the frozen base model is saved as well."""
    bcp_elastic: Elastic | None = None
    """Way to load the state of a train loader on another number of ranks, see DataLoaderState. None means `exact` for
    loaders of streams; for others it means `same`, which refuses another number."""
    bcp_signals: Sequence[str] = ("SIGTERM",)
    """Signals on which training saves and ends, on any rank."""
    bcp_stop_reason: str = ""
    """The signal that ended the newest `train`, or the reason given to `bcp_request_stop`; empty if none did."""

    _bcp_stop: AgreedStop | None = None
    """None outside of `train`."""
    _bcp_saves: TrainerSaves | None = None
    _bcp_rest: RestOfPass | None = None
    _bcp_is_in_place = False
    """True from the load of a train loader's state until the first pass over that loader."""
    _bcp_resume = Resume()
    _bcp_report: LoadReport | None = None
    _bcp_data: DataLoaderState | None = None
    """State of the train loader; None if that has no state."""
    _bcp_order: PassOrder
    _bcp_is_in_pass = False
    """True in a pass that was resumed after its first batch."""
    _bcp_steps_in_pass = 0
    """Batches that the Trainer takes for a pass over a train loader without a length; 0 if the loader has one."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001  as the Trainer has it
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Trains as the Trainer does. Returns once all checkpoints are committed, and raises the error of one that
        failed.

        Args:
            resume_from_checkpoint: True for the checkpoint in `output_dir` that was committed last, or the path of one.
            args: As for the Trainer.
            kwargs: As for the Trainer.

        Raises:
            ValueError: `True`, and nothing is committed there.
            CheckpointNotFoundError: The path holds no complete checkpoint; no other one is taken.
            CheckpointError: As `bytecheckpoint.save` and `bytecheckpoint.load` raise it.
        """
        timeout_s = self.bcp_options.timeout_s
        self._bcp_end_earlier()
        self._bcp_resume = self._bcp_find(resume_from_checkpoint)
        self._bcp_report, self._bcp_rest, self._bcp_is_in_place, self.bcp_stop_reason = None, None, False, ""
        self._bcp_stop = AgreedStop(self.args.output_dir, signals=self.bcp_signals, timeout_s=timeout_s)
        try:
            return super().train(self._bcp_resume.path or None, *args, **kwargs)
        finally:
            self._bcp_stop.close()
            self._bcp_stop = None

    def bcp_request_stop(self, reason: str) -> None:
        """Requests that training saves and ends after the step that all ranks agree on. A call on any one rank, from
        any thread, is enough.

        Raises RuntimeError outside of `train`.
        """
        if self._bcp_stop is None:
            raise RuntimeError("bcp_request_stop is for a callback or a thread while train() runs; it does not run")
        self._bcp_stop.request(reason)

    def _bcp_end_earlier(self) -> None:
        """Waits for the last save and the deletions, ends their thread, and logs the error of that save. `train` also
        calls this before it chooses a checkpoint: after an exception, a save may still commit, and a deletion may
        remove the chosen one.
        """
        saves, self._bcp_saves = self._bcp_saves, None
        if saves is not None:
            try:
                saves.finish()
            except CheckpointError:
                logger.exception("the last save of the training before failed")
            finally:
                saves.close()

    def _bcp_find(self, wanted: str | bool | None) -> Resume:  # noqa: FBT001  as for train
        """Returns on all ranks the checkpoint that rank 0 finds, and makes sure that it has its `trainer_state.json`;
        an empty Resume for a fresh start. Raises ValueError for True if none is committed.
        """

        def find() -> Resume:
            if wanted is None or wanted is False:
                return Resume()
            found = find_newest(self.args.output_dir) if wanted is True else find_given(os.fspath(wanted))
            if found.record is None:
                return found
            put_trainer_state(found.path, found.record)
            return Resume(found.path, found.record.without_state())

        found = self._bcp_decide_together("looking for a checkpoint", find)
        if found.refusal:
            raise ValueError(found.refusal)
        return found

    def _bcp_decide_together(self, doing: str, find: Callable[[], Resume]) -> Resume:
        decisions = Decisions(None, self.args.output_dir, timeout_s=self.bcp_options.timeout_s)
        return decisions.decide_together(doing, find, Resume)

    def _validate_args(self) -> None:
        super()._validate_args()
        if self.args.push_to_hub:
            raise ValueError(
                "push_to_hub=True uploads each checkpoint as the Trainer writes it, which BcpTrainerMixin does not: "
                "leave it out, and call trainer.push_to_hub() after train(), which uploads the final model"
            )
        if not is_plain_path(self.args.output_dir):
            raise ValueError(
                f"output_dir is the URL {showable_url(self.args.output_dir)}, and the Trainer keeps its folders on a "
                "disk; nothing was written: give a folder that all ranks share"
            )
        if self.is_deepspeed_enabled:
            raise ValueError(
                "BcpTrainerMixin does not take DeepSpeed under the Trainer: use FSDP2, or train with DeepSpeed's own "
                "loop and bytecheckpoint.integrations.deepspeed"
            )
        # The handler of this option would save on the rank that got the signal, without the others. AgreedStop does
        # the work of that handler.
        self.args.enable_jit_checkpoint = False
        self._bcp_order = PassOrder()
        if self.args.process_index == 0:
            mro = type(self).__mro__
            warn_of_saves(mro[mro.index(BcpTrainerMixin) + 1 : mro.index(Trainer)])

    # ---- Saving

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        stop = self._bcp_stop
        is_first = not self.bcp_stop_reason
        if stop is not None and stop.end_step():
            self.bcp_stop_reason = stop.reason
            if is_first:
                logger.info("training stops after step %d: %s", self.state.global_step, stop.reason)
            if self.control.should_evaluate:
                logger.warning("step %d is not evaluated, because training stops", self.state.global_step)
            self.control.should_evaluate, self.control.should_training_stop = False, True
            self.control.should_save = is_first and not self._bcp_is_saved()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _bcp_is_saved(self) -> bool:
        """Returns True if the newest save is of the current step."""
        newest = self._bcp_saves.newest_path if self._bcp_saves is not None else ""
        return Path(newest).name == f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        del model  # self.model has the names of a model that is not wrapped
        run_dir = self._get_output_dir(trial=trial)
        saves = self._bcp_saves_in(run_dir)
        try:
            saves.settle()
        except CheckpointError:
            if not self.bcp_stop_reason:
                raise
            logger.exception("an earlier save failed; the one before the stop is made all the same")
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._bcp_note_best(saves, run_dir)
        adapters_only = self._bcp_saves_adapters_only()
        saves.begin(
            str(Path(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")),
            self._bcp_state(adapters_only=adapters_only, model_only=self.args.save_only_model),
            files=partial(beside_files, self, steps_in_pass=self._bcp_steps_in_pass),
            adapters_only=adapters_only,
            limit=Limit(self.args.save_total_limit, self.state.best_model_checkpoint),
            async_save=self.bcp_async_save and not self.bcp_stop_reason,
            options=self.bcp_options,
        )

    def _bcp_saves_in(self, run_dir: str) -> TrainerSaves:
        if self._bcp_saves is None:
            resumed, timeout_s = self._bcp_resume.path, self.bcp_options.timeout_s
            self._bcp_saves = TrainerSaves(run_dir, resumed=resumed, timeout_s=timeout_s)
        return self._bcp_saves

    def _bcp_saves_adapters_only(self) -> bool:
        if self.bcp_save_base or not has_adapters(self.model):
            return False
        named = set(map(id, adapters_of(self.model).parameters()))
        in_optimizer = (each for group in self.optimizer.param_groups for each in group["params"])
        if self.args.save_only_model or all(id(each) in named for each in in_optimizer):
            return True
        logger.warning(
            "the whole model is saved, because its optimizer also has frozen parameters: make it of those that require "
            "gradients to save adapters alone"
        )
        return False

    def _bcp_state(self, *, adapters_only: bool, model_only: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"model": adapters_of(self.model) if adapters_only else self.model}
        if not model_only:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's optimizer holds it
            state |= {"optimizer": optimizer, "scheduler": self.lr_scheduler, "rng": RngState(elastic="keep")}
            scaler = getattr(self.accelerator, "scaler", None)
            if scaler is not None:
                state["extra_state"] = {"scaler": scaler}
            state |= {"order": self._bcp_order} if self._bcp_data is None else {"data": self._bcp_data}
        return state

    def _bcp_note_best(self, saves: TrainerSaves, run_dir: str) -> None:
        """Sets `best_model_checkpoint` of the Trainer's state to the folder of the best step, if that is the step of
        this save, or an earlier step whose checkpoint is committed or was the last to be saved.
        """
        step = self.state.best_global_step
        if not step:
            return
        path = str(Path(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}"))
        is_new = path != self.state.best_model_checkpoint
        if step == self.state.global_step or (is_new and saves.has_saved(path)):
            self.state.best_model_checkpoint = path

    # ---- Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads the model, except where `train` resumes from a checkpoint of the mixin: there the model is loaded
        later, together with the optimizer.
        """
        if self._bcp_stop is not None and self._bcp_resume.record is not None:
            return
        if not self._bcp_load_model(resume_from_checkpoint, model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._bcp_load_model(self.state.best_model_checkpoint, None):
            super()._load_best_model()  # the best step was saved before the mixin was used

    def _bcp_load_model(self, path: str, model: nn.Module | None) -> bool:
        """Loads the model, on all ranks, and returns True; returns False, and loads nothing, if no checkpoint of this
        library is committed there. Raises as `find_record` for one that the mixin did not save.
        """
        record = self._bcp_decide_together("looking at a checkpoint", partial(find_record, path)).record
        if record is None:
            return False
        model = self.model if model is None else model
        state = {"model": adapters_of(model) if record.adapters_only else model}
        api.load(path, state, step=None, options=LoadOptions(timeout_s=self.bcp_options.timeout_s))
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads all that a checkpoint of the mixin has, the model too: model, optimizer and scheduler all exist by now
        in every setting. Without such a checkpoint, does what the Trainer does.
        """
        record = self._bcp_resume.record
        if checkpoint is None or record is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        wanted = record.part_of(self._bcp_state(adapters_only=record.adapters_only, model_only=False))
        options = LoadOptions(timeout_s=self.bcp_options.timeout_s)
        self._bcp_report = api.load(checkpoint, wanted, step=None, options=options)
        self._bcp_is_in_place = "data" in wanted

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Returns the numbers of passes that have ended, and of batches to skip in the next one. The Trainer itself
        counts all passes over a loader without a length as one.
        """
        passes, num_taken = super()._init_training_state(*args, **kwargs)
        record = self._bcp_resume.record
        if record is not None and record.position is not None:
            passes, num_taken = record.position
        return passes, 0 if self.args.ignore_data_skip else num_taken

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Finds the state of the train loader, if it has one, then prepares as the Trainer does: the load in that call
        sets the position of the loader, too.
        """
        self._bcp_data = train_loader_state(
            train_dataloader, rank=self.args.process_index, size=self.args.world_size, elastic=self.bcp_elastic
        )
        self._bcp_order = PassOrder()
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, *args, **kwargs)
        self._bcp_order.watch(loader)
        return model, loader

    def _run_epoch(self, *, train_dataloader: Any, steps_trained_in_current_epoch: int, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # else the Trainer would take one more
            self.control.should_training_stop = True
            return
        self._bcp_steps_in_pass = 0 if has_length(train_dataloader) else kwargs["steps_in_epoch"]
        if hasattr(train_dataloader, "set_epoch"):  # a loader that skips, with rank 0 reading for all, passes none on
            train_dataloader.set_epoch(kwargs["epoch"])
        if self._bcp_data is not None and self._bcp_is_in_place:
            self._bcp_is_in_place = False
            num_to_skip = 0 if self.args.ignore_data_skip else steps_trained_in_current_epoch
            self._bcp_rest = RestOfPass(self._bcp_data, num_to_skip=num_to_skip)
            train_dataloader = self._bcp_rest.as_loader()
        is_resumed = kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]
        self._bcp_is_in_pass = is_resumed and steps_trained_in_current_epoch > 0
        if self._bcp_is_in_pass and self._bcp_report is not None and self._bcp_data is None:
            self._bcp_order.restore(steps_trained_in_current_epoch, self._bcp_restore_rng)
        else:
            self._bcp_order.note()
        super()._run_epoch(
            train_dataloader=train_dataloader,
            steps_trained_in_current_epoch=steps_trained_in_current_epoch,
            **kwargs,
        )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Sets the loaded random state again: the loader has drawn from it. Without one, does what the Trainer does."""
        if self._bcp_report is None:
            super()._load_rng_state(checkpoint)
        elif self._bcp_is_in_pass and self._bcp_data is None:
            self._bcp_order.put_back()
        elif self._bcp_restore_rng is not None:
            self._bcp_restore_rng()
            if self._bcp_rest is not None:
                self._bcp_rest.draw_as_begun()
        if not self._bcp_is_in_pass:
            self._bcp_order.note()

    @property
    def _bcp_restore_rng(self) -> Callable[[], object] | None:
        """The function that sets the random state to the loaded one; None if none was loaded."""
        record, report = self._bcp_resume.record, self._bcp_report
        return report.restore_rng if report is not None and record is not None and "rng" in record.entries else None

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        if self._bcp_saves is not None:
            self._bcp_saves.finish()
        # The Trainer's own deletion leaves half a checkpoint when it is killed, and deletes that of a stop.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            output = super()._finalize_training(trial, *args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        best = self.state.best_model_checkpoint
        if limit == 1 and best is not None and not self.bcp_stop_reason:
            self._bcp_saves_in(self._get_output_dir(trial)).keep_only(best)
        self._bcp_end_earlier()
        return output
