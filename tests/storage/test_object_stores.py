"""Whole saves and loads to S3, and what becomes of a URL that cannot be saved to."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from reserved_port import reserved_port

import bytecheckpoint as bcp
from bytecheckpoint.storage.backends import s3_requests
from storage.s3_service import Refuse, always
from storage.store_contract import blocks_of, get

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto


def _state(seed: int, num_layers: int = 5) -> dict:
    """1.2 MB a layer."""
    generator = torch.Generator().manual_seed(seed)
    weights = {f"layer{number}": torch.randn(300, 1000, generator=generator) for number in range(num_layers)}
    return {"model": weights, "step": seed, "note": "as it was"}


def _assert_equal(state: dict, other: dict) -> None:
    assert state["step"] == other["step"]
    assert all(torch.equal(state["model"][name], other["model"][name]) for name in other["model"])


@pytest.mark.parametrize("async_save", [False, True])
def test_a_large_state_goes_to_s3_in_parts_and_comes_back(s3, s3_prefix, async_save):
    url = f"s3://{s3.bucket}/{s3_prefix}"
    bcp.save(url, _state(1, 16), async_save=async_save, storage_options=s3.options).result()
    state = _state(2, 16)
    bcp.load(url, state, storage_options=s3.options)
    _assert_equal(state, _state(1, 16))
    assert s3.uploads(s3_prefix) == []


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_steps_in_s3_are_found_refused_and_replaced(s3, s3_prefix, codec):
    url = f"s3://{s3.bucket}/{s3_prefix}"
    options = bcp.SaveOptions(codec=codec)
    for step in (1, 2):
        bcp.save(url, _state(step), step=step, storage_options=s3.options, options=options)
    assert bcp.steps(url, s3.options) == [1, 2]
    state = _state(7)
    report = bcp.load(url, state, storage_options=s3.options)
    assert report.step == 2
    _assert_equal(state, _state(2))
    with pytest.raises(bcp.CheckpointExistsError):
        bcp.save(url, _state(2), step=2, storage_options=s3.options)
    overwrite = bcp.SaveOptions(overwrite=True)
    bcp.save(url, _state(3), step=2, storage_options=s3.options, options=overwrite)
    bcp.load(url, state, storage_options=s3.options)
    _assert_equal(state, _state(3))
    assert s3.uploads(s3_prefix) == []


def test_a_copied_checkpoint_loads_the_same(tmp_path):
    bcp.save(tmp_path / "first", _state(1), step=5)
    shutil.copytree(tmp_path / "first", tmp_path / "second" / "deeper")
    shutil.rmtree(tmp_path / "first")
    state = _state(2)
    assert bcp.load(tmp_path / "second" / "deeper", state).step == 5
    _assert_equal(state, _state(1))
    # The folder of the step alone, under a name that says nothing.
    shutil.copytree(tmp_path / "second" / "deeper" / "step_00000005", tmp_path / "elsewhere")
    state = _state(2)
    bcp.load(tmp_path / "elsewhere", state)
    _assert_equal(state, _state(1))


def test_a_checkpoint_that_was_uploaded_to_another_prefix_loads_the_same(s3, s3_prefix, tmp_path):
    bcp.save(tmp_path / "local", _state(1), step=5)
    store = s3.store(f"{s3_prefix}/uploaded/by hand")
    for path in (tmp_path / "local").rglob("*"):
        if path.is_file():
            name = path.relative_to(tmp_path / "local").as_posix()
            store.write(name, blocks_of(path.read_bytes()), replace=False)
    client = s3.client()
    for key in s3.objects(f"{s3_prefix}/uploaded/by hand"):
        other = key.replace("uploaded/by hand", "moved")
        client.copy_object(Bucket=s3.bucket, Key=other, CopySource={"Bucket": s3.bucket, "Key": key})
    for prefix in ("uploaded/by hand", "moved"):
        state, url = _state(2), f"s3://{s3.bucket}/{s3_prefix}/{prefix}"
        assert bcp.load(url, state, storage_options=s3.options).step == 5
        _assert_equal(state, _state(1))
    # And down again.
    for key in s3.objects(f"{s3_prefix}/moved"):
        path = tmp_path / "down" / key.removeprefix(f"{s3_prefix}/moved/")
        path.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = client.head_object(Bucket=s3.bucket, Key=key)["ContentLength"]
        path.write_bytes(get(s3.store(s3_prefix), key.removeprefix(f"{s3_prefix}/"), num_bytes))
    state = _state(2)
    assert bcp.load(tmp_path / "down", state).step == 5
    _assert_equal(state, _state(1))


@pytest.fixture
def nobodys_port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def _try_to_save(rank: int, _world_size: int, argument: tuple) -> tuple:
    """What a rank is told, and how often anything of its state had been staged by then."""
    from bytecheckpoint.saving import prepare

    url, options, is_async = argument
    staged: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "new_snapshot", lambda *args, **_more: staged.append(args))
        patch.setattr(s3_requests, "_FIRST_CONTACT_S", 0.5)
        try:
            bcp.save(url, {"w": torch.ones(4)}, storage_options=options, async_save=is_async)
        except bcp.CheckpointError as error:
            return type(error).__name__, error.kind, str(error), len(staged)
    return ("nothing was raised",)


def _cases(s3, nobodys_port):
    somewhere = f"s3://{s3.bucket}/x"
    wrong = {**s3.options, "key": "nobody", "secret": "wr0ng-secret"}
    nobody = {**s3.options, "endpoint_url": f"http://127.0.0.1:{nobodys_port}"}
    return {
        "no bucket": ("s3://no-such-bucket/x", s3.options, "unavailable", "no bucket 'no-such-bucket'.*check the URL"),
        "credentials": (somewhere, wrong, "permission", "InvalidAccessKeyId.*check the credentials"),
        "nobody there": (
            somewhere,
            nobody,
            "unavailable",
            r"after \d+ attempts?.*check that http://127.* endpoint_url",
        ),
        "read-only": (somewhere, s3.options, "permission", "AccessDenied.*policy"),
        "unknown": ("nosuchthing://x/y", None, "unsupported", "'nosuchthing'.*pip install"),
        "typo": (somewhere, {**s3.options, "endpoint": "http://x"}, "unavailable", "endpoint.*storage_options"),
    }


@pytest.mark.parametrize(
    ("case", "is_async"),
    [
        *[(case, False) for case in ("no bucket", "credentials", "nobody there", "read-only", "unknown", "typo")],
        ("no bucket", True),
        ("read-only", True),
    ],
)
def test_where_nothing_can_be_saved_every_rank_says_so_before_it_stages(
    workers, s3, s3_faults, nobodys_port, case, is_async
):
    url, options, kind, words = _cases(s3, nobodys_port)[case]
    if case == "read-only":
        s3_faults.choose = always("PUT|POST", Refuse(403, "AccessDenied"))
    if case == "credentials":
        s3_faults.choose = _knows_only(s3.key)
    told = workers.run(_try_to_save, (url, options, is_async), world_size=2)
    for name, found_kind, message, num_staged in told:
        assert (name, found_kind, num_staged) == ("StorageError", kind, 0)
        assert re.search(words, message, re.DOTALL), message
        assert "wr0ng-secret" not in message


def _knows_only(key: str):
    def choose(_line, environ):
        is_known = f"Credential={key}/" in environ.get("HTTP_AUTHORIZATION", "")
        return None if is_known else Refuse(403, "InvalidAccessKeyId")

    return choose


def _try_to_load(_rank: int, _world_size: int, argument: tuple) -> tuple:
    url, options = argument
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(s3_requests, "_FIRST_CONTACT_S", 0.5)
        try:
            bcp.load(url, {"w": torch.ones(4)}, storage_options=options)
        except bcp.CheckpointError as error:
            return type(error).__name__, error.kind, str(error)
    return ("nothing was raised",)


@pytest.mark.parametrize("case", ["no bucket", "nobody there"])
def test_where_nothing_can_be_read_every_rank_says_so(workers, s3, s3_faults, nobodys_port, case):
    url, options, kind, words = _cases(s3, nobodys_port)[case]
    for name, found_kind, message in workers.run(_try_to_load, (url, options), world_size=2):
        assert (name, found_kind) == ("StorageError", kind)
        assert re.search(words, message, re.DOTALL), message


def _save_and_load(rank: int, world_size: int, argument: tuple) -> None:
    url, options = argument
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(600_000.0).reshape(300, 2000)
    bcp.save(url, {"w": distribute_tensor(whole, mesh, [Shard(0)])}, step=1, storage_options=options)
    target = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])
    bcp.load(url, {"w": target}, storage_options=options)
    assert torch.equal(target.full_tensor(), whole)
    dist.barrier()


def test_ranks_save_to_s3_and_load_in_another_layout(workers, s3, s3_prefix):
    workers.run(_save_and_load, (f"s3://{s3.bucket}/{s3_prefix}", s3.options), world_size=2)
    assert s3.uploads(s3_prefix) == []
