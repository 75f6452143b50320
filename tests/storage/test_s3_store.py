from __future__ import annotations

import gc
import io
import logging
import re
import threading
import traceback
from contextlib import contextmanager, nullcontext

import pytest
import urllib3
from urllib3.connection import HTTPConnection

from bytecheckpoint.errors import CheckpointError, CheckpointExistsError, CheckpointSaveError, StorageError
from bytecheckpoint.manifest.ranges import Block
from bytecheckpoint.storage.backends import s3_copy, s3_requests, s3_upload
from bytecheckpoint.storage.backends.s3_client import reader_of
from bytecheckpoint.storage.backends.s3_store import S3Store
from bytecheckpoint.storage.open_store import open_store

from .s3_server import running_s3
from .s3_service import LONG_S, Cut, FirstFew, Lose, Refuse, always, moto, no_fault
from .store_contract import StoreContract, blocks_of, get, pattern, put

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of moto

MiB = 1 << 20


@pytest.fixture
def store(s3, s3_prefix) -> S3Store:
    return s3.store(f"{s3_prefix}/runs")


@pytest.fixture
def small_parts(s3, monkeypatch):
    """Uploads in parts from 100 kB on, and parts from 60 kB on."""
    if s3.faults is None:
        pytest.skip("a real service takes no parts as small as these")
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 0)
    monkeypatch.setattr(s3_upload, "_PART_BYTES", 100_000)
    monkeypatch.setattr(s3_upload, "_MIN_PART_BYTES", 60_000)


@pytest.fixture
def hasty(monkeypatch):
    """Next to no time between two attempts."""
    monkeypatch.setattr(s3_requests, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(s3_requests, "_MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(s3_requests, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(s3_requests, "_MAX_BACKOFF_S", 0.02)


class TestS3Store(StoreContract):
    @pytest.fixture
    def store(self, s3, s3_prefix):
        return s3.store(s3_prefix)

    @pytest.mark.parametrize("shift", [0, 1])
    @pytest.mark.parametrize(("num_bytes", "block_bytes"), [(1, 4096), (100_003, 1000), ((2 << 20) + 5, 1 << 19)])
    def test_blocks_land_in_order(self, store, num_bytes, block_bytes, shift):
        super().test_blocks_land_in_order(store, num_bytes, block_bytes, shift)


@pytest.mark.usefixtures("small_parts")
class TestS3StoreInParts(StoreContract):
    @pytest.fixture
    def store(self, s3, s3_prefix):
        yield s3.store(s3_prefix)
        assert s3.uploads(s3_prefix) == []

    @pytest.mark.parametrize("shift", [0, 1])
    @pytest.mark.parametrize(
        ("num_bytes", "block_bytes"), [(100_000, 1000), (100_001, 1000), (1 << 20, 1 << 18), ((1 << 20) + 5, 100_001)]
    )
    def test_blocks_land_in_order(self, store, num_bytes, block_bytes, shift):
        super().test_blocks_land_in_order(store, num_bytes, block_bytes, shift)

    def test_of_many_writers_in_parts_one_wins(self, store):
        contents = [pattern(300_000 + number) for number in range(4)]
        barrier = threading.Barrier(len(contents))
        ended: list[str] = []

        def write(data: bytes) -> None:
            blocks = blocks_of(data, block_bytes=100_000)
            first = blocks[0].content

            def content():
                barrier.wait()
                return first()

            try:
                store.write("x", [blocks[0]._replace(content=content), *blocks[1:]], replace=False)
                ended.append("won")
            except CheckpointExistsError as error:
                ended.append(error.kind)

        threads = [threading.Thread(target=write, args=(data,)) for data in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ended) == ["exists"] * 3 + ["won"]
        assert get(store, "x", 300_000) == contents[0][:300_000]


def test_s3_urls_are_opened_as_s3_stores(s3):
    def opened(url, **options):
        return open_store(url, storage_options={**s3.options, **options}, writer_threads=1)

    for url in ("s3://bucket", "s3a://bucket/some/where", "s3://bucket/"):
        assert isinstance(opened(url), S3Store)
        assert str(opened(url)) == url
    assert not isinstance(opened("simplecache::s3://bucket/x"), S3Store)
    assert not isinstance(opened("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/mine/x"), S3Store)


def test_the_root_of_a_bucket(s3, s3_prefix):
    root = S3Store(f"s3://{s3.bucket}", s3.options, writer_threads=1, timeout_s=LONG_S)
    put(root, f"{s3_prefix}/x", b"1")
    assert root.list("")[s3_prefix] is None
    assert root.list(s3_prefix) == {"x": 1}
    assert get(root, f"{s3_prefix}/x", 1) == b"1"


@pytest.mark.usefixtures("small_parts")
def test_parts_go_out_several_at_a_time_and_straight_from_the_blocks_memory(s3_faults, store, monkeypatch):
    """Each part waits in the server until three others have come."""
    meeting = threading.Barrier(4)
    data, sent = pattern(400_000), []

    def choose(line, _environ):
        if "partNumber" in line:
            meeting.wait(timeout=60)

    def send_in_pieces(request, **_more):
        if isinstance(request.body, memoryview):
            sent.append(request.body.obj)

    s3_faults.choose = choose
    store._requests._client.meta.events.register_first("before-send.s3", send_in_pieces)
    try:
        blocks = [
            Block(start, 100_000, lambda start=start: nullcontext(memoryview(data)[start : start + 100_000]))
            for start in range(0, len(data), 100_000)
        ]
        store.write("x", blocks, replace=False)
    finally:
        store._requests._client.meta.events.unregister("before-send.s3", send_in_pieces)
    assert len(sent) == 4
    assert all(memory is data for memory in sent)
    assert get(store, "x", len(data)) == data


@pytest.mark.usefixtures("small_parts")
def test_max_concurrency_bounds_the_blocks_that_are_held(s3, s3_prefix, s3_faults):
    held, most, lock = [0], [0], threading.Lock()
    store = s3.store(s3_prefix, max_concurrency=2)

    def count(change: int) -> None:
        with lock:
            held[0] += change
            most[0] = max(most[0], held[0])

    @contextmanager
    def counted(content):
        with content() as view:
            count(1)
            try:
                yield view
            finally:
                count(-1)

    blocks = [
        block._replace(content=lambda content=block.content: counted(content))
        for block in blocks_of(pattern(800_000), block_bytes=100_000)
    ]
    store.write("x", blocks, replace=False)
    assert most[0] <= 2
    assert sum("partNumber" in line for line in s3_faults.requests) == 8


def test_an_object_in_parts_of_their_real_size(s3, s3_prefix, store):
    data = pattern(18 * MiB + 7)
    store.write("x", blocks_of(data, block_bytes=6 * MiB), replace=False)
    assert get(store, "x", len(data)) == data
    assert get(store, "x", 1000, 12 * MiB - 500) == data[12 * MiB - 500 :][:1000]
    with pytest.raises(CheckpointExistsError):
        store.write("x", blocks_of(data, block_bytes=6 * MiB), replace=False)
    store.write("x", blocks_of(data[::-1], block_bytes=6 * MiB), replace=True)
    assert get(store, "x", len(data)) == data[::-1]
    assert s3.uploads(s3_prefix) == []


@pytest.mark.usefixtures("small_parts")
def test_small_blocks_are_joined_to_parts(s3_faults, store):
    data = pattern(1_000_003)
    store.write("x", blocks_of(data, block_bytes=30_000), replace=False)
    assert sum("partNumber" in line for line in s3_faults.requests) == 9
    assert get(store, "x", len(data)) == data


def test_reads_ask_for_exactly_what_is_wanted(s3_faults, store):
    put(store, "x", pattern(1000))
    s3_faults.requests.clear()
    assert get(store, "x", 17, 100) == pattern(1000)[100:117]
    assert s3_faults.ranges == ["bytes=100-116"]
    assert len(s3_faults.requests) == 1


def test_a_listing_of_many_pages(s3, s3_prefix, s3_faults):
    store = s3.store(s3_prefix, s3_additional_kwargs={"MaxKeys": 2})
    for number in range(5):
        put(store, f"folder/{number}", b"1")
        put(store, f"folder/deeper-{number}/x", b"1")
    s3_faults.requests.clear()
    expected = {str(number): 1 for number in range(5)} | {f"deeper-{number}": None for number in range(5)}
    assert store.list("folder") == expected
    assert len(s3_faults.requests) == 5


def test_an_object_and_a_folder_of_one_name_may_be_on_two_pages(s3, s3_prefix):
    store = s3.store(s3_prefix, s3_additional_kwargs={"MaxKeys": 1})
    put(store, "folder/x", b"1")
    try:
        put(store, "folder/x/y", b"12")
    except CheckpointError:
        pytest.skip("in this service, a name is that of an object or that of a folder")
    assert store.list("folder") == {"x": 1}


def test_an_object_that_marks_a_folder_is_no_entry(s3, s3_prefix, store):
    for key in ("runs/", "runs/step/"):
        s3.client().put_object(Bucket=s3.bucket, Key=f"{s3_prefix}/{key}", Body=b"")
    assert store.list("") == {"step": None}
    assert store.list("step") == {}


@pytest.mark.usefixtures("hasty", "small_parts")
@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (Refuse(503, "SlowDown"), 3),
        (Refuse(500, "InternalError"), 2),
        (Refuse(429, "TooManyRequests"), 1),
        (Refuse(400, "RequestTimeout"), 1),
        (Lose(), 2),
    ],
)
@pytest.mark.parametrize("operation", ["PUT .*/x$", "partNumber", "POST .*uploads$", "POST .*uploadId", "GET .*/x$"])
def test_what_passes_does_no_harm(s3, s3_prefix, s3_faults, store, fault, times, operation):
    data = pattern(90_000 if operation == "PUT .*/x$" else 300_000)
    blocks = blocks_of(data, block_bytes=100_000)
    s3_faults.choose = faults = FirstFew(operation, fault, times=times)
    store.write("x", blocks, replace=False)
    assert get(store, "x", len(data)) == data
    assert faults.num_left == 0
    s3_faults.reset()
    assert s3.uploads(s3_prefix) == []
    assert s3.objects(s3_prefix) == [f"{s3_prefix}/runs/x"]


@pytest.mark.usefixtures("hasty", "small_parts")
@pytest.mark.parametrize("fault", [Refuse(200, "InternalError"), Refuse(200, "")], ids=["error", "nothing"])
def test_an_upload_whose_completion_is_answered_200_without_an_object_is_completed_again(
    s3, s3_prefix, s3_faults, store, fault
):
    """S3 answers before it has put the parts together, so that what fails comes in the body."""
    data = pattern(300_000)
    s3_faults.choose = faults = FirstFew("POST .*uploadId", fault, times=2)
    store.write("x", blocks_of(data, block_bytes=100_000), replace=False)
    assert faults.num_left == 0
    assert get(store, "x", len(data)) == data
    s3_faults.reset()
    assert s3.uploads(s3_prefix) == []


@pytest.mark.usefixtures("hasty", "small_parts")
@pytest.mark.parametrize(
    ("code", "kind"), [("InternalError", "unavailable"), ("AccessDenied", "permission"), ("", "unavailable")]
)
@pytest.mark.parametrize("replace", [False, True])
def test_an_upload_that_is_only_ever_completed_with_200_and_no_object_fails(
    s3, s3_prefix, s3_faults, code, kind, replace
):
    store = s3.store(s3_prefix, timeout_s=0.4)
    old = pattern(1000)
    if replace:
        put(store, "x", old)
    s3_faults.choose = always("POST .*uploadId", Refuse(200, code))
    with pytest.raises(StorageError, match=code or "names no object") as caught:
        store.write("x", blocks_of(pattern(300_000), block_bytes=100_000), replace=replace)
    assert caught.value.kind == kind
    s3_faults.reset()
    assert s3.uploads(s3_prefix) == []
    assert s3.objects(s3_prefix) == ([f"{s3_prefix}/x"] if replace else [])
    if replace:
        assert get(store, "x", len(old)) == old


@pytest.mark.usefixtures("hasty")
def test_a_read_goes_on_where_it_was_cut(s3_faults, store):
    data = pattern(3 * MiB)
    put(store, "x", data)
    s3_faults.ranges.clear()
    s3_faults.choose = FirstFew("GET", Cut(2 * MiB + 1000))
    assert get(store, "x", len(data)) == data
    first, second = s3_faults.ranges
    assert first == f"bytes=0-{3 * MiB - 1}"
    start = int(second.removeprefix("bytes=").partition("-")[0])
    assert 0 < start <= 2 * MiB + 1000


@pytest.mark.usefixtures("hasty", "small_parts")
@pytest.mark.parametrize("operation", ["PUT .*/x$", "partNumber", "POST .*uploads$", "POST .*uploadId"])
def test_what_is_given_up_says_how_often_and_how_long_it_was_tried_and_leaves_nothing(
    s3, s3_prefix, s3_faults, operation
):
    store = s3.store(s3_prefix, timeout_s=0.4)
    blocks = blocks_of(pattern(90_000 if operation == "PUT .*/x$" else 300_000), block_bytes=100_000)
    s3_faults.choose = always(operation, Refuse(503, "SlowDown"))
    with pytest.raises(StorageError, match=r"SlowDown.*after \d+ attempts? in \d+\.\d s") as caught:
        store.write("x", blocks, replace=False)
    assert caught.value.kind == "unavailable"
    assert caught.value.path == f"{store}/x"
    s3_faults.reset()
    assert s3.objects(s3_prefix) == []
    assert s3.uploads(s3_prefix) == []


@pytest.mark.usefixtures("hasty", "small_parts")
def test_an_upload_that_is_given_up_half_way_says_at_what_rate_it_went_and_what_is_left(s3, s3_prefix, s3_faults):
    store = s3.store(s3_prefix, timeout_s=0.4)
    all_parts = always("partNumber", Refuse(503, "SlowDown"))
    s3_faults.choose = lambda line, environ: (
        all_parts(line, environ) if "partNumber=3" in environ["QUERY_STRING"] else None
    )
    with pytest.raises(StorageError) as caught:
        store.write("x", blocks_of(pattern(300_000), block_bytes=100_000), replace=False)
    assert re.search(
        r"after \d+ attempts? in \d+\.\d s; 0\.2 of 0\.3 MB were there after \d+\.\d s, [\d.,]+ MB/s, at which the "
        r"rest takes \d+\.\d s\)",
        caught.value.message,
    )


@pytest.mark.usefixtures("hasty")
def test_a_read_that_is_given_up_half_way_says_at_what_rate_it_went_and_what_is_left(s3, s3_prefix, s3_faults):
    store = s3.store(s3_prefix, timeout_s=0.4)
    put(store, "x", pattern(4 * MiB))
    half, then_none = FirstFew("GET", Cut(2 * MiB)), always("GET", Refuse(503, "SlowDown"))
    s3_faults.choose = lambda *request: half(*request) or then_none(*request)
    with pytest.raises(StorageError) as caught:
        get(store, "x", 4 * MiB)
    assert re.search(
        r"after \d+ attempts? in \d+\.\d s; 2\.1 of 4\.2 MB were there after \d+\.\d s, [\d.,]+ MB/s, at which the "
        r"rest takes \d+\.\d s\)",
        caught.value.message,
    )


@pytest.mark.usefixtures("hasty", "small_parts")
def test_parts_left_behind_by_a_service_that_is_gone_are_named(s3, s3_prefix, s3_faults, monkeypatch):
    monkeypatch.setattr(s3_upload, "_CLEAN_UP_S", 0.05)
    store = s3.store(s3_prefix, timeout_s=0.2)
    s3_faults.choose = always("uploadId", Refuse(503, "SlowDown"))
    with pytest.raises(StorageError, match="bcp gc"):
        store.write("x", blocks_of(pattern(300_000), block_bytes=100_000), replace=False)
    s3_faults.reset()
    (pending,) = store.pending_uploads("")
    assert pending.name == "x"
    store.abort_upload(pending)
    store.abort_upload(pending)
    assert store.pending_uploads("") == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("moment", ["entered", "part"])
def test_a_block_or_a_part_that_fails_leaves_nothing(s3, s3_prefix, s3_faults, store, moment):
    blocks = blocks_of(pattern(300_000), block_bytes=100_000)
    if moment == "entered":
        blocks[1] = blocks[1]._replace(content=lambda: 1 / 0)
    else:
        s3_faults.choose = FirstFew("partNumber", Refuse(403, "AccessDenied"))
    with pytest.raises(ZeroDivisionError if moment == "entered" else StorageError):
        store.write("x", blocks, replace=False)
    gc.collect()
    s3_faults.reset()
    assert s3.objects(s3_prefix) == []
    assert s3.uploads(s3_prefix) == []


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_write_whose_answers_are_lost_is_a_success(s3_faults, store, replace, num_lost):
    s3_faults.choose = FirstFew("PUT .*/manifest", Lose(), times=num_lost)
    put(store, "manifest", b"mine", replace=replace)
    assert get(store, "manifest", 4) == b"mine"


@pytest.mark.usefixtures("hasty")
def test_a_write_that_succeeded_with_its_last_attempt_is_a_success(s3, s3_prefix, s3_faults):
    """No answer ever comes, but the object is the one that was written."""
    store = s3.store(s3_prefix, timeout_s=0.2)
    s3_faults.choose = always("PUT .*/manifest", Lose())
    put(store, "manifest", b"mine", replace=True)
    assert get(store, "manifest", 4) == b"mine"


@pytest.mark.usefixtures("hasty")
def test_losing_to_another_writer_is_told_from_a_lost_answer(s3, s3_prefix, s3_faults, store):
    """Also where the other one writes the very same bytes."""

    def choose(line, _environ):
        if line.startswith("PUT") and line.endswith("/m"):
            s3_faults.choose = no_fault
            s3.client().put_object(Bucket=s3.bucket, Key=f"{s3_prefix}/runs/m", Body=b"same")
            return Lose()
        return None

    s3_faults.choose = choose
    with pytest.raises(CheckpointExistsError):
        put(store, "m", b"same")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("stood", [True, False])
def test_a_lost_answer_does_not_bring_back_what_another_writer_has_replaced_since(
    s3, s3_prefix, s3_faults, store, stood
):
    if stood:
        put(store, "m", b"before")

    def choose(line, _environ):
        """Ours is replaced as soon as it is there."""
        if not (line.startswith("PUT") and line.endswith("/m")):
            return None
        s3_faults.choose = no_fault
        s3.client().put_object(Bucket=s3.bucket, Key=f"{s3_prefix}/runs/m", Body=b"theirs")
        return Refuse(500, "InternalError")

    s3_faults.choose = choose
    with pytest.raises(CheckpointExistsError, match="meanwhile") as caught:
        put(store, "m", b"mine", replace=True)
    assert caught.value.kind == "exists"
    assert get(store, "m", 6) == b"theirs"


@pytest.mark.usefixtures("hasty")
def test_a_replacing_write_that_failed_is_tried_again(s3_faults, store):
    put(store, "m", b"before")
    s3_faults.choose = FirstFew("PUT .*/m", Refuse(500, "InternalError"), times=2)
    put(store, "m", b"mine", replace=True)
    assert get(store, "m", 4) == b"mine"
    s3_faults.choose = FirstFew("HEAD .*/m", Refuse(500, "InternalError"), times=2)
    put(store, "m", b"mine, too", replace=True)
    assert get(store, "m", 9) == b"mine, too"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_look_whether_it_may_be_written_to_leaves_no_upload_whose_answer_was_lost(
    s3, s3_prefix, s3_faults, store, num_lost
):
    s3_faults.choose = faults = FirstFew("POST .*uploads$", Lose(), times=num_lost)
    store.check_writable()
    assert faults.num_left == 0
    assert s3.uploads(s3_prefix) == []
    assert s3.objects(s3_prefix) == []


@pytest.mark.usefixtures("hasty")
def test_all_uploads_whose_answers_were_lost_are_aborted_when_that_of_an_abort_is_lost_too(
    s3, s3_prefix, s3_faults, store
):
    creates, aborts = FirstFew("POST .*uploads$", Lose(), times=3), FirstFew("DELETE", Lose(), times=2)
    s3_faults.choose = lambda line, environ: creates(line, environ) or aborts(line, environ)
    store.check_writable()
    assert s3.uploads(s3_prefix) == []


def _before_the_put(s3_faults, do):
    """Does something between the look at what stands there and the arrival of the PUT."""

    def choose(line, _environ):
        if line.startswith("PUT") and line.endswith("/m"):
            s3_faults.choose = no_fault
            do()

    s3_faults.choose = choose


@pytest.mark.parametrize("stood", [True, False])
def test_a_replacing_write_that_arrives_late_replaces_only_what_it_was_to_replace(
    s3, s3_prefix, s3_faults, store, stood
):
    if stood:
        put(store, "m", b"before")
    theirs = {"Bucket": s3.bucket, "Key": f"{s3_prefix}/runs/m", "Body": b"theirs"}
    _before_the_put(s3_faults, lambda: s3.client().put_object(**theirs))
    with pytest.raises(CheckpointExistsError, match="meanwhile"):
        put(store, "m", b"mine", replace=True)
    assert get(store, "m", 6) == b"theirs"


def test_a_replacing_write_does_not_bring_back_what_was_deleted_meanwhile(s3, s3_prefix, s3_faults, store):
    put(store, "m", b"before")
    key = f"{s3_prefix}/runs/m"
    _before_the_put(s3_faults, lambda: s3.client().delete_object(Bucket=s3.bucket, Key=key))
    with pytest.raises(CheckpointExistsError, match="deleted"):
        put(store, "m", b"mine", replace=True)
    assert store.list("") == {}


@pytest.mark.parametrize("answer", [Refuse(501, "NotImplemented"), Refuse(412, "PreconditionFailed")])
def test_a_service_that_does_not_compare_what_is_replaced_is_written_to(s3_faults, store, answer):
    """Also one that compares in a way of its own, by which nothing is what it was."""
    put(store, "m", b"before")
    s3_faults.choose = lambda _line, environ: answer if "HTTP_IF_MATCH" in environ else None
    put(store, "m", b"mine", replace=True)
    s3_faults.requests.clear()
    put(store, "m", b"mine, too", replace=True)
    assert get(store, "m", 9) == b"mine, too"
    assert sum(line.startswith("PUT") for line in s3_faults.requests) == 1
    put(store, "new", b"1")
    with pytest.raises(CheckpointExistsError):
        put(store, "new", b"2")


def _knows_no_condition(_line, environ):
    return Refuse(501, "NotImplemented") if "HTTP_IF_NONE_MATCH" in environ else None


def test_a_service_without_conditional_writes_is_written_to_and_read_back(s3, s3_prefix, s3_faults):
    store = s3.store(s3_prefix, token="makes a client of its own")
    s3_faults.choose = _knows_no_condition
    put(store, "x", b"1")
    put(store, "y", b"1")
    assert store.list("") == {"x": 1, "y": 1}
    with pytest.raises(CheckpointExistsError):
        put(store, "x", b"2")
    assert sum(line.startswith("PUT") for line in s3_faults.requests) == 3

    def replaced_behind_our_back(line, environ):
        if line.startswith("HEAD") and s3_faults.requests[-2].startswith("PUT"):
            s3_faults.choose = no_fault
            s3.client().put_object(Bucket=s3.bucket, Key=f"{s3_prefix}/z", Body=b"theirs")
        return _knows_no_condition(line, environ)

    s3_faults.choose = replaced_behind_our_back
    with pytest.raises(CheckpointExistsError):
        put(store, "z", b"mine")
    assert get(store, "z", 6) == b"theirs"


def test_a_service_that_ignores_ranges_is_refused(s3_faults, store):
    put(store, "x", b"0123456789")

    def choose(_line, environ):
        environ.pop("HTTP_RANGE", None)

    s3_faults.choose = choose
    with pytest.raises(StorageError, match="cannot read parts") as caught:
        get(store, "x", 4, 3)
    assert caught.value.kind == "unsupported"
    assert get(store, "x", 10) == b"0123456789"


@pytest.mark.parametrize(
    ("fault", "error", "kind"),
    [
        (Refuse(403, "AccessDenied"), StorageError, "permission"),
        (Refuse(403, "RequestTimeTooSkewed"), StorageError, "permission"),
        (Refuse(507, "XMinioStorageFull"), CheckpointSaveError, "no_space"),
        (Refuse(400, "EntityTooLarge"), CheckpointSaveError, "storage"),
        (Refuse(501, "NotImplemented"), StorageError, "unsupported"),
        (Refuse(404, "NoSuchBucket"), StorageError, "unavailable"),
    ],
)
def test_refused_writes_are_typed(s3_faults, store, fault, error, kind):
    s3_faults.choose = always("PUT", fault)
    with pytest.raises(error, match=fault.code if fault.status != 404 else "no bucket") as caught:
        put(store, "x", b"1")
    assert caught.value.kind == kind


@pytest.mark.usefixtures("hasty")
def test_where_nothing_is_compared_a_write_without_an_answer_may_replace_what_came_since(s3, s3_prefix, s3_faults):
    store = s3.store(s3_prefix, timeout_s=0.4, token="makes a client of its own")
    put(store, "m", b"before")

    def choose(line, environ):
        if "HTTP_IF_MATCH" in environ:
            return Refuse(501, "NotImplemented")
        if not line.startswith("PUT"):
            return None
        s3_faults.choose = no_fault
        s3.client().put_object(Bucket=s3.bucket, Key=f"{s3_prefix}/m", Body=b"theirs")
        return Refuse(500, "InternalError")

    s3_faults.choose = choose
    with pytest.raises(StorageError) as caught:
        put(store, "m", b"mine", replace=True)
    assert caught.value.kind == "unavailable"
    assert get(store, "m", 6) == b"theirs"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("refusal", [Refuse(403, "AccessDenied"), Refuse(507, "XMinioStorageFull")])
def test_a_write_that_is_refused_after_one_without_an_answer_may_still_be_carried_out(
    s3_faults, store, replace, refusal
):
    """So nobody may take for certain that it will not be."""
    unanswered = FirstFew("PUT .*/m", Refuse(500, "InternalError"))
    s3_faults.choose = lambda line, environ: unanswered(line, environ) or always("PUT .*/m", refusal)(line, environ)
    with pytest.raises(StorageError, match=rf"{refusal.code}.*2 attempts.*may still be carried out") as caught:
        put(store, "m", b"mine", replace=replace)
    assert caught.value.kind == "unavailable"


@pytest.mark.usefixtures("hasty")
def test_a_write_that_was_told_to_slow_down_and_then_refused_is_not_carried_out(s3_faults, store):
    slowed = FirstFew("PUT .*/m", Refuse(503, "SlowDown"))
    refused = always("PUT .*/m", Refuse(403, "AccessDenied"))
    s3_faults.choose = lambda line, environ: slowed(line, environ) or refused(line, environ)
    with pytest.raises(StorageError, match="AccessDenied") as caught:
        put(store, "m", b"mine")
    assert caught.value.kind == "permission"


@pytest.mark.parametrize(
    ("status", "code", "kind"), [(403, "AccessDenied", "permission"), (400, "InvalidRequest", "unavailable")]
)
def test_refused_reads_are_typed(s3_faults, store, status, code, kind):
    put(store, "x", b"1")
    s3_faults.choose = always("", Refuse(status, code))
    for call in (lambda: get(store, "x", 1), lambda: store.list(""), lambda: store.delete("x")):
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.kind == kind
        assert caught.value.path.startswith(str(store))


def test_what_is_full_stays_full_however_often_it_is_asked(s3_faults, store):
    s3_faults.choose = always("PUT", Refuse(507, "XMinioStorageFull"))
    with pytest.raises(CheckpointSaveError):
        put(store, "x", b"1")
    assert sum(line.startswith("PUT") for line in s3_faults.requests) == 1


def test_writability_is_checked_without_a_trace(s3, s3_prefix, s3_faults, store):
    store.check_writable()
    assert s3.objects(s3_prefix) == []
    assert s3.uploads(s3_prefix) == []
    s3_faults.choose = always("PUT|POST", Refuse(403, "AccessDenied"))
    with pytest.raises(StorageError, match="policy") as caught:
        store.check_writable()
    assert caught.value.kind == "permission"
    s3_faults.choose = always("uploads", Refuse(501, "NotImplemented"))
    store.check_writable()
    s3_faults.choose = always("DELETE", Refuse(403, "AccessDenied"))
    with pytest.warns(UserWarning, match="s3:AbortMultipartUpload"):
        store.check_writable()


def test_a_slow_down_answer_pauses_all_requests_of_the_store(s3, s3_prefix, s3_faults, monkeypatch):
    monkeypatch.setattr(s3_requests, "_FIRST_BACKOFF_S", 0.05)
    store = s3.store(s3_prefix)
    s3_faults.choose = FirstFew("PUT", Refuse(503, "SlowDown"))
    put(store, "x", b"1")
    assert store._requests._backoff._pause_s == 0.05
    assert store.list("") == {"x": 1}


def test_options_of_s3fs_are_taken_and_unknown_ones_refused(s3, s3_prefix):
    store = s3.store(s3_prefix, use_listings_cache=False, default_block_size=1 << 20, config_kwargs={"read_timeout": 9})
    put(store, "x", b"1")
    assert store.list("") == {"x": 1}
    for options in ({"username": "b"}, {"no_such_option": 1}, {"client_kwargs": {"no_such": 1}}):
        with pytest.raises(StorageError, match="storage_options") as caught:
            s3.store(s3_prefix, **options)
        assert caught.value.kind == "unavailable"


@pytest.mark.filterwarnings("ignore")  # of a certificate that nobody has signed
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("is_tls", [False, True])
def test_a_body_is_vouched_for_once(s3, s3_prefix, is_tls):
    """By a checksum within TLS, and else by the signature."""
    told: list[tuple[str, bool]] = []

    def choose(line, environ):
        if line.startswith("PUT"):
            told.append((environ["HTTP_X_AMZ_CONTENT_SHA256"], "HTTP_X_AMZ_CHECKSUM_CRC32" in environ))

    with moto(is_tls=is_tls) as (url, faults):
        client_kwargs = {**s3.options["client_kwargs"], "verify": False}
        store = s3.store(s3_prefix, endpoint_url=url, client_kwargs=client_kwargs)
        faults.choose = choose
        data = pattern(300_000)
        store.write("parts", blocks_of(data, block_bytes=100_000), replace=False)
        store.write("whole", blocks_of(data), replace=False)
        assert get(store, "parts", len(data)) == get(store, "whole", len(data)) == data
    assert len(told) == 4
    for signature, has_checksum in told:
        assert has_checksum == is_tls
        assert (signature == "UNSIGNED-PAYLOAD") == is_tls


def test_credentials_never_show(s3, s3_prefix, s3_faults, caplog, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t0ken-of-the-environment")
    caplog.set_level(logging.DEBUG, logger="bytecheckpoint")
    store = s3.store(s3_prefix, timeout_s=0.4)  # a 400 without a code is retried
    s3_faults.choose = always("", Refuse(400, f"{s3.secret} and t0ken-of-the-environment"))
    for call in (lambda: put(store, "m", b"1"), lambda: store.list(""), store.check_writable):
        with pytest.raises(CheckpointError) as caught:
            call()
        text = "".join(traceback.format_exception(caught.value)) + caplog.text
        assert s3.secret not in text
        assert "t0ken-of-the-environment" not in text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("secret", {"key": "access", "secret": 123}),
        ("password", {"username": "access", "password": 123}),
        ("username", {"username": 123, "password": "of+nobody"}),
        ("aws_session_token", {"client_kwargs": {"aws_session_token": 123}}),
    ],
    ids=["secret", "password", "username", "client_kwargs"],
)
def test_credentials_that_are_no_text_are_refused_by_name(name, options):
    with pytest.raises(StorageError, match=rf"storage_options\['{name}'\] is of type int, and has to be a str"):
        S3Store("s3://bucket/x", options, writer_threads=1, timeout_s=5)


@pytest.fixture
def small_copies(s3, monkeypatch):
    """Copies in parts from 100 kB on."""
    if s3.faults is None:
        pytest.skip("a real service takes no parts as small as these")
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 0)
    monkeypatch.setattr(s3_copy, "MAX_COPY_BYTES", 100_000)
    monkeypatch.setattr(s3_copy, "_PART_BYTES", 60_000)


@pytest.mark.usefixtures("small_copies")
def test_a_large_object_is_copied_in_parts(s3, s3_prefix, store):
    data = pattern(250_000)
    put(store, "a", data)
    store.duplicate("a", "b", num_bytes=len(data))
    assert get(store, "b", len(data)) == data
    assert s3.uploads(s3_prefix) == []


@pytest.mark.usefixtures("small_copies", "hasty")
@pytest.mark.parametrize("request_line", ["POST .*uploadId", "PUT .*partNumber", "POST .*uploads"])
def test_a_copy_in_parts_goes_on_where_an_answer_is_lost(s3, s3_prefix, s3_faults, store, request_line):
    data = pattern(250_000)
    put(store, "a", data)
    s3_faults.choose = FirstFew(request_line, Lose())
    store.duplicate("a", "b", num_bytes=len(data))
    s3_faults.reset()
    assert get(store, "b", len(data)) == data
    assert s3.uploads(s3_prefix) == []


@pytest.mark.usefixtures("small_copies", "hasty")
def test_a_copy_in_parts_that_fails_to_begin_leaves_no_upload_whose_answer_was_lost(s3, s3_prefix, s3_faults, store):
    put(store, "a", pattern(250_000))
    begins, refusals = FirstFew("POST .*uploads$", Lose()), always("POST .*uploads$", Refuse(403, "AccessDenied"))
    s3_faults.choose = lambda line, environ: begins(line, environ) or refusals(line, environ)
    with pytest.raises(StorageError, match="AccessDenied"):
        store.duplicate("a", "b", num_bytes=250_000)
    assert s3.uploads(s3_prefix) == []


@pytest.mark.usefixtures("hasty")
def test_a_copy_whose_answer_has_no_result_is_made_again(s3_faults, store):
    """S3 answers 200 before it copies: that answer alone tells nothing."""
    put(store, "a", pattern(50_000))
    s3_faults.choose = FirstFew("PUT", Refuse(200, ""))
    store.duplicate("a", "b", num_bytes=50_000)
    assert get(store, "b", 50_000) == pattern(50_000)


@pytest.mark.usefixtures("small_copies", "hasty")
@pytest.mark.parametrize("request_line", ["POST .*uploadId", "PUT .*partNumber", "POST .*uploads"])
def test_a_copy_in_parts_whose_answer_has_no_result_goes_on(s3, s3_prefix, s3_faults, store, request_line):
    put(store, "a", pattern(250_000))
    s3_faults.choose = FirstFew(request_line, Refuse(200, ""))
    store.duplicate("a", "b", num_bytes=250_000)
    assert get(store, "b", 250_000) == pattern(250_000)
    assert s3.uploads(s3_prefix) == []


@pytest.mark.usefixtures("small_copies", "hasty")
def test_a_copy_in_parts_that_fails_leaves_nothing(s3, s3_prefix, s3_faults, store):
    put(store, "a", pattern(250_000))
    s3_faults.choose = always("PUT .*partNumber", Refuse(403, "AccessDenied"))
    with pytest.raises(StorageError):
        store.duplicate("a", "b", num_bytes=250_000)
    s3_faults.reset()
    assert set(store.list("")) == {"a"}
    assert s3.uploads(s3_prefix) == []


def test_many_folders_are_looked_into_with_few_requests(s3_faults, store):
    for step in range(30):
        put(store, f"step_{step:08d}/data/x", b"1")
        if step % 5:
            put(store, f"step_{step:08d}/manifest.bcp", b"1")
    folders = [f"step_{step:08d}" for step in range(29, -1, -1)]
    s3_faults.requests.clear()
    assert store.in_folders(folders, "manifest.bcp") == [step % 5 > 0 for step in range(29, -1, -1)]
    assert len(s3_faults.requests) == 1


def test_many_folders_are_listed_with_few_requests(s3_faults, store):
    for step in range(30):
        put(store, f"step_{step:08d}/manifest.bcp", b"123")
        put(store, f"step_{step:08d}/data/x", b"1")
    folders = [f"step_{step:08d}" for step in (*range(29, -1, -1), 40)]
    s3_faults.requests.clear()
    assert store.list_many(folders) == [{"manifest.bcp": 3, "data": None}] * 30 + [None]
    assert len(s3_faults.requests) == 1


def test_a_listing_goes_on_in_the_folder_in_which_a_page_ended(store, monkeypatch):
    for step in range(6):
        for name in ("data/1", "data/2", "manifest.bcp"):
            put(store, f"step_{step}/{name}", b"1")
    answered = _cut_pages(store, monkeypatch, max_keys=8)
    listing = {"manifest.bcp": 1, "data": None}
    assert store.list_many([f"step_{step}" for step in range(6)]) == [listing] * 6
    assert [len(page["Contents"]) for page in answered] == [8, 8, 6]


def _cut_pages(store, monkeypatch, *, max_keys):
    answered = []
    real = store._requests.call

    def call(operation, policy, **given):
        answered.append(real(operation, policy, **given, MaxKeys=max_keys))
        return answered[-1]

    monkeypatch.setattr(store._requests, "call", call)
    return answered


def test_pages_that_reach_one_folder_only_are_given_up(store, monkeypatch):
    for step in range(5):
        for number in range(4):
            put(store, f"step_{step}/data/{number}", b"1")
        put(store, f"step_{step}/manifest.bcp", b"1")
    _cut_pages(store, monkeypatch, max_keys=3)
    folders = [f"step_{step}" for step in range(5)]
    assert store.in_folders(folders, "manifest.bcp") == [True, None, None, None, None]
    assert store.list_many(folders) == [None] * 5


def test_an_empty_page_that_is_not_the_last_tells_of_no_folder(store, monkeypatch):
    folders = [f"step_{step}" for step in range(5)]
    for folder in folders:
        put(store, f"{folder}/manifest.bcp", b"1")
    monkeypatch.setattr(store._requests, "call", lambda *_, **__: {"IsTruncated": True, "KeyCount": 0})
    assert store.in_folders(folders, "manifest.bcp") == [None] * 5  # looked at one by one then
    assert store.list_many(folders) == [None] * 5


def test_ranges_are_read_into_place_through_one_connection(monkeypatch):
    content = pattern(4 << 20)
    opened = []
    connect = HTTPConnection.connect
    monkeypatch.setattr(HTTPConnection, "connect", lambda self: (opened.append(self), connect(self))[1])
    monkeypatch.setattr(urllib3.HTTPResponse, "readinto", lambda *_: pytest.fail("the client made a copy"))
    with running_s3() as server:
        options = {"endpoint_url": server.url, "key": "k", "secret": "s", "client_kwargs": {"region_name": "us-east-1"}}
        store = S3Store("s3://bucket", options, writer_threads=1, timeout_s=LONG_S)
        server.objects["bucket/object"] = content
        for start in (0, 5, 1 << 20, len(content) - 7):
            num_bytes = min((2 << 20) + 3, len(content) - start)
            assert get(store, "object", num_bytes, start) == content[start : start + num_bytes]
    assert len(opened) == 1


def test_a_body_that_keeps_its_connection_elsewhere_is_read_by_its_own_method():
    body = io.BytesIO(b"abcdef")
    target = bytearray(4)
    assert reader_of(body)(memoryview(target)) == 4
    assert target == b"abcd"
