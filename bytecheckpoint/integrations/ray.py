"""Checkpoints of `bytecheckpoint.save` in a run of Ray Train: reported once they are committed, kept and deleted by
Ray's `CheckpointConfig`, and found by `ray.train.get_checkpoint()` after a failure.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.integrations.shared.agreed_stop import AgreedStop
from bytecheckpoint.integrations.shared.missing_framework import missing_framework
from bytecheckpoint.options import SaveOptions
from bytecheckpoint.saving.handle import SaveHandle

try:
    import ray.train
    from ray.train import CheckpointUploadMode
    from ray.train.torch import TorchConfig
except ImportError as error:
    raise missing_framework("ray", "ray[train] >= 2.51") from error

__all__ = ["SigtermTorchConfig", "WorkerStop", "checkpoint_path", "report", "run_path"]

logger = logging.getLogger("bytecheckpoint")

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "abfs://", "hdfs": "hdfs://"}
_SCHEME = re.compile(r"\A[a-z0-9+]+://")
_REPORTED: MutableMapping[Any, set[str]] = weakref.WeakKeyDictionary()
"""Ray's object for the storage of this worker -> the paths reported by it, and in this run before it began to report.
Ray may have deleted some since."""


def report(metrics: dict[str, Any], handle: SaveHandle | None = None, **report_arguments: Any) -> None:
    """Reports metrics, and with a handle the checkpoint that it saves, as `ray.train.report` does.

    Does not wait for the save. Ray receives the checkpoint when it is committed on all ranks, in the order of the
    reports. If the save fails, Ray treats it as a failure of the run, as `FailureConfig` says. All workers report
    equally often; Ray keeps the metrics of rank 0.

    Args:
        metrics: As for `ray.train.report`.
        handle: What `bytecheckpoint.save` returned on this worker, for a path below `run_path()`; None for metrics
            alone.
        report_arguments: Other arguments of `ray.train.report`, such as `validation`.

    Raises:
        ValueError: The checkpoint is not below the folder of the run, so that Ray could not find it again; Ray keeps an
            earlier report of this path; or `report_arguments` says how to upload the checkpoint.
    """
    if handle is None:
        ray.train.report(metrics, **report_arguments)
        return
    given = [name for name in report_arguments if name.startswith(("checkpoint", "delete_local"))]
    if given:
        raise ValueError(f"nothing was reported: leave out {', '.join(given)}: the checkpoint is in its place already")
    found = _checkpoint_at(handle._progress.path)
    _refuse_repeated(found)

    def wait_until_committed(_: ray.train.Checkpoint, _name: str) -> ray.train.Checkpoint:
        # Ray calls this in a thread, and again if it failed: waiting is the same each time, and needs no other rank.
        handle.result()
        return found

    ray.train.report(
        metrics,
        checkpoint=found,
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=wait_until_committed,
        delete_local_checkpoint_after_upload=False,
        **report_arguments,
    )


def run_path() -> str:
    """Returns the folder of this run in the storage of Ray, as `bytecheckpoint.save` takes it. Called by a worker.

    Raises ValueError for a filesystem that has no URL.
    """
    storage = ray.train.get_context().get_storage()
    return _url(storage.storage_filesystem, storage.experiment_fs_path)


def checkpoint_path(checkpoint: ray.train.Checkpoint) -> str:
    """Returns the place of a Ray checkpoint in the form that `load` accepts. Raises like `run_path`."""
    return _url(checkpoint.filesystem, checkpoint.path)


class WorkerStop(AgreedStop):
    """Stops all workers after the same step, when one has received SIGTERM. All workers construct this object together,
    in the function that they train in, and all close it: `with WorkerStop() as stop:`. Without SigtermTorchConfig, the
    constructor warns that SIGTERM ends the worker at once.
    """

    def __init__(self, *, timeout_s: float = SaveOptions().timeout_s) -> None:
        super().__init__(run_path(), signals=(), timeout_s=timeout_s)
        handler = signal.getsignal(signal.SIGTERM)
        self._handler = handler if isinstance(handler, _WorkerSignal) else None
        if self._handler is None:
            logger.warning("SIGTERM ends this worker at once: give TorchTrainer torch_config=SigtermTorchConfig()")
        else:
            self._handler.stop = self

    def close(self) -> None:
        """Lets SIGTERM end the worker again, and ends the agreement."""
        if self._handler is not None:
            self._handler.stop = None
        super().close()


@dataclass
class SigtermTorchConfig(TorchConfig):
    """The TorchConfig of workers in which a WorkerStop is to react to SIGTERM. Ray trains in a thread, and Python
    handles signals in the main thread only.
    """

    @property
    def backend_cls(self) -> type[Any]:
        """Returns a subclass of Ray's backend that also installs the handler of SIGTERM in the workers."""
        return type("SigtermTorchBackend", (_SigtermBackend, super().backend_cls), {})


class _SigtermBackend:
    """Installs a `_WorkerSignal` in the main threads of the workers."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        super().on_start(worker_group, backend_config)  # type: ignore[misc]  # that of Ray's backend
        worker_group.execute(_handle_sigterm)


class _WorkerSignal:
    """The handler of SIGTERM in a worker: requests a stop. Without a WorkerStop, it does what Ray's handler does."""

    def __init__(self) -> None:
        self.stop: WorkerStop | None = None
        self._pid = os.getpid()
        self._old = signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: Any) -> None:
        # A forked child inherits the handler, and must not outlive its signal.
        if self.stop is not None and os.getpid() == self._pid:
            self.stop.request("SIGTERM")
        elif callable(self._old):
            self._old(number, frame)
        elif self._old != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _handle_sigterm() -> None:
    _WorkerSignal()


def _url(filesystem: Any, path: str) -> str:
    kind = getattr(filesystem, "type_name", "")
    if kind not in _SCHEMES:
        raise ValueError(
            f"the storage of this run is a {kind or type(filesystem).__name__} filesystem, whose URL is not known: "
            "save to a URL of your own, and give it to bytecheckpoint.load"
        )
    return _SCHEMES[kind] + path


def _checkpoint_at(path: str) -> ray.train.Checkpoint:
    """Returns Ray's object for a checkpoint below the folder of this run. Raises ValueError for any other place."""
    storage = ray.train.get_context().get_storage()
    in_storage = _SCHEME.sub("", path)
    root = storage.experiment_fs_path
    if os.path.isabs(root):  # noqa: PTH117 - a path of pyarrow's filesystem
        in_storage, root = str(Path(in_storage).resolve()), str(Path(root).resolve())
    if not in_storage.startswith(f"{root}/"):
        raise ValueError(
            f"{path} is not below {storage.experiment_fs_path}, the folder of this run, so that Ray could not find it "
            "again; nothing was reported: save to bytecheckpoint.integrations.ray.run_path()"
        )
    inside = in_storage.removeprefix(f"{root}/")
    return ray.train.Checkpoint(f"{storage.experiment_fs_path}/{inside}", storage.storage_filesystem)


def _refuse_repeated(found: ray.train.Checkpoint) -> None:
    """Raises ValueError if Ray keeps an earlier report of this path: its deletion would delete the folder of both.
    Else notes the path. Waits until Ray has received all earlier reports, but only if no path or this one is noted.
    """
    # Ray's own list lacks reports that are on their way, and asking for all of it would make each report wait.
    known = _REPORTED.setdefault(ray.train.get_context().get_storage(), set())
    if not known or found.path in known:
        has_modes = hasattr(ray.train, "CheckpointConsistencyMode")  # not in Ray 2.51, which validates nothing
        mode = {"consistency_mode": ray.train.CheckpointConsistencyMode.COMMITTED} if has_modes else {}
        # Waits until Ray has received all earlier reports, which it does some time after their commits.
        kept = {each.checkpoint.path for each in ray.train.get_all_reported_checkpoints(**mode)}
        if found.path in kept:
            raise ValueError(
                f"{found.path} was reported in this run before, and when Ray deletes the older of two reports, it "
                "deletes the folder of both; nothing was reported or deleted: save each step once, resume from "
                "ray.train.get_checkpoint(), or save to another path, as below another RunConfig(name=...)"
            )
        known |= kept
    known.add(found.path)
