"""Ranks that want the same bytes read them once and pass them on: what arrives is bit-equal, little is read, and what
goes wrong on one rank, or on the way, is known to all.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_url_store import url_of
from faults.lost_ranks import LATER_S, NOISE_S
from faults.seams import Seam, Seen, after, before, holds, loads_as, raising, seen, state_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint import phases
from bytecheckpoint.distributed.liveness import connected_threads
from bytecheckpoint.loading import exchange as exchange_module
from bytecheckpoint.loading import receive
from bytecheckpoint.loading.between_ranks.host_exchange import HostExchange
from bytecheckpoint.loading.read import Source, Traffic
from bytecheckpoint.storage import range_reader
from bytecheckpoint.storage.backends import local_store
from distributed.collectives import Collectives, sequence_number
from distributed.held_by_rank import HeldByRank
from distributed.played_hosts import on_host
from distributed.workers import WorkerDied, WorkerPool

ON = bcp.LoadOptions(exchange="on", timeout_s=30)
IMPATIENT = bcp.LoadOptions(exchange="on", timeout_s=3.0)
ROWS, COLUMNS = 1500, 901


def tensors_of(placement: Placement, *, is_filled: bool, num_replicas: int = 1) -> dict[str, Any]:
    """Two large tensors that are spread over all ranks, or over each of so many groups of them as HSDP has it, and
    small ones that all have.
    """
    mesh = init_device_mesh("cpu", (num_replicas, dist.get_world_size() // num_replicas))
    generator = torch.Generator().manual_seed(1)
    large = {f"w{number}": torch.randn(ROWS, COLUMNS, generator=generator) for number in range(2)}
    small = {f"b{number}": torch.randn(17, generator=generator) for number in range(20)}
    if not is_filled:
        large = {name: torch.zeros_like(tensor) for name, tensor in large.items()}
        small = {name: torch.zeros_like(tensor) for name, tensor in small.items()}
    sharded = {name: distribute_tensor(tensor, mesh, [Replicate(), placement]) for name, tensor in large.items()}
    whole = {name: distribute_tensor(tensor, mesh, [Replicate(), Replicate()]) for name, tensor in small.items()}
    return {"s": {**sharded, **whole}}


def same_locals(state: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(torch.equal(state["s"][name].to_local(), part.to_local()) for name, part in expected["s"].items())


def save_rows(rank: int, world_size: int, path: str, codec: str) -> None:
    bcp.save(path, tensors_of(Shard(0), is_filled=True), options=bcp.SaveOptions(codec=codec))


def load_as(
    rank: int, world_size: int, path: str, placement: Placement, options: bcp.LoadOptions
) -> tuple[bool, int, int]:
    state = tensors_of(placement, is_filled=False)
    report = bcp.load(path, state, options=options)
    same = same_locals(state, tensors_of(placement, is_filled=True))
    return same, report.num_bytes_read, report.num_bytes_received


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=["replicas", "rows", "columns"])
def test_all_ranks_together_read_the_state_once(
    workers: WorkerPool, tmp_path: Path, placement: Placement, codec: str
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, codec, world_size=4)
    for options in (ON, bcp.LoadOptions(exchange="on", scratch_bytes=8 << 20, verify=False, reader_threads=2)):
        results = workers.run(load_as, path, placement, options, world_size=4)
        assert [same for same, _, _ in results] == [True] * 4
        read = [num_read for _, num_read, _ in results]
        assert sum(read) <= 1.05 * bcp.open(path).info.num_bytes
        assert max(read) <= 1.3 * sum(read) / 4
        wanted = {Replicate(): 4, Shard(0): 1, Shard(1): 1}[placement] * 2 * ROWS * COLUMNS * 4
        # What is compressed travels so, and whole frames do, of which a rank that wants columns uses a part.
        assert codec != "none" or sum(num_received for _, _, num_received in results) < wanted


def load_as_hybrid(rank: int, world_size: int, path: str, placement: Placement) -> tuple[bool, int, int]:
    state = tensors_of(placement, is_filled=False, num_replicas=2)
    report = bcp.load(path, state, options=ON)
    same = same_locals(state, tensors_of(placement, is_filled=True, num_replicas=2))
    return same, report.num_bytes_read, report.num_bytes_received


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=["rows", "columns"])
def test_what_groups_of_ranks_have_again_is_read_once(
    workers: WorkerPool, tmp_path: Path, placement: Placement
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=4)
    results = workers.run(load_as_hybrid, path, placement, world_size=4)
    assert [same for same, _, _ in results] == [True] * 4
    read = [num_read for _, num_read, _ in results]
    assert sum(read) <= 1.05 * bcp.open(path).info.num_bytes
    assert max(read) <= 1.3 * sum(read) / 4
    assert all(num_received > 0 for _, _, num_received in results)


def load_without_collectives(rank: int, world_size: int, path: str, exchange: Any) -> tuple[int, int, int]:
    """Collectives of this thread, and of all, during a load; and what this rank gets from others."""
    state = tensors_of(Replicate(), is_filled=False)
    dist.barrier()
    before_loading = sequence_number()
    with Collectives() as collectives:
        report = bcp.load(path, state, options=bcp.LoadOptions(exchange=exchange, timeout_s=30))
    return collectives.calls.total(), sequence_number() - before_loading, report.num_bytes_received


@pytest.mark.parametrize("exchange", ["on", "off"])
def test_a_load_uses_no_collective_of_the_process_group(workers: WorkerPool, tmp_path: Path, exchange: Any) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=3)
    for num_calls, num_collectives, num_received in workers.run(load_without_collectives, path, exchange, world_size=3):
        assert (num_calls, num_collectives) == (0, 0)
        assert (num_received > 0) == (exchange == "on")


def load_verifying_on_one(rank: int, world_size: int, path: str) -> tuple[bool, int, int]:
    options = bcp.LoadOptions(exchange="on", verify=rank == 1, timeout_s=60)
    return load_as(rank, world_size, path, Replicate(), options)


def test_what_one_rank_wants_verified_is_verified_by_those_who_read_it(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=4)
    assert [same for same, _, _ in workers.run(load_verifying_on_one, path, world_size=3)] == [True] * 3


def load_from_a_url(
    rank: int, world_size: int, path: str, placement: Placement, options: bcp.LoadOptions
) -> tuple[bool, int, int]:
    return load_as(rank, world_size, url_of(path), placement, options)


def test_a_folder_is_not_exchanged_and_a_url_is(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=2)
    auto, off = bcp.LoadOptions(), bcp.LoadOptions(exchange="off")
    for load, options, is_exchanged in (
        (load_as, auto, False),
        (load_from_a_url, auto, True),
        (load_from_a_url, off, False),
    ):
        results = workers.run(load, path, Replicate(), options, world_size=2)
        assert [(same, num_received > 0) for same, _, num_received in results] == [(True, is_exchanged)] * 2


def load_with_other_options(rank: int, world_size: int, path: str) -> tuple[bool, int, int]:
    options = ON if rank == 0 else bcp.LoadOptions(exchange="off", scratch_bytes=8 << 20, reader_threads=7)
    return load_as(rank, world_size, path, Replicate(), options)


def test_rank_0_decides_for_ranks_whose_options_differ(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(save_rows, str(tmp_path), "none", world_size=3)
    results = workers.run(load_with_other_options, str(tmp_path), world_size=3)
    assert all(same and num_received > 0 for same, _, num_received in results)


def test_one_rank_alone_exchanges_nothing(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"t": torch.arange(5)})
    state = {"t": torch.zeros(5, dtype=torch.int64)}
    report = bcp.load(tmp_path, state, options=ON)
    assert torch.equal(state["t"], torch.arange(5))
    assert report.num_bytes_received == 0


def load_on_meta(rank: int, world_size: int, path: str) -> list[bool]:
    torch.manual_seed(3)
    model = torch.nn.Linear(300, 400)
    bcp.save(path, {"model": model})
    with torch.device("meta"):
        empty = torch.nn.Linear(300, 400)
    report = bcp.load(path, {"model": empty}, options=ON)
    assert report.num_bytes_read + report.num_bytes_received > 0
    return [torch.equal(empty.weight, model.weight), torch.equal(empty.bias, model.bias)]


def test_a_module_on_the_meta_device_is_filled(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers.run(load_on_meta, str(tmp_path), world_size=2) == [[True, True]] * 2


FAILURES: dict[str, Seam] = {
    "reading": Seam(local_store.LocalStore, "read_into"),
    "passing on": Seam(HostExchange, "announce"),
    "taking": Seam(HostExchange, "_take"),
    "packing": Seam(exchange_module, "OutgoingUnit"),
    "connecting": Seam(connected_threads, "connect"),
    "placing": Seam(receive, "check_digest"),
    "dividing": Seam(exchange_module, "divide_plan"),
}
ON_SEVERAL_HOSTS = {"packing", "connecting", "placing"}


def fail_in(rank: int, world_size: int, path: str, phase: str, failing_rank: int) -> tuple[Seen | None, bool, bool]:
    """Rank 1's error is not the first that the coordinator could hear of."""
    function = FAILURES[phase]
    state = state_of(rank, 0.0)
    bcp.save(path, state_of(rank, 1.0))
    error = bcp.StorageError("you may not", kind="permission")
    fails = before(function, raising(error)) if rank == failing_rank else nullcontext()
    with fails, on_host(rank if phase in ON_SEVERAL_HOSTS else 0):
        found = seen(lambda: bcp.load(path, state, options=ON))
    dist.barrier()
    return found, holds(state, rank, 0.0), loads_as(path, rank, 1.0, options=ON)


@pytest.mark.parametrize("failing_rank", [0, 2])
@pytest.mark.parametrize("phase", FAILURES)
def test_what_fails_on_one_rank_fails_all_and_the_next_load_works(
    workers: WorkerPool, tmp_path: Path, phase: str, failing_rank: int
) -> None:
    outcomes = workers.run(fail_in, str(tmp_path), phase, failing_rank, world_size=3)
    errors = [error for error, _, _ in outcomes]
    assert errors[0] is not None
    assert errors == [errors[0]] * 3
    assert (errors[0].cls, errors[0].kind, errors[0].ranks) == ("StorageError", "permission", (failing_rank,))
    assert all(next_loads for _, _, next_loads in outcomes)
    for error, is_untouched, _ in outcomes:
        assert is_untouched or "partly overwritten" in error.own
        assert not is_untouched or "is partly overwritten" not in error.own
    if phase == "dividing":
        assert "Nothing of the state" in errors[failing_rank].own


def go_missing(rank: int, world_size: int, path: str, phase: str, missing_rank: int, how: str) -> Seen | None:
    pids: list[int] = [0] * world_size
    dist.all_gather_object(pids, os.getpid())
    bcp.save(path, tensors_of(Replicate(), is_filled=True))
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    signals = iter([number])
    # The thread that is there stops at once: what the process gets may be taken by any of its threads, and later.
    vanish = lambda: [signal.pthread_kill(threading.get_ident(), sent) for sent in signals]  # noqa: E731  # once
    vanishes = before(FAILURES[phase], vanish) if rank == missing_rank else nullcontext()
    with vanishes, on_host(rank if phase in ON_SEVERAL_HOSTS else 0):
        error = seen(lambda: bcp.load(path, tensors_of(Replicate(), is_filled=False), options=IMPATIENT))
    if how == "stopped" and rank == (missing_rank + 1) % world_size:
        os.kill(pids[missing_rank], signal.SIGCONT)
    return error


@pytest.mark.parametrize(
    ("phase", "missing_rank", "how"),
    [
        ("packing", 1, "killed"),
        ("reading", 2, "killed"),
        ("packing", 0, "killed"),
        ("packing", 1, "stopped"),
        ("passing on", 1, "killed"),
        ("passing on", 0, "stopped"),
        ("taking", 2, "killed"),
        ("taking", 1, "stopped"),
    ],
)
def test_a_rank_that_is_gone_or_stuck_ends_the_load_on_all_others(
    workers: WorkerPool, tmp_path: Path, phase: str, missing_rank: int, how: str
) -> None:
    outcomes = workers.run_each(go_missing, str(tmp_path), phase, missing_rank, how, world_size=3)
    if how == "killed":
        assert isinstance(outcomes[missing_rank].error, WorkerDied)
    for rank, outcome in enumerate(outcomes):
        if rank != missing_rank:
            assert outcome.error is None, outcome.error
            assert outcome.value.kind == "rank_missing"
            assert missing_rank in outcome.value.ranks
            assert outcome.value.seconds <= IMPATIENT.timeout_s + LATER_S + NOISE_S


def load_again_and_again(rank: int, world_size: int, path: str) -> list[HeldByRank]:
    """Threads, file descriptors and keys of the store after several loads."""
    store = dist.distributed_c10d._get_default_store()
    bcp.save(path, state_of(rank, 1.0))
    gc.collect()  # sockets of other tests go now or not at all
    counts = []
    for _ in range(3):
        for _ in range(5):
            assert loads_as(path, rank, 1.0, options=ON)
        dist.barrier()
        wait_for(lambda: not any(thread.name.startswith("bcp") for thread in threading.enumerate()))
        counts.append(HeldByRank.now(store))
        dist.barrier()
    return counts


def wait_for(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if is_so():
            return
        pause.wait(0.01)


def test_many_loads_leave_no_threads_descriptors_or_keys(workers: WorkerPool, tmp_path: Path) -> None:
    for counts in workers.run(load_again_and_again, str(tmp_path), world_size=3):
        assert counts[2].is_no_more_than(counts[1]), counts


def interrupted_while_reading(rank: int, world_size: int, path: str) -> tuple[str, tuple[int, ...]]:
    """Rank 1 is interrupted in its first read, as by Ctrl-C, with all the time in the world."""
    state = tensors_of(Replicate(), is_filled=False)
    interrupt = before(Seam(local_store.LocalStore, "read_into"), raising(KeyboardInterrupt()))
    try:
        with interrupt if rank == 1 else nullcontext():
            bcp.load(path, state, options=bcp.LoadOptions(exchange="on", timeout_s=3600))
    except (KeyboardInterrupt, bcp.CheckpointError) as error:
        return type(error).__name__, getattr(error, "ranks", ())
    return "", ()


def test_an_interrupt_on_one_rank_is_noticed_by_the_others_at_once(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=3)
    outcomes = workers.run_each(interrupted_while_reading, path, world_size=3, timeout_s=60)
    assert [outcome.value for outcome in outcomes][1] == ("KeyboardInterrupt", ())
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value == ("CheckpointError", (1,))


def reading_on(rank: int, world_size: int, path: str) -> int:
    """Rank 1 fails once rank 0 reads. How many reads that begins afterwards, of many that only it wants."""
    store, is_reading = dist.distributed_c10d._get_default_store(), "rank 0 reads"
    is_over, num_late = threading.Event(), 0
    was_over: list[bool] = []

    def slowly() -> None:
        nonlocal num_late
        store.set(is_reading, "")
        num_late += is_over.is_set()
        was_over.append(is_over.wait(30))

    def fail() -> None:
        store.wait([is_reading], timedelta(seconds=30))
        raise RuntimeError("boom")

    state = tensors_of(Replicate(), is_filled=False)
    if rank == 0:
        state["own"] = {f"x{number}": torch.zeros(1 << 20) for number in range(20)}
    options = bcp.LoadOptions(exchange="on", timeout_s=60, reader_threads=1)
    read = Seam(range_reader, "_read")  # not read_into of the store, which gives the manifest as well
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(before(Seam(exchange_module._Exchange, "_stop"), is_over.set))
            stack.enter_context(before(read, slowly))
        else:
            stack.enter_context(before(read, fail))
        error = seen(lambda: bcp.load(path, state, options=options))
    assert error is not None
    assert error.ranks == (1,)
    assert was_over[:1] == [True] * (1 - rank)
    return num_late


def save_with_own(rank: int, world_size: int, path: str) -> None:
    own = {f"x{number}": torch.ones(1 << 20) for number in range(20)}
    bcp.save(path, {**tensors_of(Shard(0), is_filled=True), "own": own})


def test_a_load_that_has_failed_elsewhere_reads_no_further(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_with_own, path, world_size=2)
    assert workers.run(reading_on, path, world_size=2, timeout_s=60)[0] <= 2


def load_with_other_names(rank: int, world_size: int, path: str) -> Seen | None:
    exclude = "s.b3" if rank == 1 else None
    return seen(lambda: bcp.load(path, tensors_of(Shard(0), is_filled=False), exclude=exclude, strict=False))


def test_ranks_that_choose_other_names_are_told(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=2)
    errors = workers.run(load_with_other_names, path, world_size=2)
    assert errors[0] == errors[1]
    assert (errors[0].kind, errors[0].ranks) == ("conflict", (1,))
    assert "pass the same to all ranks" in errors[0].message


def fails_before_it_has_connected(rank: int, world_size: int, path: str) -> tuple[Seen | None, list[str]]:
    """Only rank 0 can read the files, so it waits for rank 1 and gets nothing from it that could tell. Rank 1 fails,
    and its thread that goes to rank 0 comes to that only afterwards. Returns the first error inside of each, too.
    """
    state, failed = tensors_of(Replicate(), is_filled=False), threading.Event()
    first_errors = list[type[BaseException]]()
    with ExitStack() as stack:
        stack.enter_context(read_by_rank_0(rank))
        stack.enter_context(on_host(rank))
        if rank == 1:
            stack.enter_context(after(Seam(exchange_module._Exchange, "_stop"), failed.set))
            stack.enter_context(before(Seam(connected_threads, "connect"), lambda: failed.wait(60)))
            refusal = bcp.StorageError("you may not", kind="permission")
            stack.enter_context(before(Seam(Source, "run"), raising(refusal)))
        stack.enter_context(before_end(lambda errors: first_errors.extend(map(type, errors[:1]))))
        error = seen(lambda: bcp.load(path, state, options=bcp.LoadOptions(exchange="on", timeout_s=30)))
    return error, [cls.__name__ for cls in first_errors]


def read_by_rank_0(rank: int) -> AbstractContextManager[None]:
    return read_by(0, rank)


@contextmanager
def read_by(reader: int, rank: int) -> Iterator[None]:
    """Within the block, on all ranks, only the rank `reader` can read the files."""
    together = exchange_module.read_together

    def of_reader(ranks: Any, source: Source, *others: Any) -> Traffic:
        source.held_files = frozenset(range(len(source.manifest.files))) if rank == reader else frozenset()
        return together(ranks, source, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "read_together", of_reader)
        yield


@contextmanager
def before_end(look: Callable[[list[BaseException]], object]) -> Iterator[None]:
    """Within the block, `look` gets the errors of each exchange at its end."""
    end = exchange_module._Exchange._end

    def looked_at(exchange: exchange_module._Exchange) -> None:
        look(exchange._errors)
        end(exchange)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module._Exchange, "_end", looked_at)
        yield


def test_a_rank_that_fails_before_it_has_connected_still_tells_those_that_wait_for_it(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=2)
    (told, first_inside), (own, _) = workers.run(fails_before_it_has_connected, path, world_size=2)
    assert own.kind == told.kind == "permission"
    assert first_inside == ["PeerLeftError"]  # and not that it has waited in vain until its time was up


def cannot_connect_at_first(rank: int, world_size: int, path: str) -> tuple[Seen | None, list[str]]:
    """As `fails_before_it_has_connected`, but what fails is the connection: rank 1 has no descriptor for it."""
    state, first_errors = tensors_of(Replicate(), is_filled=False), list[type[BaseException]]()
    failures = iter([OSError(errno.EMFILE, os.strerror(errno.EMFILE))])

    def fail_once() -> None:
        for error in failures:
            raise error

    with (
        read_by_rank_0(rank),
        on_host(rank),
        before(Seam(connected_threads, "connect"), fail_once),
        before_end(lambda errors: first_errors.extend(map(type, errors[:1]))),
    ):
        error = seen(lambda: bcp.load(path, state, options=bcp.LoadOptions(exchange="on", timeout_s=30)))
    return error, [cls.__name__ for cls in first_errors]


def test_a_rank_that_has_no_descriptor_to_connect_with_still_tells_its_reader_rank(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=2)
    (told, first_inside), (own, _) = workers.run(cannot_connect_at_first, path, world_size=2)
    assert own.message == told.message
    assert "Too many open files" in own.message
    assert first_inside == ["PeerLeftError"]  # and not that it has waited in vain until its time was up


BEFORE_ASKING = {
    "dividing": (Seam(exchange_module, "divide_plan"), 1),
    "starting threads": (Seam(exchange_module._Exchange, "_start"), 1),
    "asking": (Seam(HostExchange, "ask"), 2),
}


def fail_before_asking(rank: int, world_size: int, path: str, phase: str) -> tuple[Seen | None, list[str]]:
    """Rank 0 reads all, and rank 1 is to relay it to rank 2, on the same host. One of these fails before any request is
    sent. Returns the first error inside of each, too.
    """
    failing, failing_rank = BEFORE_ASKING[phase]
    state, first_errors = tensors_of(Replicate(), is_filled=False), list[type[BaseException]]()
    refusal = bcp.StorageError("you may not", kind="permission")
    with (
        read_by_rank_0(rank),
        on_host(min(rank, 1)),
        before(failing, raising(refusal)) if rank == failing_rank else nullcontext(),
        before_end(lambda errors: first_errors.extend(map(type, errors[:1]))),
    ):
        error = seen(lambda: bcp.load(path, state, options=bcp.LoadOptions(exchange="on", timeout_s=30)))
    return error, [cls.__name__ for cls in first_errors]


@pytest.mark.parametrize("phase", BEFORE_ASKING)
def test_a_relay_whose_load_fails_before_it_asks_tells_its_reader_rank(
    workers: WorkerPool, tmp_path: Path, phase: str
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=3)
    outcomes = workers.run(fail_before_asking, path, phase, world_size=3)
    assert [error.kind for error, _ in outcomes] == ["permission"] * 3
    assert outcomes[0][1] == ["PeerLeftError"]  # and not that it has waited in vain until its time was up


def die_before_connecting(rank: int, world_size: int, path: str, reader: int) -> Seen | None:
    state = tensors_of(Replicate(), is_filled=False)
    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    dies = before(Seam(exchange_module, "divide_plan"), kill) if rank == world_size - 1 else nullcontext()
    with read_by(reader, rank), on_host(rank), dies:
        return seen(lambda: bcp.load(path, state, options=bcp.LoadOptions(exchange="on", timeout_s=60)))


@pytest.mark.parametrize("reader", [0, 1])
def test_a_relay_that_dies_before_it_has_connected_is_named_long_before_the_time_limit(
    workers: WorkerPool, tmp_path: Path, reader: int
) -> None:
    path = str(tmp_path / "ckpt")
    workers.run(save_rows, path, "none", world_size=3)
    *outcomes, lost = workers.run_each(die_before_connecting, path, reader, world_size=3)
    assert isinstance(lost.error, WorkerDied)
    for outcome in outcomes:
        assert outcome.error is None
        assert (outcome.value.kind, outcome.value.ranks) == ("rank_missing", (2,))
        assert outcome.value.seconds < 30
