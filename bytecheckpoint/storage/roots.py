"""Which checkpoint is in the way of another one: a path is one checkpoint, or the root of steps, and never both."""

from __future__ import annotations

from bytecheckpoint.errors import CheckpointExistsError
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.names import join_name
from bytecheckpoint.storage.store import Store


def refuse_occupied(store: Store, folder: str, *, overwrite: bool) -> None:
    """Raises CheckpointExistsError (exists) where no checkpoint may be saved in this folder: that of a step, or "", the
    store's root. Costs a listing of the root, and one of the step's folder where that is there.
    """
    listing = store.list("")
    if folder:
        if layout.has_manifest(listing):
            raise _beside(join_name(str(store), folder), str(store))
        stands = not overwrite and folder in listing and layout.has_manifest(store.list(folder))
    else:
        newest = layout.newest_below(store, "", listing)
        if newest is not None:
            raise _beside(str(store), join_name(str(store), layout.step_folder(newest)))
        stands = not overwrite and layout.has_manifest(listing)
    if stands:
        raise layout.exists_error(join_name(str(store), folder))


def checkpoint_in_the_way(store: Store, folder: str, *, is_step: bool) -> str:
    """The path of a committed checkpoint beside which none may stand in this folder; empty where there is none."""
    if is_step:
        root = folder.rpartition("/")[0]
        return join_name(str(store), root) if layout.has_manifest(store.list(root)) else ""
    newest = layout.newest_below(store, folder, store.list(folder))
    return "" if newest is None else join_name(str(store), folder, layout.step_folder(newest))


def refuse_beside(store: Store, folder: str, *, is_step: bool) -> None:
    """Raises CheckpointExistsError (exists) for the same."""
    other = checkpoint_in_the_way(store, folder, is_step=is_step)
    if other:
        raise _beside(join_name(str(store), folder), other)


def _beside(path: str, other: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"no checkpoint can be saved at {path}, because one is committed at {other}: a path is one checkpoint, or the "
        "root of steps, and load would not know which of them is meant. Nothing was committed, and overwrite=True does "
        "not change this: save to another path, with a step everywhere or nowhere, or move what stands there",
        kind="exists",
        path=path,
    )
