"""Storage plug-ins for programs that call torch.distributed.checkpoint itself, and the Metadata of DCP that describes a
checkpoint. With a plug-in, DCP still makes its plan and its staging copy; the calls of
`bytecheckpoint.integrations.dcp` need neither.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from bytecheckpoint import api
from bytecheckpoint.adapters.shards import LocalShard, dtype_name
from bytecheckpoint.checkpoint import read_whole
from bytecheckpoint.conversion.dcp import planned_by_torch
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.integrations.dcp.conflicts import OnConflict, mark_differing
from bytecheckpoint.integrations.dcp.torch_keywords import check_keywords, with_writers_keywords
from bytecheckpoint.integrations.shared.mark import marked
from bytecheckpoint.loading.open_checkpoint import LoadTarget, open_alone
from bytecheckpoint.loading.plain_trees import PlainData, TensorStub
from bytecheckpoint.loading.read import Source
from bytecheckpoint.loading.select import SelectionRequest, select
from bytecheckpoint.manifest import Manifest
from bytecheckpoint.manifest.plain_wire import TensorRef
from bytecheckpoint.options import LoadOptions, SaveOptions, given_or_default
from bytecheckpoint.region import Region
from bytecheckpoint.saving.handle import SaveHandle

PathLike = str | os.PathLike[str]


class FlatCheckpoint(NamedTuple):
    """A checkpoint under the names that torch.distributed.checkpoint gives to the parts of a state."""

    metadata: Metadata
    """Each tensor as one chunk."""
    values: Mapping[str, Any]
    """Plain data and small tensors by name. In what DCP does not take apart, such as a tuple, a TensorRef stands for
    each tensor in data files.
    """
    stored_fqns: Mapping[str, str]
    """Names in the manifest of the tensors in data files, by name."""


def flattened(manifest: Manifest, path: str, *, rank: int) -> FlatCheckpoint:
    """Returns the checkpoint as a rank of this number sees it, without the values that only other ranks saved."""
    request = SelectionRequest(to="torch", is_in_memory=True)
    selection = select(manifest, request, None)
    nested = PlainData(manifest, selection, request).nested()
    for fqn in manifest.rank_objects:
        _take_of_rank(nested, fqn, rank)
    metadata, _, values = planned_by_torch(nested, selection.wanted)
    refs = [TensorRef(tensor.pieces[0].fqn or "") for tensor in selection.wanted]
    stored = {name: refs[value.number].fqn for name, value in values.items() if isinstance(value, TensorStub)}
    metadata.storage_meta = StorageMeta(checkpoint_id=path, save_id=manifest.save_id)
    plain = {
        name: _replaced(value, TensorStub, lambda stub: refs[stub.number])
        for name, value in values.items()
        if name not in stored
    }
    return FlatCheckpoint(metadata, plain, stored)


def _replaced(value: Any, kind: type, replace_one: Callable[[Any], Any]) -> Any:
    """Returns a copy of the value with `replace_one(item)` in place of each item of this kind in it."""
    if isinstance(value, kind):
        return replace_one(value)
    if isinstance(value, dict):
        return type(value)({key: _replaced(item, kind, replace_one) for key, item in value.items()})
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, kind, replace_one) for item in value)
    return value


def _take_of_rank(nested: dict[Any, Any], fqn: str, rank: int) -> None:
    """Replaces, in place, the dict that holds a value for each rank by the value of this rank; removes it if this rank
    saved none.
    """
    entry, _, rest = fqn.partition(".")
    inside = nested.get(entry) if rest else None
    container, key = (inside, rest) if isinstance(inside, dict) and rest in inside else (nested, fqn)
    by_rank = container.pop(key)
    if rank in by_rank:
        container[key] = by_rank[rank]


def refuse_other(kind: type, given: object, advice: str) -> None:
    """Raises CheckpointMismatchError (conflict) unless the class of the argument is `kind` itself: not a subclass."""
    if type(given) is not kind:
        name = f"{type(given).__module__}.{type(given).__qualname__}"
        raise CheckpointMismatchError(
            f"{name} is not {kind.__name__}, and what it would change is not known here; nothing was done: {advice}",
            kind="conflict",
        )


SAVE_PLANNER_ADVICE = "leave the planner out, change the state_dict itself, or save with torch.distributed.checkpoint"
LOAD_PLANNER_ADVICE = "leave the planner out, or load through BcpStorageReader with torch.distributed.checkpoint"


@contextmanager
def alone_group(*, is_alone: bool) -> Iterator[dist.ProcessGroup | None]:
    """Yields a group of this process alone, and destroys it at the end. Yields None if not `is_alone`, or if there are
    no other processes.
    """
    if not (is_alone and dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield None
        return
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


class BcpStorageWriter(StorageWriter):
    """The `storage_writer` of dcp.save and dcp.async_save: one checkpoint of this library at a path or fsspec URL."""

    def __init__(
        self,
        path: PathLike,
        *,
        options: SaveOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        **of_file_system_writer: Any,
    ) -> None:
        """`process_group` is the one that dcp.save is called with, which DCP does not tell its writers. Keywords of
        FileSystemWriter are accepted: with `overwrite=False` a save refuses to replace a checkpoint, without it every
        save replaces one, whatever `options.overwrite` says; `thread_count` sets SaveOptions.writer_threads.

        Raises CheckpointMismatchError (conflict) for `single_file_per_rank=False` and `_extensions`, and TypeError for
        an unknown keyword.
        """
        self.path = path
        self.keywords = of_file_system_writer
        self.options = with_writers_keywords(given_or_default(options, SaveOptions), self.keywords)
        self.storage_options = storage_options
        self.process_group = process_group
        self._uses_collectives = True

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        self.path = self.path if checkpoint_id is None else checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - torch's signature
        """Notes whether DCP uses collectives: without them, its plans do not tell how many ranks save.
        `is_coordinator` is ignored: the save itself decides which rank coordinates.
        """
        del is_coordinator
        self._uses_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan as it is: the save makes its own."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns copies of the plans with the number of ranks, which DCP does not tell writers, as `storage_data`."""
        return [replace(plan, storage_data=len(plans)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Saves the state that the planner holds, with all ranks together, and commits it. The returned future is done,
        with an empty list: `finish` needs no results.

        Raises CheckpointMismatchError (conflict) for a planner other than DefaultSavePlanner and for another number of
        ranks than that of `process_group`, and the errors of `bytecheckpoint.save`.
        """
        refuse_other(DefaultSavePlanner, planner, SAVE_PLANNER_ADVICE)
        flat: dict[str, Any] = planner.state_dict  # type: ignore[attr-defined]  # DefaultSavePlanner's
        state = unflatten_state_dict(flat, planner.mappings) if planner.flatten_state_dict else flat  # type: ignore[attr-defined]
        group, num_ranks = self.process_group, plan.storage_data
        is_grouped = dist.is_available() and dist.is_initialized()
        if is_grouped and self._uses_collectives and num_ranks not in {1, dist.get_world_size(group)}:
            raise CheckpointMismatchError(
                f"{num_ranks} ranks save, and the process_group of BcpStorageWriter has {dist.get_world_size(group)}; "
                "nothing was written: give it the process_group that dcp.save is called with",
                kind="conflict",
            )
        with alone_group(is_alone=self._uses_collectives and num_ranks == 1) as own_group:
            handle = begin_save(
                state,
                LoadTarget(os.fspath(self.path), None, self.storage_options),
                process_group=own_group or group,
                options=self.options,
                on_conflict="per_rank",
                is_async=False,
            )
            handle.result()
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: the checkpoint is committed already."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path)


def begin_save(
    state: Mapping[str, Any],
    place: LoadTarget,
    *,
    process_group: dist.ProcessGroup | None,
    options: SaveOptions,
    on_conflict: OnConflict,
    is_async: bool,
) -> SaveHandle:
    """Saves a state whose Stateful values were replaced by their state_dict(), in the background if `is_async`. Values
    that differ between ranks are saved for each rank, or refused, as `on_conflict` says.
    """
    timeout_s = options.timeout_s
    kept = mark_differing(
        state, path=place.root, process_group=process_group, timeout_s=timeout_s, on_conflict=on_conflict
    )
    return api.save(
        place.root,
        kept,
        async_save=is_async,
        process_group=process_group,
        metadata=marked("dcp"),
        storage_options=place.storage_options,
        options=options,
    )


class BcpStorageReader(StorageReader):
    """The `storage_reader` of dcp.load: a checkpoint of this library, or of any format that its `load` reads.

    Each rank reads for itself all that it needs; `bytecheckpoint.integrations.dcp.load` divides the reads between the
    ranks. If the state has plain data, `load_bytes` of the planner must be that of DefaultLoadPlanner.

    Of FileSystemReader's keywords, `_extension_registry` is accepted, without effect, if it is None. Another value
    raises CheckpointMismatchError (conflict), and an unknown keyword TypeError.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        options: LoadOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **of_file_system_reader: Any,
    ) -> None:
        check_keywords("BcpStorageReader", of_file_system_reader, set())
        self.path = path
        self.options = given_or_default(options, LoadOptions)
        self.storage_options = storage_options
        self._source: Source | None = None
        self._rank = 0
        self._found: FlatCheckpoint | None = None

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        self.path = self.path if checkpoint_id is None else checkpoint_id
        self._source = self._found = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Returns the contents under the names of DCP, each tensor as one chunk, of which any part can be read.

        Raises the errors of `bytecheckpoint.open`.
        """
        self._rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        target = LoadTarget(os.fspath(self.path), "latest", self.storage_options)
        self._source = open_alone(target, self.options)
        self._found = flattened(self._source.manifest, self._source.path, rank=self._rank)
        return self._found.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:  # noqa: FBT001 - torch's signature
        """Does nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors that the planner resolves, with reads merged as in a load, and sets plain data in the
        planner's state. The returned future is done.

        Raises the errors of a load, and CheckpointMismatchError (conflict) for a planner that wants plain data pickled.
        """
        source, found = self._source, self._found
        if source is None or found is None:
            raise CheckpointMismatchError("read_data was called before read_metadata", kind="conflict")
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        plain = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        values = _with_tensors(source, {item.storage_index.fqn: found.values[item.storage_index.fqn] for item in plain})
        for item in plain:
            _hand_over(planner, item, values[item.storage_index.fqn])
        _fill(source, found, [(item, planner.resolve_tensor(item).detach()) for item in tensors], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)


def _with_tensors(source: Source, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values with the tensors of data files, read now, in place of their TensorRefs."""
    wanted: dict[str, None] = {}
    for value in values.values():
        _replaced(value, TensorRef, lambda ref: wanted.setdefault(ref.fqn))
    tensors = read_whole(source, list(wanted)) if wanted else {}
    return {name: _replaced(value, TensorRef, lambda ref: tensors[ref.fqn]) for name, value in values.items()}


def _fill(
    source: Source, found: FlatCheckpoint, targets: Sequence[tuple[ReadItem, torch.Tensor]], planner: LoadPlanner
) -> None:
    shards: list[LocalShard] = []
    for item, target in targets:
        fqn = item.storage_index.fqn
        region = Region(tuple(item.storage_offsets), tuple(item.lengths))
        if fqn in found.stored_fqns:
            stored_fqn = found.stored_fqns[fqn]
            shape = source.manifest.describe(stored_fqn)[1]
            shards.append(LocalShard(stored_fqn, dtype_name(target.dtype), shape, region, target))
        else:
            target.copy_(found.values[fqn][tuple(map(slice, region.offsets, _ends(region)))])
    fqns = [shard.fqn for shard in shards]
    source.read(source.plan(shards, fqns), shards, fqns)
    for item, target in targets:
        if not target.is_inference():
            increment_version(target)  # bytes are put there behind torch's back
        planner.commit_tensor(item, target)


def _ends(region: Region) -> list[int]:
    return [offset + length for offset, length in zip(region.offsets, region.lengths, strict=True)]


def _hand_over(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Sets a plain value in the planner's state, as DefaultLoadPlanner does from a pickle. Raises
    CheckpointMismatchError (conflict) for a planner with another `load_bytes`.
    """
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        name = f"{type(planner).__module__}.{type(planner).__qualname__}"
        raise CheckpointMismatchError(
            f"{name} takes plain data, as {item.storage_index.fqn!r:.200}, as pickles, which this library does not "
            "make; that tensors were loaded is not certain: use a planner with the load_bytes of DefaultLoadPlanner",
            kind="conflict",
        )
    fqn = item.dest_index.fqn
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[fqn], value)
    else:
        planner.state_dict[fqn] = value
