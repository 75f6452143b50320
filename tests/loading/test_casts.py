"""`cast=True`: values that another dtype cannot hold are an error, and no other value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint as bcp

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values to real")

UNFIT = [
    (torch.uint8, [3, 200], torch.int8),
    (torch.int8, [3, -1], torch.uint8),
    (torch.uint64, [2**63 + 5], torch.int64),
    (torch.int64, [-1], torch.uint64),
    (torch.int32, [-7], torch.uint64),
    (torch.uint16, [65535], torch.int16),
    (torch.float16, [float("-inf")], torch.int64),
    (torch.float8_e5m2, [float("-inf")], torch.int32),
    (torch.complex64, [1 + 2j], torch.float32),
    (torch.complex64, [1, complex(0, float("nan"))], torch.bfloat16),
    (torch.complex64, [1 + 2j], torch.int64),
    (torch.float32, [1.0, 1e6], torch.float8_e4m3fnuz),
    (torch.uint64, [2**63], torch.float8_e4m3fnuz),
    (torch.bfloat16, [[float("nan"), 1.0], [float("inf"), 1.0]], torch.float8_e5m2fnuz),
    (torch.float32, 1e6, torch.float8_e5m2fnuz),
]
FIT = [
    (torch.uint8, [0, 127], torch.int8),
    (torch.int8, [0, 127], torch.uint8),
    (torch.uint64, [2**63 - 1], torch.int64),
    (torch.int64, [-1, 2], torch.int32),
    (torch.float32, [-3.0, 5.0], torch.int8),
    (torch.complex64, [1.5, -2], torch.float32),
    (torch.complex64, [-2], torch.int16),
    (torch.float32, [-2.0, float("inf")], torch.float8_e5m2),
    (torch.float16, [-448.0, 0.0], torch.float8_e4m3fn),
    (torch.int32, [-8, 240], torch.float8_e4m3fnuz),
    (torch.float64, -2.0, torch.float8_e4m3fnuz),
    (torch.bool, [True, False], torch.uint32),
]
UNFIT += [(torch.float32, [1.0, each], torch.float8_e4m3fn) for each in (465.0, -1e6, float("inf"))]
UNFIT += [(torch.complex64, [1, 1000], torch.float8_e4m3fn), (torch.complex64, [300], torch.float8_e4m3fnuz)]
UNFIT += [(torch.int64, [-(2**63)], torch.float8_e4m3fn), (torch.int16, [500], torch.float8_e4m3fn)]
NAN_STAYS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float16]
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7
    UNFIT += [
        (torch.float32, [1.0, -2.0], torch.float8_e8m0fnu),
        (torch.int64, [-3], torch.float8_e8m0fnu),
        (torch.float64, [1e300], torch.float8_e8m0fnu),
        (torch.float64, [1.0, -1e-300], torch.float8_e8m0fnu),
    ]
    FIT += [(torch.float32, [1.0, 0.5], torch.float8_e8m0fnu)]
    NAN_STAYS += [torch.float8_e8m0fnu]


def loaded(path: Path, stored: torch.dtype, values: Any, wanted: torch.dtype) -> torch.Tensor:
    saved = torch.tensor(values, dtype=stored)
    bcp.save(path, {"w": saved})
    state = {"w": torch.zeros(saved.shape, dtype=wanted)}
    bcp.load(path, state, cast=True)
    return state["w"]


@pytest.mark.parametrize(("stored", "values", "wanted"), UNFIT, ids=str)
def test_a_value_that_does_not_fit_is_an_error(
    tmp_path: Path, stored: torch.dtype, values: Any, wanted: torch.dtype
) -> None:
    name = str(wanted).removeprefix("torch.")
    with pytest.raises(
        bcp.CheckpointMismatchError, match=f"perhaps other values in the checkpoint are no {name}"
    ) as caught:
        loaded(tmp_path, stored, values, wanted)
    assert caught.value.kind == "dtype"


def test_a_value_that_is_rounded_to_the_largest_fits(tmp_path: Path) -> None:
    assert loaded(tmp_path, torch.float32, [464.0, -464.0], torch.float8_e4m3fn).tolist() == [448.0, -448.0]


@pytest.mark.parametrize(("stored", "values", "wanted"), FIT, ids=str)
def test_values_that_fit_are_the_same(tmp_path: Path, stored: torch.dtype, values: Any, wanted: torch.dtype) -> None:
    assert loaded(tmp_path, stored, values, wanted).tolist() == values


@pytest.mark.parametrize("wanted", NAN_STAYS, ids=str)
def test_nan_stays_nan(tmp_path: Path, wanted: torch.dtype) -> None:
    assert loaded(tmp_path, torch.float32, [float("nan")], wanted).float().isnan().all()


@pytest.mark.parametrize(("stored", "wanted"), [(torch.uint8, torch.int8), (torch.bool, torch.int64)], ids=str)
def test_values_are_compared_on_their_own_device_whatever_the_default_device_is(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    bcp.save(tmp_path, {"w": torch.ones(3, dtype=stored)})
    state = {"w": torch.zeros(3, dtype=wanted)}
    with torch.device("meta"):
        bcp.load(tmp_path, state, cast=True)
    assert state["w"].tolist() == [1, 1, 1]


READS: dict[str, Callable[[Path], object]] = {
    "cast": lambda path: bcp.load(path, {"w": torch.zeros(4)}, cast=True),
    "an empty dict": lambda path: bcp.load(path, {"m": {}}),
    "load_tree": bcp.load_tree,
    "open": lambda path: bcp.open(path)["w"],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_dtype_that_this_torch_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    """As older releases of torch lack some dtypes."""
    values = torch.ones(4).to(torch.float8_e8m0fnu)
    bcp.save(tmp_path, {"w": values, "m": {"w": values}})
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(bcp.CheckpointMismatchError, match="has no dtype float8_e8m0fnu: install"):
        read(tmp_path)


def test_dtypes_that_torch_cannot_convert_are_named_before_anything_is_read(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"t": torch.ones(4)})
    bits = torch.zeros(4, dtype=torch.uint8)
    state = {"t": bits.view(torch.bits8)}
    with pytest.raises(bcp.CheckpointMismatchError, match="t: torch cannot convert float32") as raised:
        bcp.load(tmp_path, state, cast=True)
    assert raised.value.kind == "dtype"
    assert not bits.any()
