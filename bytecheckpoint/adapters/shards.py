"""Tensors turned into shards: which regions of the global tensor this rank holds, and where in memory they are.

Takes plain tensors (and parameters, and subclasses that only add Python attributes), DTensor on any mesh, and
ShardedTensor. Everything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from bytecheckpoint.adapters.placements import LocalPart, MeshAxis, held_parts, is_known
from bytecheckpoint.adapters.torch_types import DTensor, ShardedTensor
from bytecheckpoint.dtypes import DTYPE_ITEMSIZES
from bytecheckpoint.errors import CheckpointMismatchError
from bytecheckpoint.manifest.plain_wire import unsupported
from bytecheckpoint.region import Region, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

AT_ONCE = 256
"""Tensors that are looked at together."""
_FEW = 16
"""Number of tensors below which each is looked at by itself: a single one took 25 us together, and 4 us so."""
_STRIDED = torch.strided
_Tensor, _Storage = torch.Tensor, torch.UntypedStorage
_IS_COMPLEX = attrgetter("is_complex")
_IS_CPU = attrgetter("is_cpu")
_LOOKS = attrgetter("dtype", "layout", "shape")
"""Reads the attributes of a plain tensor that decide whether it is dense, and what is saved besides its elements.
Raises RuntimeError for a nested tensor, which has no shape.
"""
NEW_TUPLE = tuple.__new__
"""Makes a named tuple without its own constructor, which takes twice as long: 0.98 us against 0.45 us for a LocalShard.
Used where a state has 100,000 of them."""
_Looks = tuple[torch.dtype, torch.layout, torch.Size]
_Kind = tuple[str, tuple[int, ...], Region, int]

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types whose tensors are nothing but their elements: one look tells, because a state holds many of them."""

_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPE_ITEMSIZES if hasattr(torch, name)}


class LocalShard(NamedTuple):
    """A region that this rank holds, and its memory: the source of a save, the destination of a load."""

    fqn: str
    dtype: str
    """torch's name of it without `torch.`."""
    global_shape: tuple[int, ...]
    region: Region
    """Region in global coordinates, in elements."""
    tensor: torch.Tensor
    """Live memory with the region's lengths as its shape: a view that autograd does not see, or the state's own tensor
    where autograd has nothing to do with it, or where it has an address. On the meta device where a load has yet to
    create that memory."""
    address: int = 0
    """Address of its first byte, where it was asked for and all of its bytes are there, consecutive in host memory; 0
    where `tensor` has to be used instead. Found in the same pass as all else: each more pass over 100,000 tensors costs
    a load some percent."""
    owner: torch.Tensor | None = None
    """The state's own tensor, where its version counter is another one than that of `tensor`, as a DTensor's is."""
    byte_length: int = 0
    """Number of its bytes, for a shard that has an address; for others it may be 0."""


def dtype_name(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Returns torch's dtype of this name. Raises CheckpointMismatchError (dtype) if the installed torch has none."""
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        raise CheckpointMismatchError(
            f"torch {torch.__version__} has no dtype {name}: install one that has it, or leave out what has this dtype "
            "with exclude",
            kind="dtype",
        )
    return dtype


class LocalShards:
    """The shards of this rank, collected in one walk over a state.

    Equal shapes share their regions, and how a DTensor lies is found once for all that lie alike. None of that is
    retained beyond the walk, so nothing can be out of date.
    """

    def __init__(self, *, with_addresses: bool = False) -> None:
        """`with_addresses` is for a load: shards get addresses, and `add` does not check that the memory is there. A
        save reads addresses later, when it is staged.
        """
        self.found: list[LocalShard] = []
        self._with_addresses = with_addresses
        self._kinds: dict[_Looks, _Kind] = {}
        """Dtype, lengths, region and bytes of plain tensors that are dense and whole, by their `_LOOKS`."""
        self._layouts: dict[object, _Layout] = {}

    def names(self) -> set[str]:
        """Returns the FQNs of the shards so far."""
        return {shard.fqn for shard in self.found}

    def add(self, fqn: str, tensor: torch.Tensor) -> None:
        """Adds the shards of a tensor: one for each piece that this rank has, so none on a rank outside its mesh.

        An empty share of an uneven split is one shard of no elements, so that every rank knows the FQN.
        Raises CheckpointSaveError (unsupported_value) for a tensor or placement of an unsupported kind, and, in a save,
        for freed memory; CheckpointMismatchError (conflict) if a DTensor's local tensor does not fit its
        placements.
        """
        self.add_all([(fqn, tensor)])

    def add_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Adds the shards of many tensors, each given with its FQN, as `add` does."""
        # Together, because a state may hold 100,000 small ones: a call for each would cost more than its bytes.
        if self._with_addresses:
            each = list(tensors)
            for first in range(0, len(each), AT_ONCE):
                some = each[first : first + AT_ONCE]
                if len(some) < _FEW or not self._add_together(some):
                    self._add_each(some)
        else:
            self._add_each(tensors)

    def _add_together(self, named: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Adds tensors if all are plain, dense and on the host, and returns True; otherwise adds none."""
        fqns, tensors = zip(*named, strict=True)
        if not PLAIN_TENSORS.issuperset(map(type, tensors)):
            return False
        kinds = self._kinds
        try:
            looks = list(map(_LOOKS, tensors))
            if not all(map(_IS_CPU, tensors)):
                return False
            memories = look_at(tensors, are_complex=any(map(_IS_COMPLEX, {dtype for dtype, _, _ in looks})))
        except (RuntimeError, NotImplementedError):  # one without a shape, or without a storage
            return False
        of_each = list(map(kinds.get, looks))
        if None in of_each:
            of_each = [kinds.get(look) or self._add_kind(look, *each) for look, each in zip(looks, named, strict=True)]
        dtypes, shapes, regions, lengths = zip(*cast("list[_Kind]", of_each), strict=True)
        addresses = np.where(memories.has(np.array(lengths, np.int64)), memories.addresses, 0)
        if not memories.are_flat:
            addresses[[not is_row_major(tensor) for tensor in tensors]] = 0
        # A tensor with an address is filled through it, which autograd does not see.
        own = tensors if addresses.all() else [_without_grad(tensor) for tensor in tensors]
        rows = zip(fqns, dtypes, shapes, regions, own, addresses.tolist(), repeat(None), lengths, strict=False)
        self.found += map(NEW_TUPLE, repeat(LocalShard), rows)
        return True

    def _add_each(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        kinds, found, with_addresses = self._kinds, self.found, self._with_addresses
        for fqn, tensor in tensors:
            if type(tensor) not in PLAIN_TENSORS:
                self._add_other(fqn, tensor)
                continue
            try:
                looks = _LOOKS(tensor)
            except RuntimeError:  # a nested tensor has no shape
                dense_dtype(fqn, tensor)
                raise
            dtype, lengths, region, num_bytes = kinds.get(looks) or self._add_kind(looks, fqn, tensor)
            is_view = tensor._is_view()
            memory = tensor.detach() if is_view or tensor.requires_grad else tensor
            address = 0
            if with_addresses:
                address = address_of(memory)
            elif is_view or tensor.untyped_storage().nbytes() != num_bytes:
                check_has_all_memory(fqn, memory)
            found.append(NEW_TUPLE(LocalShard, (fqn, dtype, lengths, region, memory, address, None, num_bytes)))

    def _add_kind(self, looks: _Looks, fqn: str, tensor: torch.Tensor) -> _Kind:
        self._kinds[looks] = kind = kind_of(fqn, tensor)
        return kind

    def _add_other(self, fqn: str, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            self._add_dtensor(fqn, tensor)
        elif isinstance(tensor, ShardedTensor):
            self.found += _of_sharded_tensor(fqn, tensor)
        else:
            dtype, shape = dense_dtype(fqn, tensor), tuple(tensor.shape)
            self._check_memory(fqn, tensor)
            self.found.append(LocalShard(fqn, dtype, shape, whole(shape), tensor.detach()))

    def _add_dtensor(self, fqn: str, tensor: DTensor) -> None:
        local = tensor._local_tensor  # to_local() would be a step of autograd's
        dense_dtype(fqn, local)
        # The spec has mesh and placements; many tensors share one, which is then found without comparing them.
        key = tensor._spec, tensor.dtype, tensor.shape, local.shape, local.is_contiguous()
        try:
            layout = self._layouts.get(key)
        except (RuntimeError, TypeError) as error:
            kinds = ", ".join(type(placement).__name__ for placement in tensor.placements)
            what = f"a DTensor with placements ({kinds}) of which one has no equality and hash of its own"
            advice = "make its class a frozen dataclass, or give it __eq__ and __hash__"
            raise unsupported(fqn, what, advice) from error
        if layout is None:
            layout = self._layouts[key] = _layout_of(fqn, tensor)
        self._check_memory(fqn, local)
        memory = local.detach() if local.requires_grad or local._is_view() else local
        for part in layout.parts:
            of_part = part.of(memory)
            address = address_of(of_part) if self._with_addresses else 0
            about = fqn, layout.dtype, layout.shape, part.region
            self.found.append(LocalShard(*about, of_part, address, tensor, of_part.nbytes if address else 0))

    def _check_memory(self, fqn: str, tensor: torch.Tensor) -> None:
        """Raises, in a save, CheckpointSaveError for freed memory. A load checks when it knows what fills a tensor."""
        if not self._with_addresses:
            check_has_all_memory(fqn, tensor)


def kind_of(fqn: str, tensor: torch.Tensor) -> _Kind:
    """Returns dtype, lengths, region and number of bytes of a whole plain tensor. Raises the errors of `dense_dtype`;
    does not check that the memory is there.
    """
    region = whole(tensor.shape)
    return dense_dtype(fqn, tensor), region.lengths, region, tensor.nbytes


class Memories(NamedTuple):
    """Places of tensors on the host, as columns."""

    addresses: Int64s
    """Address of the first byte of each tensor."""
    starts: Int64s
    """Address of the storage of each tensor."""
    sizes: Int64s
    """Bytes of that storage."""
    storages: list[torch.UntypedStorage]
    are_flat: bool
    """True if all are row-major, without gaps, and no conjugation or negation is pending."""

    def has(self, lengths: Int64s) -> NDArray[np.bool_]:
        """Returns True for each tensor whose storage has as many bytes from its address on as `lengths` says for it."""
        has_all: NDArray[np.bool_] = (lengths == 0) | (self.addresses - self.starts + lengths <= self.sizes)
        return has_all


def look_at(tensors: Sequence[torch.Tensor], *, are_complex: bool) -> Memories:
    """Returns where tensors on the host lie; without `are_complex` none of them may be complex. Pass few at a time, so
    that they stay in the processor's cache between the reads: the first read of each costs more than all others.
    """
    storages = list(map(_Tensor.untyped_storage, tensors))
    each = map(_Tensor.data_ptr, tensors), map(_Storage.data_ptr, storages), map(_Storage.nbytes, storages)
    are_odd = any(map(_Tensor.is_neg, tensors)) or (are_complex and any(map(_Tensor.is_conj, tensors)))
    addresses, starts, sizes = (np.array(list(column), np.int64) for column in each)
    return Memories(addresses, starts, sizes, storages, all(map(_Tensor.is_contiguous, tensors)) and not are_odd)


def is_row_major(tensor: torch.Tensor) -> bool:
    """Returns True if memory holds the elements row-major without gaps, and no conjugation or negation is pending."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _without_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor._is_view() or tensor.requires_grad else tensor


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of the first byte if all bytes are there, consecutive in host memory; 0 otherwise."""
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        return 0
    start = tensor.storage_offset()
    end = tensor.nbytes + (start and start * tensor.element_size())
    return tensor.data_ptr() if end <= tensor.untyped_storage().nbytes() else 0


def shares_elements(tensor: torch.Tensor) -> bool:
    """Returns True if two elements of a tensor lie in the same memory, or may do so: such a tensor cannot be filled."""
    if tensor.is_contiguous():
        return False
    dims = sorted((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1)
    reach = 0
    for stride, length in dims:
        if stride <= reach:
            return tensor.numel() > 0
        reach += (length - 1) * stride
    return False


def has_all_memory(tensor: torch.Tensor) -> bool:
    """Returns True if the storage of a dense tensor, which can be freed, has all of its bytes; also for a meta one."""
    num_bytes = tensor.nbytes
    if num_bytes and not tensor.is_contiguous():
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        num_bytes = (reach + 1) * tensor.element_size()
    start = tensor.storage_offset()
    start_bytes = start and start * tensor.element_size()
    return not num_bytes or start_bytes + num_bytes <= tensor.untyped_storage().nbytes() or tensor.is_meta


def check_has_all_memory(fqn: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a tensor whose memory was freed or made smaller."""
    if has_all_memory(tensor):
        return
    num_bytes, left = tensor.nbytes, tensor.untyped_storage().nbytes()
    what = f"a tensor of {num_bytes} bytes whose storage was made smaller and has {left} bytes now"
    if not left:
        what = "a tensor whose memory has been freed"
    raise unsupported(fqn, what, "save while it has its memory: outside of the context that frees it")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a row-major tensor as a flat tensor of bytes, on its device: a view."""
    # Not reshape(-1): the stride of a dimension of one element can be anything, which stays in the result.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def dense_dtype(fqn: str, tensor: torch.Tensor) -> str:
    """Returns the name of the dtype of a strided tensor whose class has no __torch_dispatch__ of its own.

    Raises CheckpointSaveError (unsupported_value) for any other, and for a dtype that no checkpoint has.
    """
    name = _DTYPE_NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not _STRIDED or tensor.is_nested or type(tensor) not in PLAIN_TENSORS:
        _refuse_unsupported(fqn, tensor)
    return name or dtype_name(tensor.dtype)


def refuse_lazy(fqn: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a parameter that has no shape yet."""
    if is_lazy(tensor):
        what = "a parameter of a lazy module that has not been initialised"
        raise unsupported(fqn, what, "call forward once, so that its shape is known")


def _refuse_unsupported(fqn: str, tensor: torch.Tensor) -> None:
    refuse_lazy(fqn, tensor)
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise unsupported(fqn, f"a {kind} tensor", "convert it to a dense tensor, or save its components")
    if tensor.is_quantized or dtype_name(tensor.dtype) not in DTYPE_ITEMSIZES:
        raise unsupported(fqn, f"a tensor of dtype {tensor.dtype}", "save its integer values and scales")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise unsupported(fqn, f"a tensor subclass, {name}", "save the plain tensors that it is made of")


def refuse_meta(fqn: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointSaveError (unsupported_value) for a tensor on the meta device."""
    if tensor.is_meta:
        advice = "give it values first: load a checkpoint into it, or call to_empty() and initialise it"
        raise unsupported(fqn, "a tensor on the meta device, which has no values", advice)


class _Layout(NamedTuple):
    """Layout of the local tensor of a DTensor in the global one."""

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[LocalPart]


def _layout_of(fqn: str, tensor: DTensor) -> _Layout:
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return _Layout(dtype, shape, [])
    for placement in tensor.placements:
        if not is_known(placement):
            kind = type(placement).__name__
            advice = "redistribute it to Shard and Replicate placements first, or give the placement a method "
            advice += "checkpoint_regions (docs/placements.md)"
            raise unsupported(fqn, f"a DTensor with a {kind} placement, {placement}", advice)
    mesh_axes = (*map(MeshAxis, tensor.placements, tensor.device_mesh.shape, coordinate),)
    return _Layout(dtype, shape, held_parts(fqn, shape, tensor._local_tensor, mesh_axes))


def _of_sharded_tensor(fqn: str, tensor: ShardedTensor) -> list[LocalShard]:
    shards = []
    for shard in tensor.local_shards():
        dtype = dense_dtype(fqn, shard.tensor)
        region = Region(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        shards.append(LocalShard(fqn, dtype, tuple(tensor.size()), region, shard.tensor.detach()))
    return shards
