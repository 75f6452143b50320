"""Options are frozen, named, and checked where they are made."""

from __future__ import annotations

import dataclasses
import math
import pickle
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from faults.seams import Seam, before

import bytecheckpoint as bcp
from bytecheckpoint.options import LoadOptions, SaveOptions
from bytecheckpoint.storage import range_reader
from bytecheckpoint.storage.backends import direct_io

BOTH = [SaveOptions, LoadOptions]


@pytest.mark.parametrize("kind", BOTH)
def test_defaults_are_accepted_and_frozen(kind: type[Any]) -> None:
    made = kind()
    assert made == kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.timeout_s = 1.0


@pytest.mark.parametrize("kind", BOTH)
def test_options_are_given_by_name(kind: type[Any]) -> None:
    with pytest.raises(TypeError):
        kind(True)
    with pytest.raises(TypeError):
        kind(no_such_option=1)


def test_the_defaults_that_are_promised() -> None:
    assert not SaveOptions().overwrite
    assert LoadOptions().verify
    assert LoadOptions().direct == "off"
    assert SaveOptions().timeout_s == LoadOptions().timeout_s == 600


@pytest.mark.parametrize(
    ("kind", "name", "least"),
    [
        (SaveOptions, "max_file_bytes", 1 << 20),
        (SaveOptions, "writer_threads", 1),
        (LoadOptions, "reader_threads", 1),
        (LoadOptions, "max_gap_bytes", 0),
        (LoadOptions, "scratch_bytes", 8 << 20),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(kind: type[Any], name: str, least: int) -> None:
    assert getattr(kind(**{name: least}), name) == least
    for value in (least - 1, -1, float(least), str(least), True):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.{name} takes .* not {value!r}"):
            kind(**{name: value})


def test_gaps_are_left_to_the_storage_unless_they_are_given() -> None:
    assert LoadOptions().max_gap_bytes is None
    with pytest.raises(ValueError, match=r"reader_threads takes .* not None"):
        LoadOptions(reader_threads=None)


@pytest.mark.parametrize("codec", ["none", "zstd", {}, {"model.*": "zstd", "*": "none"}], ids=str)
def test_a_codec_is_one_for_all_or_by_glob(codec: Any) -> None:
    options = SaveOptions(codec=codec)
    assert options.codec == (codec if isinstance(codec, str) else tuple(codec.items()))
    assert dataclasses.replace(options, overwrite=True).codec == options.codec
    assert hash(options) == hash(SaveOptions(codec=codec))
    assert pickle.loads(pickle.dumps(options)) == options


def test_changing_a_mapping_later_changes_no_option() -> None:
    codec = {"model.*": "zstd"}
    options = SaveOptions(codec=codec)
    codec["model.*"] = "none"
    assert options.codec == (("model.*", "zstd"),)


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("lz4", "takes 'none' or 'zstd', or a mapping from globs .* not 'lz4'"),
        ("", "not ''"),
        (None, "not None"),
        (3, "not 3"),
        (["zstd"], r"not \['zstd'\]"),
        ({"a": "lz4"}, "takes 'none' or 'zstd' for 'a', not 'lz4'"),
        ({"a": None}, "for 'a', not None"),
        ({3: "zstd"}, r"takes globs of FQNs, each with 'none' or 'zstd', not \(3, 'zstd'\)"),
        (("a", "zstd"), "not 'a'"),
    ],
    ids=str,
)
def test_a_codec_that_is_none_is_refused(codec: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"SaveOptions\.codec .*{words}"):
        SaveOptions(codec=codec)


@pytest.mark.parametrize("kind", BOTH)
def test_a_timeout_is_a_positive_number_of_seconds(kind: type[Any]) -> None:
    assert kind(timeout_s=1).timeout_s == 1
    assert kind(timeout_s=0.5).timeout_s == 0.5
    for value in (0, -1.0, math.nan, math.inf, 1e10, "5", None, True):
        with pytest.raises(ValueError, match=rf"{kind.__name__}\.timeout_s"):
            kind(timeout_s=value)


@pytest.mark.parametrize("kind", BOTH)
def test_every_number_has_its_unit_in_its_name_or_is_a_count(kind: type[Any]) -> None:
    for item in dataclasses.fields(kind):
        if type(item.default) in (int, float):
            assert item.name.endswith(("_bytes", "_s", "_threads"))


@pytest.mark.parametrize("exchange", ["auto", "on", "off"])
def test_a_way_of_exchange_is_one_of_three(exchange: Any) -> None:
    assert LoadOptions(exchange=exchange).exchange == exchange


@pytest.mark.parametrize("exchange", ["always", "", None, True, 1, ["on"]], ids=repr)
def test_another_way_of_exchange_is_refused(exchange: Any) -> None:
    with pytest.raises(ValueError, match=r"LoadOptions\.exchange takes one of 'auto', 'on', 'off', not "):
        LoadOptions(exchange=exchange)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_way_past_the_host_is_taken_or_not(direct: Any) -> None:
    assert LoadOptions(direct=direct).direct == direct
    with pytest.raises(ValueError, match=r"LoadOptions\.direct takes one of 'auto', 'off', not 'always'"):
        LoadOptions(direct="always")  # type: ignore[arg-type]


def test_as_many_blocks_are_written_at_once_as_there_are_writer_threads(tmp_path: Path) -> None:
    """Each write waits until all four are under way: three, which is the default, would wait in vain."""
    state = {"x": torch.ones(60 << 20, dtype=torch.uint8)}  # with the header, four blocks of 16 MiB
    meetings = iter([Barrier(4, timeout=60)] * 4)
    with before(Seam(direct_io.DirectFile, "write"), lambda: next(meetings, Barrier(1)).wait()):
        bcp.save(tmp_path, state, options=bcp.SaveOptions(writer_threads=4))
    assert bcp.open(tmp_path)["x"][...].all()


def test_as_many_reads_are_under_way_at_once_as_there_are_reader_threads(tmp_path: Path) -> None:
    """Each read waits until all six are under way: four, which is the default, would wait in vain."""
    state = {f"x{number}": torch.ones(1 << 20, dtype=torch.uint8) for number in range(6)}
    bcp.save(tmp_path, state)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with before(Seam(range_reader, "_read"), Barrier(6, timeout=60).wait):
        bcp.load(tmp_path, target, options=bcp.LoadOptions(reader_threads=6))
    assert all(tensor.all() for tensor in target.values())
