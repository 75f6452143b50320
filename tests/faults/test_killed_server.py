"""An object store that is killed while it is written to, and comes back or not: the save completes, or fails in time;
what was committed before loads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import bytecheckpoint as bcp
from faults.lasting_s3 import LastingS3
from faults.moto_bucket import storage_options
from faults.object_store_faults import GAVE_UP, MAY_BE_COMMITTED
from faults.s3_calls import in_a_hurry, in_small_parts
from faults.seams import loads_as, seen, state_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of client libraries

URL = "s3://bucket/run"
MOMENTS = {
    "the upload begins": (r"^POST .*\?uploads", 1),
    "a part is sent": (r"^PUT .*partNumber", 1),
    "another part is sent": (r"^PUT .*partNumber", 3),
    "the upload ends": (r"^POST .*\?uploadId", 1),
    "the manifest is sent": (r"^PUT .*/manifest", 1),
}
QUICK = {("another part is sent", False), ("the manifest is sent", True)}
"""Moments, and whether the save is asynchronous."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LastingS3]:
    server = LastingS3(tmp_path / "s3")
    server.start()
    yield server
    server.close()


def options_for(server: LastingS3) -> dict[str, object]:
    return storage_options(server.url, config_kwargs={"connect_timeout": 1, "read_timeout": 1})


def save(server: LastingS3, value: float, step: int, *, async_save: bool, timeout_s: float) -> object:
    options = bcp.SaveOptions(timeout_s=timeout_s)
    with in_a_hurry(), in_small_parts():
        return bcp.save(
            URL,
            state_of(0, value),
            step=step,
            async_save=async_save,
            storage_options=options_for(server),
            options=options,
        ).result()


def loads(server: LastingS3, value: float, step: int) -> bool:
    return loads_as(URL, 0, value, step=step, storage_options=options_for(server))


@pytest.mark.parametrize(
    ("moment", "async_save"),
    [
        pytest.param(moment, async_save, marks=() if (moment, async_save) in QUICK else pytest.mark.long)
        for moment in MOMENTS
        for async_save in (False, True)
    ],
)
def test_a_server_that_comes_back(server: LastingS3, moment: str, async_save: bool) -> None:
    save(server, 1.0, 1, async_save=False, timeout_s=60)
    server.close()
    pattern, number = MOMENTS[moment]
    server.start(dies_at=pattern, number=number)

    def bring_back() -> None:
        server.wait_until_dead()
        server.start()

    helper = threading.Thread(target=bring_back)
    helper.start()
    save(server, 2.0, 2, async_save=async_save, timeout_s=60)
    helper.join()
    assert loads(server, 1.0, 1)
    assert loads(server, 2.0, 2)
    assert server.uploads == []


@pytest.mark.parametrize(
    "moment", ["another part is sent", pytest.param("the manifest is sent", marks=pytest.mark.long)]
)
def test_a_server_that_stays_away(server: LastingS3, moment: str) -> None:
    save(server, 1.0, 1, async_save=False, timeout_s=60)
    server.close()
    pattern, number = MOMENTS[moment]
    server.start(dies_at=pattern, number=number)
    error = seen(lambda: save(server, 2.0, 2, async_save=False, timeout_s=4))
    server.wait_until_dead()
    assert error is not None
    assert error.cls in {"StorageError", "CheckpointSaveError"}
    gave_up = GAVE_UP.search(error.message)
    assert gave_up
    assert float(gave_up["seconds"]) < 30, "it was told to give up after half of 4 s"
    server.start()
    assert loads(server, 1.0, 1)
    assert bcp.steps(URL, storage_options=options_for(server)) == [1]
    assert (MAY_BE_COMMITTED in error.message) == (moment == "the manifest is sent")
    save(server, 3.0, 2, async_save=False, timeout_s=60)
    assert loads(server, 3.0, 2)
