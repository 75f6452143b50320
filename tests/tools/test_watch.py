"""`bcp watch`."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_files import flip
from safetensors.torch import save_file

import bytecheckpoint as bcp
from bytecheckpoint import info
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.backends.local_store import LocalStore
from bytecheckpoint.tools.listing.commits import CommitWatch
from bytecheckpoint.tools.main import cli

watch_command = import_module("bytecheckpoint.tools.listing.watch")

PROGRAM = [sys.executable, "-m", "bytecheckpoint.tools", "watch"]


@pytest.fixture(autouse=True)
def _interrupts_arrive() -> Iterator[None]:
    """Also where the tests run in the background of a shell: all that it starts there ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_once_lists_what_is_there_with_timings_and_ends_with_0(call, saved_root) -> None:
    ended = call("watch", saved_root, "--once")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["step 5", "step 1000"]
    assert all("by 1 rank  in " in line and "/s, " in line for line in lines)
    items = call("watch", saved_root, "--once", "--json").json["checkpoints"]
    assert [(item["step"], item["run"], item["slowest_rank"]) for item in items] == [(5, None, 0), (1000, None, 0)]
    assert all(item["seconds"] > 0 for item in items)


def test_checkpoints_of_runs_and_with_names_are_told_apart(call, tmp_path) -> None:
    bcp.save(tmp_path / "a", {"x": 1}, step=5)
    bcp.save(tmp_path / "b", {"x": 1}, step=5)
    bcp.save(tmp_path / "best", {"x": 1})
    (tmp_path / "c" / "step_00000001" / "data").mkdir(parents=True)  # not committed
    names = [line.split("  ")[1] for line in call("watch", tmp_path, "--once").out.splitlines()]
    assert sorted(names) == ["a: step 5", "b: step 5", "best"]


def test_checkpoints_of_one_second_are_in_the_order_of_their_steps(call, tmp_path, monkeypatch) -> None:
    for step in (3, 1, 2):
        bcp.save(tmp_path, {"x": step}, step=step)
    monkeypatch.setattr(CommitWatch, "_new_folders", lambda _: [f"step_0000000{step}" for step in (3, 1, 2)])
    second = datetime.now(UTC)
    monkeypatch.setattr(info, "_parse_time", lambda _: second)
    assert [item["step"] for item in call("watch", tmp_path, "--once", "--json").json["checkpoints"]] == [1, 2, 3]


def test_a_checkpoint_without_telemetry_has_no_timings(call, root) -> None:
    for path in (root / "step_00000005" / "telemetry").iterdir():
        path.unlink()
    first = call("watch", root, "--once").out.splitlines()[0]
    assert first.endswith("(no timings)")


def test_telemetry_that_lies_outside_of_the_root_hides_no_checkpoint(call, root, tmp_path) -> None:
    telemetry = root / "step_00000005" / "telemetry"
    telemetry.rename(tmp_path / "elsewhere")
    telemetry.symlink_to(tmp_path / "elsewhere")
    ended = call("watch", root, "--once")
    assert ended.code == 0
    assert [line.endswith("(no timings)") for line in ended.out.splitlines()] == [True, False]
    assert call("report", root, "--out", tmp_path / "page.html").code == 0


def test_once_finds_none_where_another_program_saved(call, tmp_path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    ended = call("watch", tmp_path, "--once", "--json")
    assert (ended.code, ended.json["error"]["kind"]) == (3, "not_found")
    assert "is a checkpoint of safetensors" in ended.json["error"]["message"]


def test_a_damaged_manifest_does_not_hide_the_others(call, root) -> None:
    flip(root / "step_00001000" / "manifest.bcp", 50)
    ended = call("watch", root, "--once")
    assert ended.code == 1
    assert [" DAMAGED: " in line for line in ended.out.splitlines()] == [True, False]


def test_each_new_checkpoint_is_a_line_until_ctrl_c(tmp_path) -> None:
    bcp.save(tmp_path / "run", {"x": 1}, step=1)
    command = [*PROGRAM, str(tmp_path / "run"), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "1 checkpoint so far" in process.stdout.readline()
        bcp.save(tmp_path / "run", {"x": 1}, step=2)
        assert "  step 2  " in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (130, "", "")


def test_json_is_an_object_a_line(tmp_path) -> None:
    command = [*PROGRAM, str(tmp_path / "run"), "--interval", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = []
        for step in range(1, 1000):  # those that are there when it begins to watch are not printed
            bcp.save(tmp_path / "run", {"x": 1}, step=step)
            if select.select([process.stdout], [], [], 0.2)[0]:
                seen.append(json.loads(process.stdout.readline()))
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert seen[0]["path"] == str(tmp_path / "run" / f"step_{seen[0]['step']:08d}")


def test_a_folder_that_may_not_be_listed_does_not_hide_the_others(call, root, monkeypatch) -> None:
    (root / "lost+found").mkdir()
    listed = LocalStore.list

    def refuse(store: LocalStore, folder: str) -> dict[str, int | None]:
        if folder == "lost+found":
            raise StorageError("not yours", kind="permission")
        return listed(store, folder)

    monkeypatch.setattr(LocalStore, "list", refuse)
    ended = call("watch", root, "--once")
    assert ended.code == 0
    assert len(ended.out.splitlines()) == 2


def commits_of(watch: CommitWatch) -> list[tuple[str, bool]]:
    return [(commit.checkpoint.folder, commit.is_replacement) for commit in watch.look()]


def replace(root: Path, *, step: int) -> None:
    bcp.save(root, {"x": 2}, step=step, options=bcp.SaveOptions(overwrite=True))


def test_a_step_that_is_replaced_in_place_is_printed_again(tmp_path) -> None:
    bcp.save(tmp_path, {"x": 1}, step=1)
    command = [*PROGRAM, str(tmp_path), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        replace(tmp_path, step=1)
        assert "  step 1 (replaced)  " in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_a_replaced_one_is_told_once_and_a_deleted_one_is_new_when_it_comes_back(tmp_path) -> None:
    for step in (1, 2):
        bcp.save(tmp_path, {"x": 1}, step=step)
    watch = CommitWatch(LocalStore(str(tmp_path), writer_threads=1))
    watch.begin()
    assert commits_of(watch) == []
    replace(tmp_path, step=1)
    assert [commits_of(watch), commits_of(watch)] == [[("step_00000001", True)], []]
    bcp.delete(tmp_path, step=2)
    assert commits_of(watch) == []
    bcp.save(tmp_path, {"x": 1}, step=2)
    assert [commits_of(watch), commits_of(watch)] == [[("step_00000002", False)], []]


def test_an_old_step_that_is_replaced_is_found_when_its_turn_comes_and_a_look_reads_few(tmp_path, monkeypatch) -> None:
    for step in range(40):
        bcp.save(tmp_path, {"x": 1}, step=step)
    watch = CommitWatch(LocalStore(str(tmp_path), writer_threads=1))
    watch.begin()
    for _ in range(4):  # all have had their turn
        assert commits_of(watch) == []
    replace(tmp_path, step=20)
    listed: list[str] = []
    list_folder = LocalStore.list
    monkeypatch.setattr(LocalStore, "list", lambda store, name: listed.append(name) or list_folder(store, name))
    found = []
    for _ in range(4):
        listed.clear()
        found += commits_of(watch)
        assert len([name for name in listed if name.startswith("step_")]) <= 18
    assert found == [("step_00000020", True)]


def test_an_old_step_that_is_replaced_before_its_first_turn_is_found_too(tmp_path) -> None:
    for step in range(40):
        bcp.save(tmp_path, {"x": 1}, step=step)
    watch = CommitWatch(LocalStore(str(tmp_path), writer_threads=1))
    watch.begin()
    replace(tmp_path, step=20)
    found = [commit for _ in range(4) for commit in commits_of(watch)]
    assert found == [("step_00000020", True)]


def test_a_manifest_that_a_stale_listing_calls_longer_comes_with_a_later_look(tmp_path, monkeypatch) -> None:
    bcp.save(tmp_path, {"x": 1}, step=1)
    list_now = LocalStore.list

    def list_stale(store: LocalStore, folder: str) -> dict[str, int | None]:
        return {name: size and size + 1 for name, size in list_now(store, folder).items()}

    commits = CommitWatch(LocalStore(str(tmp_path), writer_threads=1))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "list", list_stale)
        assert list(commits.look()) == []
    assert [commit.checkpoint.step for commit in commits.look()] == [1]


def test_an_old_step_that_may_not_be_read_does_not_keep_it_from_beginning(tmp_path, monkeypatch) -> None:
    for step in range(10):
        bcp.save(tmp_path, {"x": 1}, step=step)
    read_into = LocalStore.read_into

    def refuse(store: LocalStore, name: str, *rest: object, **named: object) -> None:
        if name.startswith("step_00000000/"):
            raise StorageError("not yours", kind="permission")
        read_into(store, name, *rest, **named)

    monkeypatch.setattr(LocalStore, "read_into", refuse)
    watch = CommitWatch(LocalStore(str(tmp_path), writer_threads=1))
    watch.begin()
    assert watch.num_seen == 10
    for step in (10, 11):  # the newest 8 are compared at each look, and the others in turn
        bcp.save(tmp_path, {"x": 1}, step=step)
        assert [item.checkpoint.step for item in watch.look()] == [step]


def test_steps_that_may_not_be_read_do_not_hide_new_ones(tmp_path, monkeypatch) -> None:
    """The newest steps are compared at each look, which failed before it had found anything."""
    for step in range(3):
        bcp.save(tmp_path, {"x": 1}, step=step)
    (tmp_path / "elsewhere").mkdir()
    manifest = tmp_path / "step_00000001" / "manifest.bcp"
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    manifest.rename(outside)
    manifest.symlink_to(outside)
    watch = CommitWatch(LocalStore(str(tmp_path), writer_threads=1))
    watch.begin()
    for step in (3, 4):
        bcp.save(tmp_path, {"x": 1}, step=step)
    manifest = tmp_path / "step_00000003" / "manifest.bcp"
    content = manifest.read_bytes()
    manifest.unlink()
    manifest.symlink_to(outside)
    assert [item.checkpoint.step for item in watch.look()] == [4]
    manifest.unlink()
    manifest.write_bytes(content)
    assert [item.checkpoint.step for item in watch.look()] == [3]


def test_the_newest_step_is_compared_at_each_look_whatever_the_order_of_a_listing(tmp_path, monkeypatch) -> None:
    for step in range(20):
        bcp.save(tmp_path, {"x": 1}, step=step)
    bcp.save(tmp_path / "best", {"x": 1})
    list_folder = LocalStore.list
    monkeypatch.setattr(
        LocalStore, "list", lambda store, name: dict(sorted(list_folder(store, name).items(), reverse=True))
    )
    watch = CommitWatch(LocalStore(str(tmp_path), writer_threads=1))
    watch.begin()
    for _ in range(3):
        replace(tmp_path, step=19)
        assert commits_of(watch) == [("step_00000019", True)]
    bcp.save(tmp_path / "best", {"x": 2}, options=bcp.SaveOptions(overwrite=True))
    assert commits_of(watch) == [("best", True)]


def test_a_storage_error_does_not_end_it_and_nothing_is_lost(tmp_path, capsys, monkeypatch) -> None:
    bcp.save(tmp_path, {"x": 1}, step=1)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            bcp.save(tmp_path, {"x": 1}, step=2)
        if len(looks) == 5:
            raise KeyboardInterrupt

    read_into = LocalStore.read_into

    def refuse(store: LocalStore, name: str, *rest: object, **named: object) -> None:
        if 1 <= len(looks) <= 2:
            raise StorageError("the server is away", kind="unavailable")
        read_into(store, name, *rest, **named)

    monkeypatch.setattr(LocalStore, "read_into", refuse)
    monkeypatch.setattr(watch_command, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(SystemExit) as ended:
        cli.main(["watch", str(tmp_path), "--interval", "0.5"])
    shown = capsys.readouterr()
    assert ended.value.code == 130
    assert [line.split("  ")[1] for line in shown.out.splitlines()[1:]] == ["step 2"]
    warning, again = shown.err.splitlines()
    assert warning == "warning: the server is away; looking again every 0.5 s"
    assert again == "the storage answers again"


def test_a_checkpoint_whose_telemetry_could_not_be_listed_comes_with_a_later_look(
    tmp_path, capsys, monkeypatch
) -> None:
    bcp.save(tmp_path, {"x": 1}, step=1)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            bcp.save(tmp_path, {"x": 1}, step=2)
        if len(looks) == 4:
            raise KeyboardInterrupt

    list_folder = LocalStore.list

    def refuse(store: LocalStore, folder: str) -> dict[str, int | None]:
        if len(looks) == 1 and folder.endswith("telemetry"):
            raise StorageError("the server is away", kind="unavailable")
        return list_folder(store, folder)

    monkeypatch.setattr(watch_command, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(LocalStore, "list", refuse)
    with pytest.raises(SystemExit):
        cli.main(["watch", str(tmp_path)])
    shown = capsys.readouterr()
    assert [line.split("  ")[1] for line in shown.out.splitlines()[1:]] == ["step 2"]
    assert shown.err.splitlines()[0].startswith("warning: the server is away")


def test_telemetry_that_can_never_be_listed_holds_up_no_checkpoint(tmp_path, capsys, monkeypatch) -> None:
    bcp.save(tmp_path, {"x": 1}, step=1)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            bcp.save(tmp_path, {"x": 1}, step=2)
            bcp.save(tmp_path, {"x": 1}, step=3)
            telemetry = tmp_path / "step_00000002" / "telemetry"
            telemetry.rename(tmp_path / "elsewhere")
            telemetry.symlink_to("telemetry")
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch_command, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(SystemExit):
        cli.main(["watch", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()[1:]
    without_timings = {line.split("  ")[1]: line.endswith("(no timings)") for line in lines}
    assert without_timings == {"step 2": True, "step 3": False}
