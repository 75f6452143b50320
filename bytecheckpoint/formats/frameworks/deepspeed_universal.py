"""Universal checkpoints of DeepSpeed, as ds_to_universal makes them: a folder for each parameter, with a file for its
weights in full precision and one for each piece of its optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from bytecheckpoint.dtypes import itemsize
from bytecheckpoint.formats.file_reader import damaged
from bytecheckpoint.formats.flat_ranges import FlatRun
from bytecheckpoint.formats.frameworks.deepspeed_zero import ZeroBuilder, ZeroState, lengths_of
from bytecheckpoint.formats.torch_save.unpickler_globals import StoredView
from bytecheckpoint.storage.paths import join_name
from bytecheckpoint.storage.store import Store

if TYPE_CHECKING:
    from bytecheckpoint.formats.torch_save.files import SavedFile

UNIVERSAL_FOLDER = "zero"
_WEIGHTS, _SUFFIX, _OPTIMIZER = "fp32.pt", ".pt", "optimizer_state.pt"


def read_universal(
    open_file: Callable[[str, int], SavedFile], store: Store, folder: str, model: SavedFile, result: ZeroBuilder
) -> ZeroState:
    """Adds `model.<name>` and `optimizer.state.<name>.<key>`. Raises what `read_zero_state` does."""
    shapes = [{name: lengths_of(shape) for name, shape in group.items()} for group in model.value["param_shapes"]]
    known = {name: shape for group in shapes for name, shape in group.items()}
    root = store.list(join_name(folder, UNIVERSAL_FOLDER))
    names = [name for name, num_bytes in root.items() if num_bytes is None]
    for name in sorted(names, key=lambda name: [*known, name].index(name)):
        inside = store.list(join_name(folder, UNIVERSAL_FOLDER, name))
        for file, num_bytes in sorted(inside.items()):
            if num_bytes is not None and file.endswith(_SUFFIX):
                saved = open_file(f"{UNIVERSAL_FOLDER}/{name}/{file}", num_bytes)
                _add(saved, file, name, known.get(name), result)
    _add_groups(open_file, root.get(_OPTIMIZER), shapes, result)
    return ZeroState(frozenset(names), result.tree)


def _add(saved: SavedFile, file: str, name: str, shape: tuple[int, ...] | None, result: ZeroBuilder) -> None:
    value: Any = saved.value
    view = value.get("param") if isinstance(value, dict) else value
    key = file.removesuffix(_SUFFIX)
    if not isinstance(view, StoredView) or not view.shape:
        result.add_one_value([name], key, view, saved)
        return
    fqn = f"model.{name}" if file == _WEIGHTS else f"optimizer.state.{name}.{key}"
    if shape is None or view.shape == shape or prod(view.shape) != prod(shape):
        result.add_view(fqn, view, saved)
        return
    # ZeRO 3 leaves the shape out.
    buffer, dtype = saved.buffer(view, fqn)
    if len(view.shape) != 1:
        raise damaged(saved.path, f"{name!r:.200} has the shape {list(view.shape)}, and {list(shape)} elsewhere")
    result.add(fqn, dtype, shape, [FlatRun(0, prod(shape), buffer.file, buffer.byte_offset)] if itemsize(dtype) else [])


def _add_groups(
    open_file: Callable[[str, int], SavedFile],
    num_bytes: int | None,
    shapes: list[dict[str, tuple[int, ...]]],
    result: ZeroBuilder,
) -> None:
    """The hyperparameters of each group; ZeRO 3, which has several groups of parameters for one of the user's, keeps
    those deeper.
    """
    groups: list[Mapping[str, Any]] = []
    if num_bytes is not None:
        value = open_file(f"{UNIVERSAL_FOLDER}/{_OPTIMIZER}", num_bytes).value
        groups = (value if "param_groups" in value else value["optimizer_state_dict"])["param_groups"]
        why = "its hyperparameters are read, and the state of parameters from their own folders"
        result.leave_out(f"{UNIVERSAL_FOLDER}/{_OPTIMIZER}", value, why)
    for index, names in enumerate(shapes):
        is_same = len(groups) == len(shapes)
        result.add_group(list(names), groups[index if is_same else 0] if groups else {})
