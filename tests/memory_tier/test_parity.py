"""XOR over groups of hosts: every single loss is rebuilt, whatever the lengths."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

from bytecheckpoint.memory_tier.parity import xor_into
from bytecheckpoint.planner.memory_tier.parity_plan import (
    Segment,
    pieces_of,
    plan_rebuild,
    segment_bytes,
    segments_at,
)
from bytecheckpoint.planner.memory_tier.resume_plan import ParityMember

Files = dict[str, bytes]


def group_of(num_members: int, draw: random.Random, max_bytes: int) -> tuple[list[ParityMember], list[Files]]:
    files = [
        {f"{host}-{number}": draw.randbytes(draw.randrange(max_bytes)) for number in range(draw.randrange(4))}
        for host in range(num_members)
    ]
    members = [
        ParityMember(f"h{host}", [(name, len(content)) for name, content in of_host.items()])
        for host, of_host in enumerate(files)
    ]
    return members, files


def content_of(segment: Segment, members: list[ParityMember], files: list[Files]) -> bytes:
    pieces = pieces_of(members[segment.owner], segment.number, segment_bytes(members))
    return b"".join(files[segment.owner][p.file][p.byte_offset :][: p.byte_length] for p in pieces)


def xor_all(parts: Iterable[bytes], byte_length: int) -> bytes:
    total = bytearray(byte_length)
    for part in parts:
        xor_into(total, 0, part)
    return bytes(total)


@pytest.mark.parametrize("num_members", range(2, 13))
@pytest.mark.parametrize("seed", range(3))
def test_every_single_loss_is_rebuilt(num_members: int, seed: int) -> None:
    members, files = group_of(num_members, random.Random(seed), 3000)
    length = segment_bytes(members)
    parity = [
        xor_all((content_of(segment, members, files) for segment in segments_at(holder, num_members)), length)
        for holder in range(num_members)
    ]
    for lost in range(num_members):
        left: list[Files] = [{} if host == lost else of_host for host, of_host in enumerate(files)]
        rebuilt = bytearray()
        for step in plan_rebuild(lost, num_members):
            others = (content_of(segment, members, left) for segment in step.others)
            rebuilt += xor_all([parity[step.holder], *others], length)
        whole = b"".join(files[lost].values())
        assert bytes(rebuilt[: len(whole)]) == whole
        assert not any(rebuilt[len(whole) :])


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 4097, (256 << 10) - 1, (256 << 10) + 8, (1 << 20) + 3])
@pytest.mark.parametrize("byte_offset", [0, 3, 64])
def test_bytes_are_xored_at_any_offset_and_of_any_length(num_bytes: int, byte_offset: int) -> None:
    draw = random.Random(num_bytes)
    parity, content = bytearray(draw.randbytes(num_bytes + byte_offset + 5)), draw.randbytes(num_bytes)
    expected = np.frombuffer(bytes(parity), np.uint8).copy()
    expected[byte_offset : byte_offset + num_bytes] ^= np.frombuffer(content, np.uint8)
    xor_into(parity, byte_offset, content)
    assert bytes(parity) == expected.tobytes()
