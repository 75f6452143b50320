"""Pickles of DTensors written by hand, as torch would never write them: with meshes and shapes that nothing has."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

NEW, BUILD, REDUCE = b"\x81", b"b", b"R"


def encoded(value: Any) -> bytes:
    """The instructions that make a value; bytes are instructions already."""
    match value:
        case bytes():
            return value
        case bool() | None:
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            num_bytes = (value.bit_length() + 8) // 8
            return b"\x8a" + bytes([num_bytes]) + value.to_bytes(num_bytes, "little", signed=True)
        case str():
            return b"X" + struct.pack("<I", len(value)) + value.encode()
        case tuple():
            return b"(" + b"".join(map(encoded, value)) + b"t"
        case list():
            return b"](" + b"".join(map(encoded, value)) + b"e"
    return b"}(" + b"".join(encoded(key) + encoded(item) for key, item in value.items()) + b"u"


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def made(module: str, name: str, **state: Any) -> bytes:
    """An object of torch's."""
    return named(f"torch.distributed.{module}", name) + b")" + NEW + encoded(state) + BUILD


def view(shape: tuple[int, ...], num_items: int) -> bytes:
    """A tensor of float32 in the storage `0`."""
    storage = encoded(("storage", named("torch", "FloatStorage"), "0", "cpu", num_items)) + b"Q"
    hooks = named("collections", "OrderedDict") + b")" + REDUCE
    return (
        named("torch._utils", "_rebuild_tensor_v2")
        + encoded((storage, 0, shape, (1,) * len(shape), False, hooks))
        + REDUCE
    )


def dtensor(local: bytes, shape: tuple[int, ...], mesh: tuple[int, ...], at: list[int] | None, dim: int = 0) -> bytes:
    """One that is cut along this dimension by each axis of the mesh."""
    layout = made("_mesh_layout", "_MeshLayout", shape=mesh)
    spec = made(
        "tensor._dtensor_spec",
        "DTensorSpec",
        mesh=made("device_mesh", "DeviceMesh", _layout=layout, _coordinate_on_dim=at),
        placements=tuple(made("tensor.placement_types", "Shard", dim=dim) for _ in mesh),
        tensor_meta=made("tensor._dtensor_spec", "TensorMeta", shape=shape),
    )
    return made("tensor", "DTensor", _local_tensor=local, _spec=spec)


def shared(value: bytes, names: list[str]) -> bytes:
    """A dict in which one value stands under all of these names."""
    return value + b"q\x000" + encoded(dict.fromkeys(names, b"h\x00"))


def write(path: Path, state: bytes, num_items: int) -> None:
    """A file as of torch.save."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + state + b".")
        archive.writestr("a/data/0", bytes(4 * num_items))
        archive.writestr("a/byteorder", "little")
