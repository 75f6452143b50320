"""`bcp cat`."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoint_files import flip

import bytecheckpoint as bcp


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("cat") / "c"
    state = {
        "w": torch.arange(60.0).reshape(3, 4, 5),
        "half": torch.tensor([1.5, -0.25, 3.0], dtype=torch.bfloat16),
        "odd": torch.tensor([math.nan, math.inf, 1.0]),
        "a[0]": torch.ones(2),
        "scalar": torch.tensor(7),
        "long": torch.arange(100),
        "flags": torch.tensor([True, False]),
        "z": torch.tensor([1 + 2j]),
        "lr": 0.001,
        "nested": {"list": [1, "two"]},
        "rank": bcp.RankLocal({"seed": 3}),
    }
    bcp.save(path, state)
    return path


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("", (...,)),
        ("[1]", (1,)),
        ("[-1, 2:4, ::2]", (-1, slice(2, 4), slice(None, None, 2))),
        ("[..., 0]", (..., 0)),
        ("[0,1,2]", (0, 1, 2)),
        ("[:,1:,]", (slice(None), slice(1, None))),
        ("[]", (...,)),
    ],
)
def test_a_part_is_what_python_gives(call, stored, index, expected) -> None:
    part = torch.arange(60.0).reshape(3, 4, 5)[expected]
    found = call("cat", stored, f"w{index}", "--json").json
    assert found["values"] == part.tolist()
    assert found["shape"] == list(part.shape)
    assert found["dtype"] == "float32"
    assert call("cat", stored, f"w{index}").code == 0


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("half", [1.5, -0.25, 3.0]),
        ("odd", [None, None, 1.0]),
        ("a[0]", [1.0, 1.0]),
        ("a[0][1]", 1.0),
        ("scalar", 7),
        ("flags", [True, False]),
        ("z", ["(1+2j)"]),
    ],
)
def test_every_dtype_and_name(call, stored, name, values) -> None:
    assert call("cat", stored, name, "--json").json["values"] == values


def test_text_has_the_name_the_dtype_and_exact_values(call, stored) -> None:
    assert call("cat", stored, "w[0, :2, 1:3]").out == "w[0, :2, 1:3]: float32, 2 x 2\n[[1., 2.],\n [6., 7.]]\n"
    assert "..." in call("cat", stored, "long", "--limit", 10).out
    assert "..." not in call("cat", stored, "long", "--limit", 0).out


@pytest.mark.parametrize(
    ("name", "text"), [("lr", "0.001\n"), ("nested.list", "[1, 'two']\n"), ("rank", "rank 0: {'seed': 3}\n")]
)
def test_plain_values(call, stored, name, text) -> None:
    ended = call("cat", stored, name)
    assert (ended.code, ended.out) == (0, text)
    assert call("cat", stored, name, "--json").json["dtype"] is None


@pytest.mark.parametrize("value", [[i / 7 for i in range(100)] + [math.nan], {i: str(i) for i in range(100)}])
def test_a_plain_value_that_json_cannot_hold_is_printed_to_its_end(call, tmp_path, value) -> None:
    bcp.save(tmp_path / "c", {"values": [value]})
    assert call("cat", tmp_path / "c", "values").out == f"{[value]!r}\n"
    assert call("cat", tmp_path / "c", "values", "--json").json["objects"][0]["value"] == repr([value])


@pytest.mark.parametrize("index", ["3", "0:2:-1", "1,1,1,1", "x", "...,...", "1.5", "0:1:0"])
def test_an_index_that_the_tensor_does_not_have_is_wrong_usage_with_the_shape(call, stored, index) -> None:
    ended = call("cat", stored, f"w[{index}]")
    assert (ended.code, ended.out) == (2, "")
    assert "3 x 4 x 5" in ended.err


@pytest.mark.parametrize("index", ["[1", "[1][2]", "[1]x"])
def test_brackets_that_are_no_slice_are_wrong_usage_and_not_called_missing(call, stored, index) -> None:
    ended = call("cat", stored, f"w{index}")
    assert ended.code == 2
    assert f"w{index}: a part is given as NAME[SLICE], with one pair of brackets at the end" in ended.err


def test_a_part_of_a_plain_value_is_wrong_usage_and_not_called_missing(call, stored) -> None:
    ended = call("cat", stored, "nested.list[0]")
    assert ended.code == 2
    assert "nested.list is a plain value, of which no part is printed: leave out [0]" in ended.err


def test_a_name_that_is_not_there_is_exit_code_3_with_near_names(call, saved_root) -> None:
    ended = call("cat", saved_root, "embed.weight[0]")
    assert ended.code == 3
    assert "near matches: model.embed.weight" in ended.err


def test_a_name_that_ends_with_a_dot_is_not_near_to_all_names(call, stored) -> None:
    ended = call("cat", stored, "nothing.")
    assert ended.code == 3
    assert "near matches" not in ended.err


def test_damage_in_what_is_read_is_found(call, tmp_path) -> None:
    bcp.save(tmp_path / "c", {"w": torch.arange(1000.0)})
    flip(next((tmp_path / "c" / "data").iterdir()), -8)
    assert call("cat", tmp_path / "c", "w[-3:]").code == 1


def test_a_name_above_plain_values_prints_them_with_their_names(call, stored) -> None:
    assert call("cat", stored, "nested").out.splitlines() == ["nested.list: [1, 'two']"]
    assert call("cat", stored, "nested", "--json").json["objects"] == [
        {"fqn": "nested.list", "rank": None, "type": "list", "value": [1, "two"]},
    ]


def test_a_name_above_tensors_says_what_stands_below(call, saved_root) -> None:
    failed = call("cat", saved_root, "model")
    assert failed.code == 3
    assert "'model' is no tensor and no plain value of" in failed.err
    assert "but stands above" in failed.err
