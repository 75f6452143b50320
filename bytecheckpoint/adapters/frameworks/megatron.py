"""Megatron's models, without Megatron: modules with `sharded_state_dict()`, lists of them (virtual pipeline stages),
inside DistributedDataParallel and Float16Module or not, and dicts that hold what `sharded_state_dict()` gives.

FQNs are Megatron's keys below the name that the state uses, so layers of one kind are one tensor with an axis for the
layer (`decoder.layers.mlp.linear_fc1.weight`), or one for each layer where Megatron names them so. Equal regions of
several ranks are replicas whatever their `replica_id` is. What megatron_sharded.py says of the objects holds here.

A parameter of which an optimizer keeps a more precise copy is saved as that copy. A load fills both, and rounds. If
each rank's optimizer steps only a share of a parameter, shares are saved: the rest may be out of date on a rank.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from bytecheckpoint.adapters.checkpoint_view import CheckpointView
from bytecheckpoint.adapters.expectation import EntryContents, Expectation, Scope, not_stored
from bytecheckpoint.adapters.frameworks.flat_parameters import FlatParamMemory, NamedPart, split_padding
from bytecheckpoint.adapters.frameworks.megatron_sharded import CopiedFactory, ShardedPiece, bits_of, find_in
from bytecheckpoint.adapters.plain.plain_data import encode_plain
from bytecheckpoint.adapters.plain.plain_tree import leaves
from bytecheckpoint.adapters.shards import LocalShard
from bytecheckpoint.adapters.tree_loader import TreeTarget
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.manifest.plain_wire import join_fqn, unsupported
from bytecheckpoint.region import Region

_EXTRA_STATE = "_extra_state"
_BYTES_IO = "io.BytesIO"
_BASE_CLASS = "MegatronModule"
"""Megatron's DistributedDataParallel is derived of it, whatever module it wraps."""


class OptimizedElements(NamedTuple):
    """Elements of a model's parameter, as an optimizer has them."""

    parameter: torch.Tensor
    """Parameter of the model."""
    held: torch.Tensor
    """Tensor in the optimizer's param_groups: flat or in the parameter's shape, contiguous."""
    start: int
    """Index of its first element in the flattened parameter."""
    kept_as: Literal["itself", "share", "copy"]
    """itself: the parameter. share: a view of what this rank steps; the rest of the parameter may be out of date. copy:
    a copy in higher precision."""


class MegatronEntry:
    """The model chunks that this rank holds, or the sharded objects in a dict of the state."""

    framework = "megatron"

    def __init__(self, fqn: str, model_chunks: Sequence[torch.nn.Module], tree: Any = None) -> None:
        """`model_chunks` are modules for which `is_megatron_module` holds, `tree` may hold sharded objects.

        Raises CheckpointSaveError (unsupported_value) as `megatron_sharded.find_in` and `link` do.
        """
        self.fqn = fqn
        self._pieces: list[ShardedPiece] = []
        self._objects: list[_ShardedObject] = []
        self._copied: list[CopiedFactory] = []
        self._model_chunks: list[Any] = [unwrapped(model_chunk) for model_chunk in model_chunks]
        for model_chunk in self._model_chunks:
            self._add(model_chunk.sharded_state_dict(), model_chunk)
        self._add(tree, None)
        self._in_optimizer: dict[int, list[NamedPart]] = {}
        self._masters: dict[object, list[FlatParamMemory]] = {}
        """Parts of a parameter's more precise copy on this rank, by the key of the parameter's memory."""
        self._shares: dict[object, list[FlatParamMemory]] = {}
        """Parts of a parameter that the optimizer updates on this rank, by the same key."""
        self._pieces_of: dict[object, list[ShardedPiece]] = {}
        for piece in self._pieces:
            self._pieces_of.setdefault(_memory_key(piece.source), []).append(piece)
        # A piece that is not a run of its parameter's memory is refused only if the parameter has a `main_param`, or an
        # optimizer of the state has it.
        in_runs = [piece.source for piece in self._pieces if piece.span is not None]
        self.link(OptimizedElements(source, source, 0, "itself") for source in in_runs)
        self.link(_whole_masters(self._pieces))

    def _add(self, tree: Any, model_chunk: torch.nn.Module | None) -> None:
        found = find_in(self.fqn, tree)
        self._pieces += found.pieces
        self._copied += found.copied
        for path, sharded in found.objects:
            place = f"{'.'.join(map(str, sharded.global_offset))}_{'.'.join(map(str, sharded.global_shape))}"
            fqn = join_fqn(self.fqn, f"{sharded.key}/shard_{place}")
            self._objects.append(_ShardedObject(fqn, sharded, model_chunk, path))

    def link(self, optimized: Iterable[OptimizedElements]) -> None:
        """Notes the parameters of this entry that an optimizer of the state has. Those of other entries are skipped.

        Raises CheckpointSaveError (unsupported_value) for flat memory of a parameter whose pieces are not runs of it.
        """
        for of_parameter in optimized:
            key = _memory_key(of_parameter.parameter)
            parts = [self._part(piece, of_parameter) for piece in self._pieces_of.get(key, ())]
            if not parts:
                continue
            self._in_optimizer[id(of_parameter.held)] = parts
            if of_parameter.kept_as != "itself":
                of_kind = self._masters if of_parameter.kept_as == "copy" else self._shares
                of_kind[key] = [FlatParamMemory(name, part, of_parameter.held) for name, part in parts]

    def _part(self, piece: ShardedPiece, optimized: OptimizedElements) -> NamedPart:
        part = piece.part(optimized.start, optimized.held.numel())
        if part is None:
            what = "a part that is not a run of its parameter's memory, of which an optimizer has flat memory"
            advice = "use a ShardedTensorFactory whose pieces are contiguous views"
            raise unsupported(join_fqn(self.fqn, piece.key), what, advice)
        return NamedPart(piece.key, part)

    parameter_names: Mapping[int, str] = MappingProxyType({})
    """Empty: `in_optimizer` names all parameters, also for optimizers of torch."""

    def in_optimizer(self) -> Iterator[tuple[int, Sequence[NamedPart]]]:
        """Yields the ids of tensors in an optimizer's param_groups, and which parts of parameters lie in each."""
        yield from self._in_optimizer.items()

    def tied_names(self) -> dict[str, str]:
        """Returns an empty dict: tied tensors have one key."""
        return {}

    def buffers(self) -> Iterator[torch.Tensor]:
        for model_chunk in self._model_chunks:
            yield from torch.nn.Module.buffers(model_chunk)  # Megatron's DistributedDataParallel has a list so called

    def collect(self) -> EntryContents:
        shards: dict[tuple[str, Region], LocalShard] = {}
        for shard in self._saved():
            first = shards.setdefault((shard.fqn, shard.region), shard)
            if first is not shard and not _holds_same(first, shard):
                raise _two_of_one_name(shard.fqn, "tensors")
        plain: dict[str, tuple[Scope, bytes]] = {}
        names = {fqn for fqn, _ in shards}
        for item in self._objects:
            if item.sharded.data is not None and _is_main(item.sharded.replica_id):
                value = item.plain()
                encoded = encode_plain(value, item.fqn)
                if plain.setdefault(item.fqn, ("shared", encoded)) != ("shared", encoded):
                    raise _two_of_one_name(item.fqn, "objects")
                names.update(leaves(value, item.fqn))
        return EntryContents(list(shards.values()), names, plain)

    def _saved(self) -> Iterator[LocalShard]:
        held = {**self._shares, **self._masters}
        for piece in self._pieces:
            if _memory_key(piece.source) not in held:
                yield piece.shard(join_fqn(self.fqn, piece.key))
        for name, part, memory in chain.from_iterable(held.values()):
            yield from part.shards(join_fqn(self.fqn, name), memory)

    def _loaded(self) -> Iterator[tuple[LocalShard, int | None, bool]]:
        """Yields each shard that a load fills, the axis along which it is padded, and True if it is a rounded copy."""
        for piece in self._pieces:
            is_rounded = _memory_key(piece.source) in self._masters
            yield piece.shard(join_fqn(self.fqn, piece.key)), piece.padded_axis, is_rounded
        for name, part, memory in chain.from_iterable(self._masters.values()):
            for shard in part.shards(join_fqn(self.fqn, name), memory):
                yield shard, part.padded_axis, False

    def expect(self, checkpoint: CheckpointView) -> Expectation:
        copies: list[LocalShard] = []
        padding: list[LocalShard] = []
        expectation = Expectation([], set(), [], copies, padding)
        for shard, padded_axis, is_rounded in self._loaded():
            stored = checkpoint.tensors.get(shard.fqn)
            of_stored, beyond = split_padding(shard, padded_axis, None if stored is None else stored.shape)
            (copies if is_rounded else expectation.shards).append(of_stored)
            padding += beyond
        for item in self._objects:
            found = checkpoint.entry_tree(item.fqn)
            if found is not None:
                expectation.claims.update(map(checkpoint.rename, leaves(found.tree, found.fqn)))
            elif item.sharded.data is not None:
                expectation.problems.append(not_stored(item.fqn))
        return expectation

    def prepare(self, checkpoint: CheckpointView, _refused: Collection[str]) -> None:
        """Does nothing: Megatron's models have their memory."""

    def finish(self, checkpoint: CheckpointView) -> None:
        with torch.no_grad():
            for copied in self._copied:
                copied.data.copy_(copied.merged())
        for item in self._objects:
            found = checkpoint.entry_tree(item.fqn)
            if found is not None and found.is_taken:
                is_whole = checkpoint.takes_all or all(map(checkpoint.takes, leaves(found.tree, found.fqn)))
                current = {} if is_whole else leaves(item.plain(), item.fqn)
                item.give_back(TreeTarget().filled(found, current, checkpoint))


class _ShardedObject(NamedTuple):
    """A ShardedObject of Megatron, and where its value belongs."""

    fqn: str
    sharded: Any
    model_chunk: torch.nn.Module | None
    """Module that it belongs to."""
    path: str
    """Its name in the module."""

    def plain(self) -> Any:
        """Returns the present value as plain data."""
        data = self.sharded.data
        return {_BYTES_IO: data.getvalue()} if isinstance(data, io.BytesIO) else data

    def give_back(self, plain: Any) -> None:
        """Puts the loaded value into the sharded object and into the module."""
        value = io.BytesIO(plain[_BYTES_IO]) if type(plain) is dict and plain.keys() == {_BYTES_IO} else plain
        self.sharded.data = value
        if self.model_chunk is not None:
            owner, _, name = self.path.rpartition(".")
            if name == _EXTRA_STATE:
                _submodule(self.model_chunk, owner).set_extra_state(value)
            else:
                self.model_chunk.load_state_dict({self.path: value}, strict=False)


def _submodule(module: torch.nn.Module, path: str) -> torch.nn.Module:
    """Returns the module at this path, which may leave out the `module` of outer wrappers: their sharded_state_dict()
    does not name it. Raises AttributeError if there is none.
    """
    try:
        return module.get_submodule(path)
    except AttributeError:
        child = module._modules.get("module")
        if child is None:
            raise
        return _submodule(child, path)


def _is_main(replica_id: int | Sequence[int]) -> bool:
    """Returns True for the one replica of an object that is saved. Megatron's replicas of an object may differ."""
    return not any((replica_id,) if isinstance(replica_id, int) else replica_id)


def _memory_key(tensor: torch.Tensor) -> object:
    """Returns a key of a parameter's memory, equal also for its `data`, which is a new object each time. A tensor that
    is empty or on the meta device has no memory: its key is equal for the same object only, while it lives.
    """
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _holds_same(shard: LocalShard, other: LocalShard) -> bool:
    """Returns True if two shards of one region are tied, or equal to the bit. On the meta device, one dtype and shape
    are enough.
    """
    a, b = shard.tensor, other.tensor
    if (shard.dtype, shard.global_shape, a.is_meta) != (other.dtype, other.global_shape, b.is_meta):
        return False
    is_one_memory = a.is_meta or (a.device, a.data_ptr(), a.stride()) == (b.device, b.data_ptr(), b.stride())
    return is_one_memory or torch.equal(bits_of(a), bits_of(b).to(a.device))


def _two_of_one_name(fqn: str, what: str) -> CheckpointSaveError:
    return unsupported(fqn, f"the name of two {what}", "give each model a top-level name of its own in the state")


def _whole_masters(pieces: Iterable[ShardedPiece]) -> Iterator[OptimizedElements]:
    """Yields the unsharded main parameters (`main_param`)."""
    for source in {id(piece.source): piece.source for piece in pieces}.values():
        main = getattr(source, "main_param", None)
        is_sharded = getattr(source, "main_param_sharded", False)
        if isinstance(main, torch.Tensor) and not is_sharded and main.shape == source.shape:
            yield OptimizedElements(source, main, 0, "copy")


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the module inside wrappers, which have one child, call it `module`, and hold nothing of their own. A
    wrapper whose own class, not Megatron's base class, defines `sharded_state_dict` is kept.
    """
    while module._modules.keys() == {"module"} and not _has_own_state(module):
        child = module._modules["module"]
        if child is None or _has_own_method(module, child):
            break
        module = child
    return module


def _has_own_state(module: torch.nn.Module) -> bool:
    # Not buffers(): Megatron's DistributedDataParallel has a list of that name.
    tensors = [*module._parameters.values(), *module._buffers.values()]
    has_extra = type(module).get_extra_state is not torch.nn.Module.get_extra_state
    return has_extra or any(tensor is not None for tensor in tensors)


def _has_own_method(module: torch.nn.Module, child: torch.nn.Module) -> bool:
    """Returns True if a wrapper itself defines what is saved. A method of Megatron's base class, or one that the
    child inherits too, only adds the wrapper's name to the keys.
    """
    definer = next((cls for cls in type(module).__mro__ if "sharded_state_dict" in vars(cls)), None)
    if definer is None or isinstance(child, definer):
        return False
    return definer.__name__ != _BASE_CLASS or not is_megatron_module(child)


def is_megatron_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module) and callable(getattr(unwrapped(value), "sharded_state_dict", None))


def refuse_megatron(fqn: str, modules: Sequence[torch.nn.Module]) -> None:
    """Raises CheckpointSaveError (unsupported_value) if one of the modules, which are to be saved as those of torch, is
    or holds one of Megatron's: parts of a tensor would be taken for replicas.
    """
    is_mixed = not all(map(is_megatron_module, modules))
    for module in modules:
        all_kinds = dict.fromkeys(map(type, torch.nn.Module.modules(module)))
        kinds = [kind for kind in all_kinds if hasattr(kind, "sharded_state_dict")]
        if not kinds:
            continue
        if kinds[0] is type(module) or (is_mixed and is_megatron_module(module)):
            what = f"a list that holds Megatron's {kinds[0].__name__} and modules that are not Megatron's"
            advice = "pass Megatron's modules under a key of their own"
        else:
            what = f"a {type(module).__name__} without sharded_state_dict() that holds Megatron's {kinds[0].__name__}"
            advice = "pass the modules inside, or give it that method"
        advice += '; where Megatron splits no tensor, pass framework="ddp" (or "deepspeed")'
        raise unsupported(fqn, what, advice)
