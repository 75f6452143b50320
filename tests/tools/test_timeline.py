"""`bcp timeline`: phases by rank, the slowest ranks, the trace; and telemetry that nobody should trust."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import pytest
from fake_telemetry import SAVE_ID, checkpoint_with_telemetry, ordinary, record

import bytecheckpoint as bcp
from bytecheckpoint.diagnostics.telemetry import PhaseSpan, RankRecord
from bytecheckpoint.tools.render.timeline_text import chrome_trace, in_lanes, seconds_text


@pytest.fixture
def timed(tmp_path):
    """Four ranks, of which rank 2 writes slowly and rank 3 calls late."""
    ranks = [ordinary(0), ordinary(1), ordinary(2, write_s=5.0), ordinary(3, late_s=3.0)]
    return checkpoint_with_telemetry(tmp_path / "timed", ranks)


def test_a_real_save_is_shown(call, saved_root) -> None:
    ended = call("timeline", saved_root)
    assert ended.code == 0
    assert "slow in" in ended.out
    result = call("timeline", saved_root, "--json").json
    assert result["save_id"] == bcp.open(saved_root).info.save_id
    assert [phase["name"] for phase in result["phases"]] == ["wait", "plan", "stage", "write"]
    (rank,) = result["ranks"]
    assert rank["num_bytes"] == bcp.open(saved_root).info.num_bytes
    assert 0 < rank["end_s"] == result["seconds"]


def test_the_slowest_ranks_are_named_with_what_they_were_slow_in(call, timed) -> None:
    result = call("timeline", timed, "--json").json
    slow = [(item["rank"], item["phase"], round(item["end_s"], 6)) for item in result["slowest"]]
    assert slow[:2] == [(2, "write", 5.2), (3, "start", 4.2)]
    assert (result["slowest"][0]["phase_s"], result["slowest"][0]["median_s"]) == (5.0, 1.0)
    out = call("timeline", timed).out
    lines = out[out.index("last ranks") :].splitlines()
    assert lines[1].split()[:5] == ["2", "5.20", "s", "write", "5.00"]
    assert "called late" in lines[2]


def test_a_rank_alone_is_slow_in_its_longest_phase(call, tmp_path) -> None:
    path = checkpoint_with_telemetry(tmp_path / "alone", [ordinary(0, write_s=5.0)])
    (slow,) = call("timeline", path, "--json").json["slowest"]
    assert (slow["phase"], slow["phase_s"]) == ("write", 5.0)


def test_phases_are_summed_up_over_ranks(call, timed) -> None:
    result = call("timeline", timed, "--json").json
    write = next(phase for phase in result["phases"] if phase["name"] == "write")
    assert write == {"name": "write", "min_s": 1.0, "median_s": 1.0, "max_s": 5.0, "slowest_rank": 2}
    assert [phase["name"] for phase in result["phases"]] == ["plan", "stage", "write"]
    assert result["ranks"][3]["start_s"] == 3.0
    assert result["ranks"][0]["seconds"]["checksum"] == 0.5


def test_the_heat_map_is_darkest_where_it_took_longest(call, timed) -> None:
    lines = call("timeline", timed).out.splitlines()
    rows = {line.split()[0]: line for line in lines if "░" in line or "█" in line}
    assert rows.keys() == {"0", "1", "2", "3"}
    assert rows["2"].count("████") == 1
    assert rows["0"].count("░░░░") == 1
    assert "5.00 s" in rows["2"]


def test_many_ranks_share_rows_and_no_slow_one_is_lost(call, tmp_path) -> None:
    ranks = [ordinary(rank, write_s=9.0 if rank == 377 else 1.0) for rank in range(500)]
    path = checkpoint_with_telemetry(tmp_path / "timed", ranks)
    lines = call("timeline", path, "--limit", 5).out.splitlines()
    shared = [line for line in lines if line.lstrip().startswith(("300-399", "0-99"))]
    assert len(shared) == 2
    assert "1.00 s" in shared[0]
    assert "9.00 s" in shared[1]
    assert any("a row shows the slowest of its ranks" in line for line in lines)
    assert "node47" in shared[1]
    assert len(call("timeline", path, "--json").json["ranks"]) == 500


def test_ranks_without_telemetry_are_counted(call, tmp_path) -> None:
    path = checkpoint_with_telemetry(tmp_path / "timed", [ordinary(0)], world_size=4)
    assert "1, 3 others without telemetry" in call("timeline", path).out


def test_the_trace_is_one_that_perfetto_opens(call, timed, tmp_path) -> None:
    out = tmp_path / "trace.json"
    ended = call("timeline", timed, "--trace", out)
    assert ended.code == 0
    assert str(out) in ended.out
    trace = json.loads(out.read_text())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names[3] == "rank 3 (node0)"
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 12
    (write,) = [event for event in spans if event["pid"] == 2 and event["name"] == "write"]
    assert (write["ts"], write["dur"]) == (200_000, 5_000_000)
    (plan,) = [event for event in spans if event["pid"] == 3 and event["name"] == "plan"]
    assert plan["ts"] == 3_000_000
    for pid in names:
        for lane in {event["tid"] for event in spans if event["pid"] == pid}:
            ends = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, lane))
            assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_spans_that_overlap_get_rows_of_their_own() -> None:
    spans = [PhaseSpan("a", 0, 4), PhaseSpan("b", 1, 2), PhaseSpan("c", 2, 3), PhaseSpan("d", 4, 5)]
    assert [(lane, span.phase) for lane, span in in_lanes(spans)] == [(0, "a"), (1, "b"), (1, "c"), (0, "d")]
    assert chrome_trace([], path="x")["traceEvents"] == []


class _CountedEnd(float):
    num_comparisons = 0

    def __le__(self, other: float) -> bool:
        _CountedEnd.num_comparisons += 1
        return float(self) <= other


def test_a_span_is_not_compared_with_all_that_overlap_it():
    spans = [PhaseSpan("a", start / 1000, _CountedEnd(1)) for start in range(300)]
    assert [lane for lane, _ in in_lanes(spans)] == [*range(300)]
    assert _CountedEnd.num_comparisons < 1000


def test_a_trace_that_cannot_be_written_is_one_line(call, timed, tmp_path) -> None:
    for place, code in ((tmp_path / "nowhere" / "trace.json", 2), ("/dev/full", 4)):
        ended = call("timeline", timed, "--trace", place)
        assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)


def test_a_checkpoint_without_telemetry_is_exit_code_3(call, root) -> None:
    shutil.rmtree(root / "step_00001000" / "telemetry")
    ended = call("timeline", root)
    assert (ended.code, ended.err.count("\n")) == (3, 1)
    assert "has no telemetry" in ended.err
    (root / "step_00001000" / "telemetry").write_text("x")
    assert call("timeline", root).code == 3


def test_telemetry_of_another_save_is_no_telemetry_of_this_one(call, timed) -> None:
    for file in (timed / "telemetry").iterdir():
        file.rename(file.with_name(file.name.replace(SAVE_ID, "other")))
    assert call("timeline", timed).code == 3


ODD = {
    "empty": b"",
    "no JSON": b"not JSON",
    "cut short": json.dumps(ordinary(1)).encode()[:-9],
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "no UTF-8": b'{"version": 1, "host": "\xff"}',
    "another version": json.dumps(record(1, {}, version=2)).encode(),
    "another save": json.dumps(record(1, {}, save_id="x")).encode(),
    "text for a number": json.dumps(record(1, {}) | {"rank": "one"}).encode(),
    "a negative rank": json.dumps(record(-1, {})).encode(),
    "a huge rank": json.dumps(record(1 << 62, {})).encode(),
    "more than 64 bits": json.dumps(record(1, {}, num_bytes=1 << 80)).encode(),
    "a time beyond all calendars": json.dumps(record(1, {}, started_at=1e300)).encode(),
    "NaN": json.dumps(record(1, {}, started_at=float("nan"))).encode(),
    "infinity": json.dumps(record(1, {"plan": (0.0, 1.0)}) | {"seconds": {"plan": 1e999}}).encode(),
    "an end before its start": json.dumps(record(1, {"plan": (2.0, 1.0)})).encode(),
    "centuries": json.dumps(record(1, {"plan": (0.0, 1e12)})).encode(),
    "too many spans": json.dumps(record(1, {f"p{n}": (0.0, 1.0) for n in range(10_001)})).encode(),
}


@pytest.mark.parametrize("what", sorted(ODD))
def test_what_cannot_be_understood_is_named_and_hides_nothing(call, timed, what) -> None:
    (timed / "telemetry" / f"{SAVE_ID}-00001.json").write_bytes(ODD[what])
    ended = call("timeline", timed, "--json")
    assert ended.code == 1
    assert [rank["rank"] for rank in ended.json["ranks"]] == [0, 2, 3]
    (item,) = ended.json["unreadable"]
    assert (item["name"], item["kind"]) == (f"telemetry/{SAVE_ID}-00001.json", "damaged")
    ended = call("timeline", timed)
    assert ended.code == 1
    assert "cannot be understood: telemetry/timed-00001.json" in ended.out


def test_a_huge_file_is_not_read(call, timed) -> None:
    with (timed / "telemetry" / f"{SAVE_ID}-00001.json").open("r+b") as file:
        file.truncate(1 << 40)
    assert call("timeline", timed, "--json").json["unreadable"][0]["kind"] == "damaged"


def test_nothing_but_noise_is_exit_code_1(call, tmp_path) -> None:
    path = checkpoint_with_telemetry(tmp_path / "timed", [ordinary(0)])
    (path / "telemetry" / f"{SAVE_ID}-00000.json").write_text("noise")
    for args in ([], ["--json"], ["--trace", tmp_path / "out.json"]):
        assert call("timeline", path, *args).code == 1


def test_ranks_without_spans_are_shown(call, tmp_path) -> None:
    path = checkpoint_with_telemetry(tmp_path / "timed", [record(0, {}), record(1, {"odd phase": (0.0, 1.0)})])
    result = call("timeline", path, "--json").json
    assert [phase["name"] for phase in result["phases"]] == ["odd phase"]
    assert call("timeline", path).code == 0
    assert call("timeline", checkpoint_with_telemetry(tmp_path / "none", [record(0, {})])).code == 0


def test_names_cannot_steer_a_terminal(call, tmp_path) -> None:
    odd = record(0, {"pl\x1b[31man": (0.0, 1.0)}, host="no\x1bde")
    assert "\x1b" not in call("timeline", checkpoint_with_telemetry(tmp_path / "timed", [odd])).out


def test_records_know_when_they_end() -> None:
    fields = ordinary(0)
    fields["spans"] = [PhaseSpan(**span) for span in fields["spans"]]
    assert RankRecord(**fields).end == pytest.approx(1.2)
    assert RankRecord(**{**fields, "spans": []}).end == 0.0


def test_a_time_just_below_a_unit_is_told_in_that_unit() -> None:
    times = (0.9994, 0.9996, 0.0009994, 0.0009996, 1.0, 0.0, 0.0123)
    assert list(map(seconds_text, times)) == ["999 ms", "1.00 s", "999 µs", "1 ms", "1.00 s", "0 ms", "12.3 ms"]
