"""Sets, dates, times, paths: they come back as they were, or are refused with what to save instead."""

from __future__ import annotations

import argparse
import enum
import random
import types
from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from msgspec.msgpack import Ext

import bytecheckpoint as bcp
from bytecheckpoint.adapters.plain.plain_data import decode_plain, encode_plain
from bytecheckpoint.data import Streams

VALUES: list[Any] = [
    set(),
    {1, 2.5, "a", b"b", None},
    {True, "x"},
    frozenset({"a", "b"}),
    {-(1 << 63), (1 << 64) - 1},
    date(2026, 11, 23),
    datetime(2026, 11, 23, 1, 2, 3, 456),  # noqa: DTZ001 - a time without a zone is a value too
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(2026, 1, 1, 5, tzinfo=timezone(timedelta(hours=-3, minutes=30))),
    time(23, 59, 59, 999_999),
    time(1, tzinfo=UTC),
    timedelta(days=-3, seconds=5, microseconds=7),
    timedelta.max,
    Path("a/b"),
    Path("/"),
    Path(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_the_same_type(tmp_path: Path, value: Any) -> None:
    state = {"a": {"x": value, "deep": [1, (value, {3: value})]}, "who": bcp.RankLocal({"x": value})}
    bcp.save(tmp_path / "c", state)
    found = bcp.open(tmp_path / "c")
    objects = found.objects
    assert objects["a"]["x"] == value
    if isinstance(value, set | frozenset):  # 1 and True are equal, and not the same
        assert sorted(map(repr, objects["a"]["x"])) == sorted(map(repr, value))
    else:
        assert repr(objects["a"]["x"]) == repr(value)
    assert type(objects["a"]["x"]) is type(value)
    assert objects["a"]["deep"] == [1, (value, {3: value})]
    target = {"a": {"x": None, "deep": None}, "who": bcp.RankLocal({"x": None})}
    bcp.load(tmp_path / "c", target)
    assert target["a"] == state["a"]
    assert target["who"].value == {"x": value}


def test_the_order_of_a_set_does_not_matter() -> None:
    """So that ranks with equal sets agree."""
    forth, back = set(map(str, range(1000))), set(map(str, reversed(range(1000))))
    assert encode(forth) == encode(back)
    assert decode_plain(encode(forth)) == forth


def encode(value: Any) -> bytes:
    return encode_plain(value, "x")


def test_a_dict_that_looks_like_one_of_them_stays_a_dict() -> None:
    for value in ({"@set": [1]}, {"@date": "2026-01-01"}, {"@path": "x", 1: 2}, {"@nonsense": 1}):
        assert decode_plain(encode(value)) == value
        assert type(decode_plain(encode(value))) is dict


def test_a_reader_that_does_not_know_them_gives_a_dict() -> None:
    """What version 1.0 makes of it: type 2 is a dict of pairs."""

    def hook(code: int, content: memoryview) -> Any:
        assert code == 2
        return dict(msgspec.msgpack.decode(content, ext_hook=hook))

    assert msgspec.msgpack.decode(encode({"x": {1}}), ext_hook=hook) == {"x": {"@set": [1]}}
    assert msgspec.msgpack.decode(encode(Path("a")), ext_hook=hook) == {"@path": "a"}


class Colour(enum.Enum):
    RED = 1


@dataclass
class Settings:
    lr: float = 0.1


class Place(NamedTuple):
    host: int
    rank: int


class OfItsOwn(set):
    pass


REFUSED = [
    (argparse.Namespace(lr=1), "save vars(value)"),
    (types.SimpleNamespace(lr=1), "save vars(value)"),
    (Settings(), "save dataclasses.asdict(value)"),
    (Colour.RED, "save value.name"),
    (torch.Generator(), "save value.get_state()"),
    (Streams({"a": [1]}, rank=0, size=1), "save bytecheckpoint.DataLoaderState(value, rank=..., size=...)"),
    (np.random.default_rng(), "save bytecheckpoint.RankLocal(value)"),
    (random.Random(), "save bytecheckpoint.RankLocal(value)"),
    (random.SystemRandom(), "leave it out"),
    (deque([1]), "save list(value)"),
    (Place(1, 2), "save value._asdict()"),
    (torch.device("cpu"), "save str(value)"),
    (defaultdict(int), "save dict(value)"),
    ({(1, 2)}, "save a list"),
    ({1 << 70}, "save a list"),
    (OfItsOwn(), "save a list"),
    (datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Paris")), "save value.isoformat()"),
    (datetime(2026, 1, 1, fold=1, tzinfo=UTC), "save value.isoformat()"),
    (datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1), "name")), "save value.isoformat()"),
    (PurePosixPath("a"), "state_dict()"),
    (PureWindowsPath("a"), "state_dict()"),
    ({"\ud800"}, "surrogate"),
    (Path("\ud800"), "surrogate"),
]


@pytest.mark.parametrize(("value", "advice"), REFUSED, ids=lambda value: type(value).__name__)
def test_what_would_not_come_back_is_refused_with_what_to_save(tmp_path: Path, value: Any, advice: str) -> None:
    with pytest.raises(bcp.CheckpointSaveError, match=r"extra\.args\b") as error:
        bcp.save(tmp_path / "c", {"extra": {"args": value}})
    assert error.value.kind == "unsupported_value"
    assert advice in str(error.value)
    assert not (tmp_path / "c" / "manifest.bcp").exists()


@pytest.mark.parametrize(
    ("tag", "content"),
    [
        ("@set", 1),
        ("@set", [[1]]),
        ("@set", {"a": 1}),
        ("@frozenset", [[]]),
        ("@date", "yesterday"),
        ("@date", 5),
        ("@datetime", "9999-99-99"),
        ("@time", None),
        ("@timedelta", [1]),
        ("@timedelta", [1 << 60, 0, 0]),
        ("@timedelta", ["1", 0, 0]),
        ("@timedelta", 7),
        ("@path", 3),
    ],
)
def test_content_that_nobody_encoded_is_an_error(tag: str, content: Any) -> None:
    data = msgspec.msgpack.encode(Ext(2, msgspec.msgpack.encode([[tag, content]])))
    with pytest.raises(bcp.CheckpointCorruptError) as error:
        decode_plain(data)
    assert error.value.kind == "bad_manifest"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_a_conversion_to_torch_writes_what_torch_reads_without_code(tmp_path: Path, to: str) -> None:
    from click.testing import CliRunner

    from bytecheckpoint.tools.main import cli

    values = {"set": {2, 1}, "date": date(2026, 1, 2), "took": timedelta(seconds=5), "path": Path("a/b")}
    bcp.save(tmp_path / "c", {"extra": values, "w": torch.ones(2)})
    ended = CliRunner().invoke(cli, ["convert", str(tmp_path / "c"), str(tmp_path / "out"), "--to", to])
    assert ended.exit_code == 0, ended.output
    objects = bcp.open(tmp_path / "out").objects
    assert objects["extra"] == {"set": [1, 2], "date": "2026-01-02", "took": "0:00:05", "path": "a/b"}
    if to == "torch":
        assert torch.load(tmp_path / "out", weights_only=True)["extra"]["set"] == [1, 2]
