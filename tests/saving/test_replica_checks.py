"""Checksums of small tensors: they tell values apart, bit for bit, and say nothing about where those lie in memory."""

from __future__ import annotations

import pytest
import torch
import xxhash
from sample_tensors import DTYPES, LAYOUTS, SHAPE, bits_of, random_bits

from bytecheckpoint.adapters.plain.plain_data import SMALL_TENSOR_BYTES
from bytecheckpoint.adapters.shard_columns import ShardBlocks, WholeTensors
from bytecheckpoint.adapters.shards import LocalShard, LocalShards, dtype_name
from bytecheckpoint.region import Region
from bytecheckpoint.saving.replica_checks import combined_digest, combined_digests, is_compared, small_digests


def shards_of(*tensors: torch.Tensor) -> list[LocalShard]:
    shards = LocalShards()
    for index, tensor in enumerate(tensors):
        shards.add(f"t{index}", tensor)
    return shards.found


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_digest_is_that_of_the_row_major_bytes(dtype: torch.dtype, layout: str) -> None:
    content = random_bits(dtype, SHAPE)
    tensor = LAYOUTS[layout](content)
    expected = xxhash.xxh3_64_intdigest(bits_of(content))
    assert small_digests(shards_of(tensor)) == [expected]
    assert combined_digest([tensor]) == expected


def test_a_combined_digest_is_that_of_all_bytes_one_after_the_other() -> None:
    tensors = [random_bits(dtype, SHAPE, seed) for seed, dtype in enumerate(DTYPES)]
    views = [layout(random_bits(torch.float32, SHAPE, seed)) for seed, layout in enumerate(LAYOUTS.values())]
    assert combined_digest(tensors + views) == xxhash.xxh3_64_intdigest(b"".join(map(bits_of, tensors + views)))


@pytest.mark.parametrize("num_bytes", [SMALL_TENSOR_BYTES, SMALL_TENSOR_BYTES - 1, 60_001])
def test_more_than_fits_into_one_run_is_hashed_in_several(num_bytes: int) -> None:
    tensors = [random_bits(torch.uint8, (num_bytes,), seed) for seed in range(40)]
    assert combined_digest(tensors) == xxhash.xxh3_64_intdigest(b"".join(map(bits_of, tensors)))


@pytest.mark.parametrize("num_bytes", [SMALL_TENSOR_BYTES, 60_001, 4, 0])
def test_columns_have_the_digests_of_their_tensors(num_bytes: int) -> None:
    tensors = [random_bits(torch.uint8, (num_bytes + number % 3,), number) for number in range(40)]
    columns = WholeTensors(tuple(f"t{number}" for number in range(40)), tensors)
    both = ShardBlocks([shards_of(torch.ones(3)), columns]).resolved()
    groups = [[1, 3, 2, *range(5, 40)], [0, 4], [40]]
    expected = [combined_digest([both[number].tensor for number in group]) for group in groups]
    assert combined_digests(both, groups) == expected


def test_one_changed_bit_anywhere_changes_the_combined_digest() -> None:
    tensors = [torch.zeros(SMALL_TENSOR_BYTES, dtype=torch.uint8) for _ in range(20)]
    digests = {combined_digest(tensors)}
    for index in range(0, 20, 3):
        tensors[index][index * 1000] ^= 1 << (index % 8)
        digests.add(combined_digest(tensors))
    assert len(digests) == 8


def test_zeros_of_either_sign_and_nans_of_other_payloads_are_told_apart() -> None:
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    values = [torch.tensor(0.0), torch.tensor(-0.0), nans[0], nans[1]]
    assert len({combined_digest([value]) for value in values}) == 4
    assert len(set(small_digests(shards_of(*values)))) == 4


def test_values_and_not_memory_are_compared_for_conjugates_and_negatives() -> None:
    values = random_bits(torch.complex64, SHAPE)
    for lazy in (values.conj(), values.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        assert combined_digest([lazy]) == combined_digest([lazy.resolve_conj().resolve_neg().clone()])


def test_tensors_without_elements_count_for_nothing() -> None:
    tensor, empty = torch.arange(5), torch.zeros(3, 0)
    assert combined_digest([empty, tensor, empty]) == combined_digest([tensor])
    assert combined_digest([]) == combined_digest([empty]) == xxhash.xxh3_64_intdigest(b"")
    assert small_digests(shards_of(empty)) == [xxhash.xxh3_64_intdigest(b"")]


def test_only_whole_small_tensors_have_a_digest() -> None:
    small, large = torch.zeros(SMALL_TENSOR_BYTES // 4), torch.zeros(SMALL_TENSOR_BYTES // 4 + 1)
    part = LocalShard("part", "float32", (8,), Region((4,), (4,)), torch.zeros(4))
    shards = [*shards_of(small, large), part]
    assert [is_compared(shard) for shard in shards] == [True, False, False]
    assert [digest is not None for digest in small_digests(shards)] == [True, False, False]


def test_what_requires_a_gradient_is_digested_like_its_values() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0))
    values = parameter.detach().clone()
    assert small_digests(shards_of(parameter, values)) == [combined_digest([values])] * 2
