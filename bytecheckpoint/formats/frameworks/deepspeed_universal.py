"""Universal checkpoints of DeepSpeed, as ds_to_universal makes them: a folder for each parameter, with a file for its
weights in full precision and one for each piece of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from bytecheckpoint.formats.file_reader import damaged
from bytecheckpoint.formats.flat_ranges import FlatRun
from bytecheckpoint.formats.folder import SourceFolder
from bytecheckpoint.formats.frameworks.deepspeed_zero import ZeroBuilder, ZeroState
from bytecheckpoint.formats.torch_save.file import SavedFile
from bytecheckpoint.formats.torch_save.unpickler_globals import StoredView, lengths_of

UNIVERSAL_FOLDER = "zero"
_WEIGHTS, _SUFFIX, _OPTIMIZER = "fp32.pt", ".pt", "optimizer_state.pt"


def read_universal(
    source: SourceFolder, open_file: Callable[..., SavedFile], model: SavedFile, zero: ZeroBuilder
) -> ZeroState:
    """Adds `model.<name>` and `optimizer.state.<name>.<key>`. Raises the errors of `read_zero_state`."""
    shapes = [{name: lengths_of(shape) for name, shape in group.items()} for group in model.value["param_shapes"]]
    known = {name: shape for group in shapes for name, shape in group.items()}
    order = {name: number for number, name in enumerate(known)}
    root = source.list(UNIVERSAL_FOLDER)
    names = [name for name, num_bytes in root.items() if num_bytes is None]
    for name in sorted(names, key=lambda name: order.get(name, len(order))):
        for file, num_bytes in sorted(source.list(f"{UNIVERSAL_FOLDER}/{name}").items()):
            if num_bytes is not None and file.endswith(_SUFFIX):
                saved = open_file(f"{UNIVERSAL_FOLDER}/{name}/{file}", num_bytes=num_bytes)
                _add(saved, file, name, known.get(name), zero)
    groups: list[Mapping[str, Any]] = []
    if root.get(_OPTIMIZER) is not None:
        groups = _param_groups(open_file(f"{UNIVERSAL_FOLDER}/{_OPTIMIZER}", num_bytes=root[_OPTIMIZER]), zero)
    for index, group in enumerate(shapes):
        is_same = len(groups) == len(shapes)
        zero.add_group(list(group), groups[index if is_same else 0] if groups else {})
    return ZeroState(frozenset(names), zero.tree)


def _add(saved: SavedFile, file: str, name: str, shape: tuple[int, ...] | None, zero: ZeroBuilder) -> None:
    value: Any = saved.value
    view = value.get("param") if isinstance(value, dict) else value
    key = file.removesuffix(_SUFFIX)
    if not isinstance(view, StoredView) or not view.shape:
        zero.add_one_value([name], key, view, saved)
        return
    fqn = f"model.{name}" if file == _WEIGHTS else f"optimizer.state.{name}.{key}"
    if shape is None or view.shape == shape or prod(view.shape) != prod(shape):
        saved.add_tensor(fqn, view)
        return
    # ZeRO 3 leaves the shape out.
    buffer, dtype = saved.buffer(view, fqn)
    if len(view.shape) != 1:
        raise damaged(saved.path, f"{name!r:.200} has the shape {list(view.shape)}, and {list(shape)} elsewhere")
    zero.add(fqn, dtype, shape, [FlatRun(0, prod(shape), buffer.file, buffer.byte_offset)])


def _param_groups(saved: SavedFile, zero: ZeroBuilder) -> list[Mapping[str, Any]]:
    """Returns the hyperparameters of each group. ZeRO 3 keeps them deeper, and has several groups of parameters for one
    of the user's.
    """
    groups: list[Mapping[str, Any]]
    groups = (saved.value if "param_groups" in saved.value else saved.value["optimizer_state_dict"])["param_groups"]
    why = "its hyperparameters are read, and the state of parameters from their own folders"
    zero.leave_out(saved.name, saved.value, why)
    return groups
