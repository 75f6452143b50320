"""The integrations that mark what they save, and the line with which a run of each goes on from a checkpoint."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from bytecheckpoint.info import INTEGRATION
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.storage.open_store import absolute_path

from .load_code import LoadCode, quoted

_PACKAGE = "bytecheckpoint.integrations"


class Integration(NamedTuple):
    """A training framework, and the line with which it resumes."""

    title: str
    needs: Sequence[str]
    """Names that must have a value, or `options` for a line of a command's options."""
    line: str
    """With {path} or {name} of the checkpoint, {root} of the run, {step} as its number, or {step_folder}: the path if
    it is a folder global_step_N, else the root."""
    imports: Sequence[str] = ()


_INTEGRATIONS = {
    "accelerate": Integration(
        "accelerate",
        ["accelerator"],
        "load_state(accelerator, {path})",
        [f"from {_PACKAGE}.accelerate import load_state"],
    ),
    "dcp": Integration(
        "calls of torch.distributed.checkpoint",
        ["state"],
        "dcp.load(state, checkpoint_id={path})",
        [f"from {_PACKAGE} import dcp"],
    ),
    "deepspeed": Integration(
        "DeepSpeed",
        ["engine"],
        "load_checkpoint(engine, {root}, tag={name})",
        [f"from {_PACKAGE}.deepspeed import load_checkpoint"],
    ),
    "fabric": Integration("Lightning's Fabric", ["fabric", "state"], "fabric.load({path}, state)"),
    "lightning": Integration("Lightning", ["trainer", "model"], "trainer.fit(model, ckpt_path={path})"),
    "megatron": Integration("Megatron-LM", ["options"], "--load {root} --ckpt-step {step}"),
    "megatron_bridge": Integration(
        "Megatron-Bridge", ["options"], "checkpoint.load={root} checkpoint.ckpt_step={step}"
    ),
    "torchtitan": Integration("torchtitan", ["options"], "--checkpoint.folder {root} --checkpoint.load_step {step}"),
    "transformers": Integration(
        "the Trainer of transformers", ["trainer"], "trainer.train(resume_from_checkpoint={path})"
    ),
    "verl": Integration("verl", ["options"], "trainer.resume_mode=resume_path trainer.resume_from_path={step_folder}"),
}
_IS_STEP = re.compile(r"global_step_[0-9]+").fullmatch


def integration_of(manifest: Manifest) -> Integration | None:
    """Returns the integration that saved a checkpoint; None if none is known to have."""
    name = None if manifest.foreign_format else manifest.metadata.get(INTEGRATION)
    return _INTEGRATIONS.get(name) if isinstance(name, str) else None


def step_in_name(manifest: Manifest, path: str) -> int | None:
    """Returns the number at the end of a path; None if there is none, or no known integration saved the checkpoint."""
    found = re.search(r"[-_][0-9]+\Z", path.rstrip("/"))
    return int(found[0][1:]) if found is not None and integration_of(manifest) is not None else None


def resume_code(manifest: Manifest, path: str, step: int | None) -> list[LoadCode]:
    """Returns the line with which a run in its framework goes on; an empty list if no framework is known, if the
    checkpoint has only weights, or if the line needs a step and `step` is None.
    """
    found = integration_of(manifest)
    if found is None or manifest.metadata.get("weights_only") or (step is None and "{step}" in found.line):
        return []
    above, slash, name = path.rstrip("/").rpartition("/")
    root = above or slash or "."
    as_literal = shlex.quote if "options" in found.needs else quoted
    places = {"path": path, "root": root, "name": name, "step_folder": _step_folder(path)}
    line = found.line.format(step=step, **{key: as_literal(place) for key, place in places.items()})
    return [LoadCode(f"go on in {found.title}", found.needs, [line], found.imports)]


def _step_folder(path: str) -> str:
    """Returns the path if it is a folder of a step of verl, else the folder above it: verl takes no path without the
    name of the step in it. A path that does not end with that name is made absolute first, as `.` in such a folder.
    """
    if _IS_STEP(path.rstrip("/").rpartition("/")[2]):
        return path
    place = absolute_path(path).rstrip("/")
    above, _, name = place.rpartition("/")
    return place if _IS_STEP(name) else above or "/"
