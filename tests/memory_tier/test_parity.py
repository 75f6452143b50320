"""XOR over groups of hosts: every single loss is rebuilt, whatever the lengths."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import bytecheckpoint as bcp
from bytecheckpoint.memory_tier.parity import xor_into
from bytecheckpoint.memory_tier.parity_block import ParityBlock, ParityOrder
from bytecheckpoint.planner.memory_tier.parity_plan import (
    Segment,
    pieces_of,
    plan_rebuild,
    segment_bytes,
    segments_at,
)
from bytecheckpoint.planner.memory_tier.resume_plan import HeldParity, ParityMember
from bytecheckpoint.staging.memory_slots import JobMemory
from bytecheckpoint.storage.memory_root.job_folder import open_job
from bytecheckpoint.storage.memory_root.version_files import VersionRecord

Files = dict[str, bytes]
THREE_HOSTS = [ParityMember(f"h{host}", [(f"h{host}-0", 32 << 20)]) for host in range(3)]


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


def test_a_block_is_cleared_in_its_slot(tmp_path: Path) -> None:
    """As many zeros were made and copied, which kept the GIL: for seconds beside training, with tens of gigabytes."""
    memory = JobMemory(open_job(str(tmp_path / "memory"), str(tmp_path / "ckpt")))
    record, order = VersionRecord("a" * 16, 1, 1, 1, ""), ParityOrder(HeldParity(THREE_HOSTS, 0), [])
    slot = memory.parity.take(0, [16 << 20, 1000], max_bytes=None)
    slot[:] = b"x" * len(slot)
    memory.parity.begin_save()
    tracemalloc.start()
    block = ParityBlock(memory, record, order, bcp.Memory(copies=1, parity=1))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert not any(block._image[: 16 << 20])
    memory.close()


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
