"""Progress of saves and loads, what the log tells, and warnings about slow phases and values that are not finite."""

from __future__ import annotations

import io
import logging
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.seams import Seam, before, raising
from rich.progress import Progress as RichProgress

import bytecheckpoint as bcp
from bytecheckpoint.adapters import finite_check
from bytecheckpoint.diagnostics import progress_bar
from bytecheckpoint.errors import CheckpointSaveError
from bytecheckpoint.runtime import progress as progress_module
from bytecheckpoint.runtime.progress import ProgressMeter
from bytecheckpoint.saving.slow_phases import PhaseHistory, slow_text
from bytecheckpoint.staging import file_image


def state_of(num_bytes: int) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(num_bytes // 4), "v": torch.zeros(1000)}


def phases_of(seen: list[bcp.Progress]) -> list[str]:
    return list(dict.fromkeys(item.phase for item in seen))


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_reports_its_phases_and_all_of_its_bytes(tmp_path, codec, async_save) -> None:
    seen: list[bcp.Progress] = []
    options = bcp.SaveOptions(on_progress=seen.append, codec=codec)
    handle = bcp.save(tmp_path / "c", state_of(40 << 20), async_save=async_save, options=options)
    info = handle.result()
    assert phases_of(seen) == [*(["plan", "stage"] if async_save else ["plan"]), "write", "commit", "done"] or (
        async_save and phases_of(seen) == ["plan", "write", "commit", "done"]  # the writer began before staging did
    )
    written = [item for item in seen if item.phase == "write"]
    assert written[0].bytes_done == 0
    assert written[0].bytes_total >= 40 << 20
    assert [item.bytes_done for item in written] == sorted(item.bytes_done for item in written)
    assert all(item.bytes_done <= item.bytes_total for item in written)
    assert {(item.path, item.rank) for item in seen} == {(info.path, 0)}
    assert [item.is_finished for item in seen] == [False] * (len(seen) - 1) + [True]
    if codec == "none":
        assert written[0].bytes_total == info.num_bytes


def test_a_handle_tells_where_its_save_is(tmp_path) -> None:
    held, go = threading.Event(), threading.Event()

    def hold(progress: bcp.Progress) -> None:
        if progress.phase == "commit":
            held.set()
            go.wait(60)

    handle = bcp.save(tmp_path / "c", state_of(1 << 20), async_save=True, options=bcp.SaveOptions(on_progress=hold))
    assert held.wait(60)
    assert handle.progress().phase == "commit"
    assert not handle.progress().is_finished
    go.set()
    handle.result()
    assert handle.progress().phase == "done"
    assert handle.progress().seconds == 0.0


def test_a_rate_is_bytes_by_seconds_and_none_before_the_first() -> None:
    progress = bcp.Progress(path="p", rank=0, phase="write", bytes_done=100, bytes_total=200, seconds=4.0)
    assert progress.bytes_per_s == 25.0
    assert bcp.Progress(path="p", rank=0, phase="write").bytes_per_s == 0.0


def test_a_save_that_fails_reports_that(tmp_path) -> None:
    seen: list[bcp.Progress] = []
    (tmp_path / "file").write_text("x")
    bcp.save(tmp_path / "c", {"x": 1})
    with pytest.raises(bcp.CheckpointExistsError):
        bcp.save(tmp_path / "c", {"x": 1}, options=bcp.SaveOptions(on_progress=seen.append))
    assert phases_of(seen) == ["plan", "failed"]


@pytest.mark.parametrize("phase", ["commit", "done"])
def test_on_progress_cannot_end_a_save_in_the_background(tmp_path, phase, caplog) -> None:
    def leave(progress: bcp.Progress) -> None:
        if progress.phase == phase:
            raise SystemExit(3)

    handle = bcp.save(tmp_path / "c", {"x": 1}, async_save=True, options=bcp.SaveOptions(on_progress=leave))
    assert handle.result(60).save_id == bcp.open(tmp_path / "c").info.save_id
    assert handle.progress().phase == "done"
    assert "on_progress failed" in caplog.text


def test_ctrl_c_in_on_progress_ends_a_save_that_blocks(tmp_path) -> None:
    def interrupt(progress: bcp.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bcp.save(tmp_path / "c", {"x": 1}, options=bcp.SaveOptions(on_progress=interrupt))
    assert not (tmp_path / "c").exists()


def test_a_filter_of_the_log_that_raises_does_not_stop_the_progress(monkeypatch) -> None:
    def fail(record: logging.LogRecord) -> bool:
        raise RuntimeError(record.msg)

    log = logging.getLogger("bytecheckpoint")
    monkeypatch.setattr(log, "filters", [fail])
    monkeypatch.setattr(log, "level", logging.DEBUG)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    meter = ProgressMeter("p", 0, "save", None)
    meter.begin("write")
    assert meter.now().phase == "write"


def test_a_signal_handler_may_ask_for_progress_while_its_thread_does(monkeypatch) -> None:
    meter = ProgressMeter("p", 0, "save", None)
    inner: list[bcp.Progress] = []
    replace = progress_module.replace

    def interrupted(item: bcp.Progress, **changes: Any) -> bcp.Progress:
        monkeypatch.setattr(progress_module, "replace", replace)
        inner.append(meter.now())
        return replace(item, **changes)

    monkeypatch.setattr(progress_module, "replace", interrupted)
    asking = threading.Thread(target=meter.now, daemon=True)
    asking.start()
    asking.join(30)
    assert [item.phase for item in inner] == ["plan"]


def test_a_bar_shows_any_name_and_may_be_drawn_while_it_draws(monkeypatch) -> None:
    from rich.console import Console

    bars = progress_bar._Bars()
    out = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=out, force_terminal=True, width=120))
    refresh = RichProgress.refresh

    def interrupted(display: RichProgress) -> None:
        monkeypatch.setattr(RichProgress, "refresh", refresh)
        bars.show(bcp.Progress(path="r/of[handler]", rank=0, phase="write"))
        refresh(display)

    monkeypatch.setattr(RichProgress, "refresh", interrupted)
    drawing = threading.Thread(
        target=bars.show, args=[bcp.Progress(path="r/of[run]", rank=0, phase="write")], daemon=True
    )
    drawing.start()
    drawing.join(30)
    assert not drawing.is_alive()
    for path in ("r/of[run]", "r/of[handler]"):
        bars.show(bcp.Progress(path=path, rank=0, phase="done"))
    assert "writing of[handler]" in out.getvalue()
    assert "writing of[run]" in out.getvalue()


def test_a_process_without_standard_error_draws_no_bar(monkeypatch) -> None:
    bars = progress_bar._Bars()
    monkeypatch.setattr(sys, "stderr", None)
    bars.show(bcp.Progress(path="r/c", rank=0, phase="write"))
    assert bars._display is None


def test_a_bar_leaves_output_that_goes_to_a_file_where_it_is(monkeypatch, capsys) -> None:
    bars = progress_bar._Bars()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    bars.show(bcp.Progress(path="r/c", rank=0, phase="write"))
    sys.stdout.write("a line of the training\n")
    bars.show(bcp.Progress(path="r/c", rank=0, phase="done"))
    shown = capsys.readouterr()
    assert "a line of the training" in shown.out
    assert "a line of the training" not in shown.err


def test_what_on_progress_raises_is_logged_once_and_the_save_goes_on(tmp_path, caplog) -> None:
    calls = []

    def fail(progress: bcp.Progress) -> None:
        calls.append(progress)
        raise RuntimeError("a bug of the user")

    info = bcp.save(tmp_path / "c", state_of(1 << 20), options=bcp.SaveOptions(on_progress=fail)).result()
    assert bcp.latest(tmp_path) is None
    assert bcp.open(tmp_path / "c").info.save_id == info.save_id
    assert len(calls) == 1
    assert caplog.text.count("on_progress failed") == 1


def test_a_report_that_waited_for_the_one_that_failed_is_left_out(caplog) -> None:
    is_in, goes_on = threading.Event(), threading.Event()

    def fail(progress: bcp.Progress) -> None:
        if progress.phase == "write":
            is_in.set()
            assert goes_on.wait(20)
            raise RuntimeError("a bug of the user")

    meter = ProgressMeter("p", 0, "save", fail)
    first, second = (threading.Thread(target=meter.begin, args=(phase,)) for phase in ("write", "commit"))
    first.start()
    assert is_in.wait(20)
    second.start()
    while meter.now().phase != "commit":
        time.sleep(0.001)
    time.sleep(0.1)  # until it waits
    goes_on.set()
    first.join(20)
    second.join(20)
    assert caplog.text.count("on_progress failed") == 1


def test_a_local_stage_uploads_after_it_has_written(tmp_path) -> None:
    seen: list[bcp.Progress] = []
    options = bcp.SaveOptions(on_progress=seen.append, local_stage=tmp_path / "stage")
    info = bcp.save(tmp_path / "c", state_of(1 << 20), options=options).result()
    assert phases_of(seen) == ["plan", "write", "upload", "commit", "done"]
    assert {item.bytes_total for item in seen if item.phase == "upload"} == {info.num_bytes}


def test_a_load_reports_the_bytes_that_it_reads(tmp_path) -> None:
    bcp.save(tmp_path / "c", state_of(40 << 20))
    seen: list[bcp.Progress] = []
    report = bcp.load(tmp_path / "c", state_of(40 << 20), options=bcp.LoadOptions(on_progress=seen.append))
    assert phases_of(seen) == ["plan", "read", "done"]
    assert seen[-1].bytes_done == 0
    assert {item.bytes_total for item in seen if item.phase == "read"} == {report.num_bytes_read}


def test_a_tree_that_is_read_reports_its_bytes(tmp_path) -> None:
    bcp.save(tmp_path / "c", state_of(4 << 20))
    seen: list[bcp.Progress] = []
    bcp.load_tree(tmp_path / "c", options=bcp.LoadOptions(on_progress=seen.append))
    assert phases_of(seen) == ["plan", "read", "done"]
    assert next(item for item in seen if item.phase == "read").bytes_total >= 4 << 20


def test_a_load_that_fails_reports_that(tmp_path) -> None:
    bcp.save(tmp_path / "c", state_of(1 << 20))
    path = next((tmp_path / "c" / "data").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    seen: list[bcp.Progress] = []
    with pytest.raises(bcp.CheckpointCorruptError):
        bcp.load(tmp_path / "c", state_of(1 << 20), options=bcp.LoadOptions(on_progress=seen.append))
    assert seen[-1].phase == "failed"


@pytest.mark.parametrize("kind", [bcp.SaveOptions, bcp.LoadOptions])
def test_what_cannot_be_called_is_refused(kind: type[Any]) -> None:
    with pytest.raises(ValueError, match=r"on_progress takes a function, or None, not 'x'"):
        kind(on_progress="x")


def test_the_log_tells_begin_staging_commit_and_with_debug_all_phases(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "bytecheckpoint")
    has_returned = threading.Event()

    def hold(progress: bcp.Progress) -> None:
        assert progress.phase != "commit" or has_returned.wait(60)  # else the caller may tell of staging after that

    options = bcp.SaveOptions(on_progress=hold)
    handle = bcp.save(tmp_path / "c", state_of(1 << 20), async_save=True, options=options)
    has_returned.set()
    handle.result()
    assert [record.message.split()[0] for record in caplog.records] == ["saving", "staged", "committed"]
    caplog.clear()
    caplog.set_level(logging.DEBUG, "bytecheckpoint")
    bcp.save(tmp_path / "d", state_of(1 << 20))
    bcp.load(tmp_path / "d", state_of(1 << 20))
    told = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    begun = [text.partition(", then ")[2].split()[0] for text in told if ", then " in text]
    assert begun == ["write", "commit", "done", "read", "done"]


@pytest.mark.parametrize("staging_bytes", [None, 32 << 20])
def test_the_log_calls_no_state_staged_whose_staging_failed(tmp_path, caplog, staging_bytes) -> None:
    caplog.set_level(logging.INFO, "bytecheckpoint")
    with before(Seam(file_image.LiveFile, "gather"), raising(MemoryError("no memory for a copy"))):
        options = bcp.SaveOptions(staging_bytes=staging_bytes)
        handle = bcp.save(tmp_path / "c", state_of(40 << 20), async_save=True, options=options)
        with pytest.raises(bcp.CheckpointSaveError, match="no memory for a copy"):
            handle.result(60)
    assert [record.message.split()[0] for record in caplog.records] == ["saving"]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_bar_draws_on_a_terminal_only(tmp_path, terminal) -> None:
    code = f"""
import sys, torch, bytecheckpoint as bcp
sys.stderr.isatty = lambda: {terminal}
bar = bcp.progress_bar()
bcp.save({str(tmp_path / "c")!r}, {{"w": torch.zeros(1 << 22)}}, options=bcp.SaveOptions(on_progress=bar))
bcp.load({str(tmp_path / "c")!r}, {{"w": torch.ones(1 << 22)}}, options=bcp.LoadOptions(on_progress=bar))
for rank in (1, 2):
    bar(bcp.Progress(path="other", rank=rank, phase="write", bytes_total=1))
"""
    environment = {"TERM": "xterm", "FORCE_COLOR": "1", "PATH": "/usr/bin:/bin"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    assert ("writing" in ended.stderr) == terminal
    assert "other" not in ended.stderr
    assert ended.stdout == ""


def seconds(**phases: float) -> dict[str, float]:
    return phases


def test_a_phase_that_takes_three_times_as_long_is_found_with_its_slowest_rank() -> None:
    history = PhaseHistory()
    for _ in range(3):
        assert history.add("r", 1000, [seconds(write=1.0, stage=0.1), seconds(write=1.2, stage=0.1)]) == []
    (slow,) = history.add("r", 1000, [seconds(write=1.0, stage=0.9), seconds(write=6.0, stage=0.1)])
    assert (slow.phase, slow.seconds, slow.usual_s, slow.num_earlier, slow.slowest) == ("write", 6.0, 1.2, 3, 1)
    text = slow_text(slow, "s3://b/r/step_00000004", [8, 12])
    assert "took 6.0 s to write, 5.0 times as long as usual (1.2 s, the median of 3 earlier saves)" in text
    assert text.endswith("rank 12 took longest")


def test_a_phase_that_only_the_coordinator_tells_names_no_slowest_rank() -> None:
    history = PhaseHistory()
    for _ in range(3):
        history.add("r", 1000, [seconds(upload=1.0), {}])
    (slow,) = history.add("r", 1000, [seconds(upload=9.0), {}])
    assert slow_text(slow, "r", [8, 12]).endswith("; measured on rank 8, which waits for the other ranks")


@pytest.mark.parametrize("other", [("q", 1000, 1), ("r", 3000, 1), ("r", 1000, 2)])
def test_only_saves_to_the_same_root_of_the_same_size_and_ranks_are_compared(other) -> None:
    root, num_bytes, num_ranks = other
    history = PhaseHistory()
    for _ in range(5):
        history.add("r", 1000, [seconds(write=1.0)])
    assert history.add(root, num_bytes, [seconds(write=9.0)] * num_ranks) == []
    assert len(history.add("r", 1000, [seconds(write=9.0)])) == 1


def test_phases_of_saves_to_ever_new_paths_do_not_pile_up() -> None:
    history = PhaseHistory()
    for root in ["old"] * 3 + [f"path-{number}" for number in range(64)]:
        history.add(root, 1000, [seconds(write=1.0)])
    assert history.add("old", 1000, [seconds(write=6.0)]) == []


def test_phases_of_a_root_in_use_are_kept_beside_ever_new_paths() -> None:
    history = PhaseHistory()
    for number in range(200):
        history.add("used", 1000, [seconds(write=1.0)])
        history.add(f"path-{number}", 1000, [seconds(write=1.0)])
    assert [slow.phase for slow in history.add("used", 1000, [seconds(write=6.0)])] == ["write"]


def test_the_coordinator_warns_of_a_slow_phase(tmp_path, caplog, monkeypatch) -> None:
    from bytecheckpoint.saving import slow_phases

    monkeypatch.setattr(slow_phases, "_MIN_EXTRA_S", -1e9)
    monkeypatch.setattr(slow_phases, "_FACTOR", 0.0)
    for step in range(4):
        bcp.save(tmp_path / "r", state_of(1 << 20), step=step)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any(f"the save to {tmp_path / 'r' / 'step_00000003'} took" in text and "to write" in text for text in told)
    assert all("rank 0 took longest" in text for text in told)


NOT_FINITE = {
    "good": torch.ones(5),
    "model": {"w": torch.tensor([1.0, math.nan, math.inf, -math.inf]), "half": torch.tensor([math.nan]).bfloat16()},
    "tiny": torch.tensor([math.nan]).to(torch.float8_e5m2),
    "complex": torch.tensor([complex(0, math.inf)]),
    "count": torch.tensor([1, 2]),
}
NAMED = ("model.w (1 NaN, 2 infinite)", "model.half (1 NaN)", "tiny (1 NaN)", "complex (1 infinite)")


@pytest.mark.parametrize("async_save", [False, True])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, async_save) -> None:
    options = bcp.SaveOptions(check_finite="refuse")
    with pytest.raises(CheckpointSaveError) as raised:
        bcp.save(tmp_path / "c", NOT_FINITE, async_save=async_save, options=options)
    assert raised.value.kind == "not_finite"
    assert all(text in raised.value.message for text in NAMED)
    assert "good" not in raised.value.message
    assert not (tmp_path / "c").exists()
    bcp.save(tmp_path / "c", {"good": NOT_FINITE["good"]}, async_save=async_save, options=options).result()


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
def test_a_dtype_without_nan_is_finite(tmp_path) -> None:
    packed = torch.full((8,), 0xFF, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    bcp.save(tmp_path / "c", {"w": packed}, options=bcp.SaveOptions(check_finite="refuse"))


def test_values_are_looked_at_in_place_whatever_the_strides(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(finite_check, "_PART_ELEMENTS", 4)
    tensor = torch.zeros(5, 7, 3)[:, ::2].permute(2, 0, 1)
    tensor[1, 2, 3] = tensor[2, 4, 0] = math.nan
    parts = list(finite_check._parts(tensor))
    assert {part.untyped_storage().data_ptr() for part in parts} == {tensor.untyped_storage().data_ptr()}
    assert sum(part.numel() for part in parts) == tensor.numel()
    with pytest.raises(CheckpointSaveError, match=r"w \(2 NaN\)"):
        bcp.save(tmp_path / "c", {"w": tensor}, options=bcp.SaveOptions(check_finite="refuse"))


def test_values_that_are_not_finite_are_warned_of_and_saved(tmp_path, caplog) -> None:
    bcp.save(tmp_path / "c", NOT_FINITE, options=bcp.SaveOptions(check_finite="warn"))
    (text,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert all(name in text for name in NAMED)
    assert math.isnan(bcp.open(tmp_path / "c")["model.w"][1].item())


def test_by_default_nobody_looks_at_values(tmp_path, caplog) -> None:
    bcp.save(tmp_path / "c", NOT_FINITE)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("ending", ["", "import sys; sys.stdout = None", "import sys; sys.stdout.close()"])
def test_an_asynchronous_save_that_fails_unseen_is_one_line_at_the_end(tmp_path, ending) -> None:
    code = f"""
import torch, bytecheckpoint as bcp
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.backends.local_store import LocalStore
def refuse(*_, **__):
    raise StorageError("the disk fell off", kind="unavailable")
LocalStore.write = refuse
bcp.save({str(tmp_path / "c")!r}, {{"w": torch.zeros(5)}}, async_save=True)
{ending}
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"bytecheckpoint: the save to {tmp_path / 'c'} failed and was not committed: ")
    assert "the disk fell off" in ended.stderr
