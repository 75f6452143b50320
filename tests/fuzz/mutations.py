"""Changes to inputs, drawn from a seed: to bytes, and to what bytes mean (a column of integers, a tree of msgpack or
JSON, the instructions of a pickle, the members of an archive, the files of a folder), so that what comes out still gets
past the first look of a reader.
"""

from __future__ import annotations

import io
import json
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

import msgspec

from fuzz.memory_store import pack, unpack

Mutate = Callable[[bytes, Random], bytes]
"""Gives other bytes; which, the random numbers say."""

MAX_BYTES = 1 << 16
NUMBERS = (
    *range(10),
    *(15, 16, 31, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 4097, 65535, 65536, 1 << 20, (1 << 20) + 1),
    *(value for bits in (31, 32, 61, 62, 63, 64) for value in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1)),
    *(-1, -2, -(1 << 31), -(1 << 63)),
)
TEXTS = (
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "a//b",
    "C:x",
    "\\",
    "\0",
    "x" * 300,
    "\udc80",
    "ß",
    "0",
    "w",
    "1e9",
)
DTYPES = (
    "float32",
    "bfloat16",
    "int64",
    "bool",
    "uint8",
    "complex128",
    "float4_e2m1fn_x2",
    "int4",
    "F32",
    "BF16",
    "I64",
)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """One to four changes that know nothing of what the bytes mean."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _BYTE_CHANGES[rng.randrange(len(_BYTE_CHANGES))](changed, rng)
    return bytes(changed[:MAX_BYTES])


def _flip(data: bytearray, rng: Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(data: bytearray, rng: Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256)))


def _set_number(data: bytearray, rng: Random) -> None:
    width = rng.choice((2, 4, 8))
    if len(data) >= width:
        at = rng.randrange(len(data) - width + 1)
        number = rng.choice(NUMBERS) % (1 << 8 * width)
        data[at : at + width] = number.to_bytes(width, rng.choice(("little", "little", "big")))


def _remove(data: bytearray, rng: Random) -> None:
    start, end = _range(data, rng)
    del data[start:end]


def _repeat(data: bytearray, rng: Random) -> None:
    start, end = _range(data, rng)
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[start:end] * rng.choice((1, 1, 2, 16))


def _insert(data: bytearray, rng: Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8)))


def _cut(data: bytearray, rng: Random) -> None:
    if data:
        del data[rng.randrange(len(data)) :]


def _range(data: bytearray, rng: Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 3, 4, 8, 16, 64)))


_BYTE_CHANGES = (_flip, _flip, _set_byte, _set_number, _set_number, _remove, _repeat, _insert, _cut)


def mutate_tree(tree: Any, rng: Random) -> Any:
    """A tree of dicts, lists, numbers, texts and bytes with one to three nodes changed. The tree itself is changed."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = _mutate_node(tree, rng, 0)
    return tree


def _mutate_node(node: Any, rng: Random, depth: int) -> Any:
    if isinstance(node, dict) and node and rng.random() < 0.95:
        return _mutate_dict(node, rng, depth)
    if isinstance(node, list) and node and rng.random() < 0.9:
        return _mutate_list(node, rng, depth)
    if isinstance(node, bytes) and rng.random() < 0.95:
        return _mutate_column(node, rng) if rng.random() < 0.7 else mutate_bytes(node, rng)
    if isinstance(node, bool) or node is None:
        return rng.choice((True, False, None, 0))
    if isinstance(node, int) and rng.random() < 0.8:
        return rng.choice((node + 1, node - 1, node * 2, -node, rng.choice(NUMBERS), rng.choice(NUMBERS)))
    if isinstance(node, str) and rng.random() < 0.8:
        return rng.choice((rng.choice(TEXTS), rng.choice(DTYPES), node + "x", node[:-1], f"../{node}", node + "\0"))
    return _anything(rng)


def _anything(rng: Random) -> Any:
    return rng.choice(
        (None, True, rng.choice(NUMBERS), rng.choice(NUMBERS), 0.5, rng.choice(TEXTS), rng.randbytes(4), [], {}, [[]])
    )


def _mutate_dict(node: dict[Any, Any], rng: Random, depth: int) -> dict[Any, Any]:
    key = rng.choice(list(node))
    kind = rng.random()
    if kind < 0.82:
        node[key] = _mutate_node(node[key], rng, depth + 1)
    elif kind < 0.88:
        del node[key]
    elif kind < 0.92:
        node[rng.choice(TEXTS)] = node[key]
    elif kind < 0.96:
        node[key] = node[rng.choice(list(node))]
    else:
        node[f"{key}x"] = node.pop(key)
    return node


def _mutate_list(node: list[Any], rng: Random, depth: int) -> list[Any]:
    at = rng.randrange(len(node))
    kind = rng.random()
    if kind < 0.7:
        node[at] = _mutate_node(node[at], rng, depth + 1)
    elif kind < 0.78:
        del node[at]
    elif kind < 0.86:
        node.insert(at, node[rng.randrange(len(node))])
    elif kind < 0.9:
        node.append(_anything(rng))
    elif kind < 0.94:
        node *= rng.choice((2, 17, 70))
    else:
        node[at] = _anything(rng)
    return node[:4096]


def _mutate_column(column: bytes, rng: Random) -> bytes:
    """As unsigned integers of one width, of which one is changed, or as many as there are."""
    width = rng.choice((1, 1, 2, 4, 8))
    values = [int.from_bytes(column[at : at + width], "little") for at in range(0, len(column) - width + 1, width)]
    if not values:
        return rng.randbytes(width)
    at, kind = rng.randrange(len(values)), rng.random()
    if kind < 0.3:
        values[at] = rng.choice(NUMBERS)
    elif kind < 0.6:
        values[at] += rng.choice((-1, 1, 4096, -4096, 255))
    elif kind < 0.7:
        values[at] = values[rng.randrange(len(values))]
    elif kind < 0.8:
        del values[at]
    elif kind < 0.9:
        values.insert(at, values[at])
    else:  # the same numbers, only wider
        width = 8
    return b"".join((value % (1 << 8 * width)).to_bytes(width, "little") for value in values)


def mutate_msgpack(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.15:
        return mutate_bytes(data, rng)
    try:
        return msgspec.msgpack.encode(mutate_tree(msgspec.msgpack.decode(data), rng))
    except (ValueError, TypeError, OverflowError, RecursionError):  # it was no msgpack, or is none any more
        return mutate_bytes(data, rng)


def mutate_json(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    try:
        return json.dumps(mutate_tree(json.loads(data), rng)).encode()
    except (ValueError, TypeError, RecursionError):
        return mutate_bytes(data, rng)


def mutate_header(data: bytes, rng: Random) -> bytes:
    """Of a safetensors file: 8 bytes with the length of a text in JSON, that text, tensors."""
    if len(data) < 8 or rng.random() < 0.15:
        return mutate_bytes(data, rng)
    length = struct.unpack_from("<Q", data)[0]
    text, rest = data[8 : 8 + length], data[8 + length :]
    if rng.random() < 0.15:
        rest = mutate_bytes(rest, rng)
    else:
        text = mutate_json(text.rstrip(), rng)
    said = len(text) if rng.random() < 0.95 else rng.choice(NUMBERS) % (1 << 64)
    return (struct.pack("<Q", said) + text + rest)[:MAX_BYTES]


_SNIPPETS = (
    *(b"N", b"(", b")", b"]", b"}", b"0", b"1", b"2", b"t", b"l", b"d", b"a", b"e", b"s", b"u", b"R", b"b", b"Q", b"."),
    *(b"\x81", b"\x85", b"\x86", b"\x87", b"\x88", b"\x8f", b"\x90", b"\x91", b"\x92", b"\x93", b"\x94"),
    *(
        b"h\x00",
        b"h\x01",
        b"h\x02",
        b"h\x05",
        b"q\x00",
        b"q\x07",
        b"K\x00",
        b"K\x01",
        b"K\xff",
        b"M\xff\xff",
        b"J\xff\xff\xff\xff",
    ),
    *(
        b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x8a\x09" + b"\xff" * 8 + b"\x00",
        b"\x8b\xff\xff\xff\xff",
        b"I01\n",
    ),
    *(b"G\x7f\xf0\x00\x00\x00\x00\x00\x00", b"X\x01\x00\x00\x00w", b"\x8c\x01.", b"C\x02ab", b"U\x01\x80"),
    *(b"ctorch\nfloat32\n", b"ctorch\nFloatStorage\n", b"ctorch\nSize\n", b"ctorch\ndevice\n", b"cos\nsystem\n"),
    *(
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch._utils\n_rebuild_tensor_v3\n",
    ),
    *(
        b"ccollections\nOrderedDict\n)R",
        b"ccollections\nCounter\n",
        b"ccollections\ndefaultdict\n)R",
        b"cbuiltins\nset\n",
    ),
    *(
        b"cnumpy\ndtype\n",
        b"cnumpy.core.multiarray\nscalar\n",
        b"cnumpy.core.multiarray\n_reconstruct\n",
        b"c_io\nBytesIO\n",
    ),
    *(
        b"c_codecs\nencode\n",
        b"cbuiltins\ncomplex\n",
        b"cbuiltins\nbytearray\n",
        b"cpathlib\nPosixPath\n",
        b"ccopyreg\n_reconstructor\n",
    ),
    *(b"cargparse\nNamespace\n)R", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch.storage\nUntypedStorage\n"),
)


def mutate_pickle(data: bytes, rng: Random) -> bytes:
    """One to three instructions are dropped, doubled, exchanged, given another number, or put in."""
    if rng.random() < 0.25:
        return mutate_bytes(data, rng)
    steps = _instructions(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, kind = rng.randrange(len(steps)), rng.random()
        if kind < 0.15 and len(steps) > 1:
            del steps[at]
        elif kind < 0.25:
            steps.insert(at, steps[rng.randrange(len(steps))])
        elif kind < 0.35:
            other = rng.randrange(len(steps))
            steps[at], steps[other] = steps[other], steps[at]
        elif kind < 0.6:
            steps[at] = (
                steps[at][:1] + mutate_bytes(steps[at][1:], rng) if len(steps[at]) > 1 else rng.choice(_SNIPPETS)
            )
        elif kind < 0.7:
            start, count = rng.randrange(len(steps)), rng.choice((2, 5, 20))
            steps[at:at] = steps[start : start + count]
        else:
            steps.insert(at, rng.choice(_SNIPPETS))
    return b"".join(steps)[:MAX_BYTES]


def _instructions(data: bytes) -> list[bytes]:
    """What follows the last one that is known is one more."""
    bounds = [0]
    with suppress(ValueError, IndexError, OverflowError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pickletools looks for escapes in the names of globals
        bounds += [position for _, _, position in pickletools.genops(data)][1:]
    ends = [*bounds[1:], len(data)]
    return [data[start:end] for start, end in zip(bounds, ends, strict=True)]


def mutate_archive(data: bytes, rng: Random) -> bytes:
    """Of torch.save: mostly a member is changed, and the archive made anew around it."""
    if rng.random() < 0.4:
        return _mutate_near_end(data, rng) if rng.random() < 0.6 else mutate_bytes(data, rng)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # noqa: BLE001  # an archive of any kind, and a module that trusts it
        return mutate_bytes(data, rng)
    return _archive_of(_mutate_members(members, rng), rng)[:MAX_BYTES] if members else mutate_bytes(data, rng)


def _mutate_near_end(data: bytes, rng: Random) -> bytes:
    """Where the directory is."""
    at = max(0, len(data) - rng.choice((22, 100, 400, 800)))
    return data[:at] + mutate_bytes(data[at:], rng)


def _mutate_members(members: list[tuple[str, bytes]], rng: Random) -> list[tuple[str, bytes]]:
    pickles = [at for at, (name, _) in enumerate(members) if name.endswith("data.pkl")]
    at, kind = rng.randrange(len(members)), rng.random()
    if kind < 0.7 and pickles:
        at = pickles[0]
        members[at] = members[at][0], mutate_pickle(members[at][1], rng)
    elif kind < 0.8:
        members[at] = members[at][0], mutate_bytes(members[at][1], rng)
    elif kind < 0.9:
        members[at] = rng.choice((members[at][0] + "x", "archive/" + members[at][0], rng.choice(TEXTS))), members[at][1]
    else:
        del members[at]
    return members


def _archive_of(members: list[tuple[str, bytes]], rng: Random) -> bytes:
    stream = io.BytesIO()
    how = zipfile.ZIP_STORED if rng.random() < 0.97 else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(stream, "w", how) as archive:
        # The module warns of names that are there twice, as some are once they can be written.
        named = {name.encode("utf-8", "replace").decode().replace("\0", "_"): content for name, content in members}
        for name, content in named.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return stream.getvalue()


def mutate_folder(data: bytes, rng: Random) -> bytes:
    """One of the files is changed by what it is, cut, renamed, left out or given the content of another."""
    files = unpack(data)
    if not files or rng.random() < 0.03:
        return mutate_msgpack(data, rng)
    name, kind = rng.choice(sorted(files)), rng.random()
    if kind < 0.88:
        files[name] = _mutate_file(name, files[name], rng)
    elif kind < 0.91:
        files[name] = files[name][: rng.randrange(len(files[name]) + 1)]
    elif kind < 0.94:
        del files[name]
    elif kind < 0.97:
        files[name] = files[rng.choice(sorted(files))]
    else:
        files[rng.choice((f"x/{name}", f"{name}x", "model.safetensors", ".metadata", "pytorch_model.bin"))] = files.pop(
            name
        )
    return pack(files)


def _mutate_file(name: str, content: bytes, rng: Random) -> bytes:
    if name.endswith(".safetensors"):
        return mutate_header(content, rng)
    if name.endswith(".json"):
        return mutate_json(content, rng)
    if name == ".metadata":
        return mutate_pickle(content, rng)
    return mutate_archive(content, rng) if content.startswith(b"PK\x03\x04") else mutate_bytes(content, rng)
