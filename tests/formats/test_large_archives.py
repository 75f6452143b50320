"""Archives as torch.save writes them, beyond the sizes that plain zip knows. Their tensors are holes of a sparse
file, so they take no space and no time.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

import bytecheckpoint as bcp
from bytecheckpoint.conversion.stream import Late, TensorSpan, run_bytes
from bytecheckpoint.conversion.torch_save import save_runs
from bytecheckpoint.loading.plain_trees import TensorStub
from bytecheckpoint.planner.copy_plan import same_tensor

NUM_BYTES = 5 << 30
WANTED = [
    same_tensor("a", "uint8", (NUM_BYTES,), stored_fqn="a"),
    same_tensor("b", "float8_e8m0fnu", (3,), stored_fqn="b"),
    same_tensor("c", "complex64", (2, 2), stored_fqn="c"),
]


def write_sparse(path: Path) -> None:
    runs = save_runs({"a": TensorStub(0), "b": TensorStub(1), "c": TensorStub(2), "tied": TensorStub(2)}, WANTED)
    with path.open("wb") as file:
        position = 0
        for run in runs:
            file.seek(position)
            if not isinstance(run, TensorSpan):
                file.write(run.content({}) if isinstance(run, Late) else run)
            position += run_bytes(run)
            assert isinstance(run, TensorSpan) or file.tell() == position
        assert file.tell() == position


def test_a_member_and_offsets_beyond_4_gib(tmp_path) -> None:
    path = tmp_path / "large.pt"
    write_sparse(path)
    state = torch.load(path, weights_only=True, mmap=True)
    assert state["a"].shape == (NUM_BYTES,)
    assert (state["b"].dtype, state["c"].dtype) == (torch.float8_e8m0fnu, torch.complex64)
    assert (state["c"] == 0).all()
    assert state["tied"].data_ptr() == state["c"].data_ptr()
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}
        assert members["archive/data/0"].file_size == NUM_BYTES
        assert members["archive/version"].header_offset > NUM_BYTES
        assert archive.read("archive/version") == b"3\n"
    found = bcp.open(path)
    assert found["a"][NUM_BYTES - 2 :].tolist() == [0, 0]
    assert list(found) == ["a", "b", "c", "tied"]
