"""Kills a training run and resumes it on three layouts, stops it with SIGTERM and resumes it on another one, kills it
with steps in memory and resumes it from there, and proves that nothing was lost but time. Started by `make demo`;
everything it writes goes under --out. It compares runs by their logs alone: how a run trains and saves is in
train_gpt.py.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo_report import Claim, plot_losses, print_claims, print_losses, show_checkpoint
from demo_runs import Run, RunError, Schedule
from rich.console import Console

import bytecheckpoint as bcp

SCHEDULE = Schedule(steps=60, save_every=20, memory_every=5, timeout_s=300)
KILL_AT = 47
"""A step after the last save, so that work is lost with the processes."""
STOP_AT = 27
"""A step that is not due, with many before the next one that is: only the stop can have saved it."""
STOPPED_RANK = 2

LOSS_TOLERANCE = 1e-4
"""Tolerance in nats per byte. Another layout adds the same numbers in another order, which shows as about 1e-6. A
schedule that is off by one step would show as 3e-4, a lost optimizer state as 1e-2.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and stop a training run, and resume it on other layouts.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for all that the demo writes")
    out = parser.parse_args().out.resolve()
    console = Console(highlight=False)
    started = time.monotonic()
    try:
        claims = run_demo(out, console)
    except (RunError, bcp.CheckpointError) as error:
        console.print(f"FAIL: {error}", style="bold red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; no process is left behind.")
        return 130
    console.rule("Claims")
    print_claims(console, claims)
    console.print(f"Took {time.monotonic() - started:.0f} s. Logs, checkpoints and plots of the losses are in {out}.")
    return 0 if all(claim.is_true for claim in claims) else 1


def run_demo(out: Path, console: Console) -> list[Claim]:
    reference = Run("reference", "FSDP2 x 4", layout="fsdp", num_processes=4, folder=out / "reference")
    reference.clear()
    console.rule("1. The reference: a run that is never interrupted")
    console.print(
        f"A small GPT learns the source text of Python's standard library for {SCHEDULE.steps} steps, with FSDP2 on 4 "
        f"processes. It saves every {SCHEDULE.save_every} steps and the last one, in the background."
    )
    reference.finish(SCHEDULE, console)
    claims = [*kill_and_resume(reference, out, console), *stop_and_resume(reference, out, console)]
    with memory_root(out) as memory:
        return [*claims, *kill_and_resume_from_memory(reference, out, memory, console)]


@contextmanager
def memory_root(out: Path) -> Iterator[Path]:
    """Yields an empty folder in memory, or beside the rest where there is no tmpfs, and removes it afterwards."""
    tmpfs = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="bytecheckpoint-demo-", dir=tmpfs if tmpfs.is_dir() else out) as folder:
        yield Path(folder)


def kill_and_resume(reference: Run, out: Path, console: Console) -> list[Claim]:
    killed = Run("killed", "FSDP2 x 4", layout="fsdp", num_processes=4, folder=out / "killed")
    resumed = [
        Run("(a)", "FSDP2 x 4", layout="fsdp", num_processes=4, folder=out / "resumed-a-fsdp-4"),
        Run("(b)", "TP x 2", layout="tp", num_processes=2, folder=out / "resumed-b-tp-2"),
        Run("(c)", "1 process", layout="single", num_processes=1, folder=out / "resumed-c-single"),
    ]
    killed.clear()
    console.rule("2. The same run, killed")
    num_lost = KILL_AT % SCHEDULE.save_every
    console.print(f"SIGKILL hits all of its processes at once at step {KILL_AT}, {num_lost} steps after a save.")
    killed.kill_at(KILL_AT, SCHEDULE, console)
    step = find_newest_step(killed, console)
    for run in resumed:
        console.rule(f"3. Resumed {run.name}: {run.title}, after step {step}")
        resume(run, killed, console)

    console.rule("4. Side by side")
    runs = [reference, killed, *resumed]
    print_losses(console, runs, resumed_after=step)
    plot_losses(runs, resumed_after=step, tolerance=LOSS_TOLERANCE, path=out / "losses-killed.png")
    is_shown = show_checkpoint(console, bcp.open(killed.checkpoints).info.path)
    claims = judge_killed(reference, killed, resumed, step)
    return [*claims, Claim("bcp show reads the checkpoint", is_shown, "see above")]


def stop_and_resume(reference: Run, out: Path, console: Console) -> list[Claim]:
    stopped = Run("stopped", "FSDP2 x 4", layout="fsdp", num_processes=4, folder=out / "stopped")
    resumed = Run("(d)", "FSDP2 x 2", layout="fsdp", num_processes=2, folder=out / "resumed-d-fsdp-2")
    stopped.clear()
    console.rule("5. The same run, stopped")
    console.print(
        f"One of its processes gets SIGTERM at step {STOP_AT}, as from a scheduler. All of them save one step and end."
    )
    stopped.stop_at(STOP_AT, SCHEDULE, console, rank=STOPPED_RANK)
    step = bcp.latest(stopped.checkpoints)
    if step is None:
        raise RunError("the run was stopped, and committed no checkpoint")
    console.rule(f"6. Resumed {resumed.name}: {resumed.title}, after step {step}")
    resume(resumed, stopped, console)

    console.rule("7. Side by side")
    runs = [reference, stopped, resumed]
    print_losses(console, runs, resumed_after=step)
    plot_losses(runs, resumed_after=step, tolerance=LOSS_TOLERANCE, path=out / "losses-stopped.png")
    return judge_stopped(reference, stopped, resumed, step)


def kill_and_resume_from_memory(reference: Run, out: Path, memory: Path, console: Console) -> list[Claim]:
    killed = Run("killed", "FSDP2 x 4", layout="fsdp", num_processes=4, folder=out / "killed-memory", memory=memory)
    checkpoints = killed.checkpoints
    resumed = Run(
        "(e)",
        "FSDP2 x 4",
        layout="fsdp",
        num_processes=4,
        folder=out / "resumed-e-memory",
        checkpoints=checkpoints,
        memory=memory,
    )
    from_disk = Run("(f)", "FSDP2 x 4", layout="fsdp", num_processes=4, folder=out / "resumed-f-disk")
    killed.clear()
    console.rule("8. The same run, with steps held in memory, killed")
    console.print(
        f"Every {SCHEDULE.memory_every}th step is held in memory. SIGKILL hits all processes at step {KILL_AT}."
    )
    killed.kill_at(KILL_AT, SCHEDULE, console)
    step = find_newest_step(killed, console)
    console.rule("9. Resumed (f): from disk, as if the memory had gone with the host")
    resume(from_disk, killed, console)
    console.rule("9. Resumed (e): from memory")
    resumed.clear()
    resumed.finish(SCHEDULE, console)

    console.rule("10. Side by side")
    print_losses(console, [reference, killed, from_disk, resumed], resumed_after=step)
    return judge_memory(reference, killed, resumed, from_disk)


def judge_memory(reference: Run, killed: Run, resumed: Run, from_disk: Run) -> list[Claim]:
    """Returns the claims about the kill of a run that held steps in memory."""
    of_memory, of_disk = resumed.events("loaded")[0], from_disk.events("loaded")[0]
    step, last = of_memory["step"], max(killed.losses)
    state = f"{resumed.name} {resumed.title}: starts from bit-identical parameters and optimizer state"
    end = f"{resumed.name} {resumed.title}: ends with bit-identical parameters and optimizer state"
    final = SCHEDULE.steps - 1
    return [
        Claim(
            "killed with steps in memory: resumed from memory, at a newer step than from disk",
            is_true=of_memory["from_memory"] and not of_disk["from_memory"] and step > of_disk["step"],
            evidence=f"step {step} in {of_memory['load_s']:.2f} s, {last - step} steps done again; from disk step "
            f"{of_disk['step']} in {of_disk['load_s']:.2f} s, {last - of_disk['step']} steps done again",
        ),
        same_state(state, resumed.digests("loaded", step), killed.digests("saving", step)),
        same_losses(f"{resumed.name}: losses are bit-identical", resumed, reference, first=step + 1),
        same_state(end, resumed.digests("saving", final), reference.digests("saving", final)),
    ]


def resume(run: Run, interrupted: Run, console: Console) -> None:
    """Runs to the end, from a copy of what the interrupted run has saved."""
    run.clear()
    shutil.copytree(interrupted.checkpoints, run.checkpoints)
    run.finish(SCHEDULE, console)


def find_newest_step(killed: Run, console: Console) -> int:
    """Returns the step of the newest committed checkpoint of the killed run."""
    step, last = bcp.latest(killed.checkpoints), max(killed.losses)
    if step is None:
        raise RunError(f"no checkpoint was committed before the kill at step {last}")
    console.print(
        f"All dead after step {last}. The newest committed checkpoint is that of step {step}: {last - step} steps must "
        "be done again, and no process could clean up."
    )
    return step


def judge_killed(reference: Run, killed: Run, resumed: list[Run], step: int) -> list[Claim]:
    """Returns the claims about the kill with their evidence."""
    same_layout, *other_layouts = resumed
    claims = [same_losses("killed run: losses up to the kill are bit-identical", killed, reference, first=0)]
    for run in resumed:
        text = f"{run.name} {run.title}: starts from bit-identical parameters and optimizer state"
        claims.append(same_state(text, run.digests("loaded", step), reference.digests("saving", step)))
    text = f"{same_layout.name} {same_layout.title}: losses are bit-identical"
    claims.append(same_losses(text, same_layout, reference, first=step + 1))
    text = f"{same_layout.name} {same_layout.title}: ends with bit-identical parameters and optimizer state"
    last = SCHEDULE.steps - 1
    claims.append(same_state(text, same_layout.digests("saving", last), reference.digests("saving", last)))
    claims += [close_losses(run, reference, first=step + 1) for run in other_layouts]
    return claims


def judge_stopped(reference: Run, stopped: Run, resumed: Run, step: int) -> list[Claim]:
    """Returns the claims about the stop with their evidence. That all processes ended with 0 was checked before."""
    last, is_due = max(stopped.losses), step % SCHEDULE.save_every == 0
    steps = [*stopped.losses, *resumed.losses]
    stops = [event["step"] for event in stopped.events("stopping")]
    state = f"{resumed.name} {resumed.title}: starts from the bits that the stopped run saved"
    return [
        Claim(
            f"stopped run: SIGTERM to rank {STOPPED_RANK} makes all save the step at which they end, with exit code 0",
            is_true=stops == [step] and step == last and not is_due,
            evidence=f"trained up to step {last}, newest checkpoint {step}, signal at step {STOP_AT}",
        ),
        same_losses("stopped run: losses up to the stop are bit-identical", stopped, reference, first=0),
        same_state(state, resumed.digests("loaded", step), stopped.digests("saving", step)),
        Claim(
            f"stopped run and {resumed.name}: train each step once",
            is_true=steps == list(range(SCHEDULE.steps)),
            evidence=f"{len(stopped.losses)} and {len(resumed.losses)} of {SCHEDULE.steps} steps",
        ),
        close_losses(resumed, reference, first=step + 1),
    ]


def same_losses(text: str, run: Run, reference: Run, *, first: int) -> Claim:
    expected = {step: loss for step, loss in reference.losses.items() if first <= step <= max(run.losses, default=-1)}
    differing = [step for step, loss in expected.items() if run.losses.get(step) != loss]
    is_true = bool(expected) and not differing and list(run.losses) == list(expected)
    evidence = f"differs first at step {differing[0]}" if differing else f"all {len(expected)} steps from {first} on"
    return Claim(text, is_true, evidence)


def same_state(text: str, found: dict[str, str], expected: dict[str, str]) -> Claim:
    differing = sorted(fqn for fqn in found.keys() | expected.keys() if found.get(fqn) != expected.get(fqn))
    if differing:
        return Claim(text, is_true=False, evidence=f"{len(differing)} differ, among them {differing[:3]}")
    return Claim(text, is_true=bool(found), evidence=f"{len(found)} tensors, by sha256")


def close_losses(run: Run, reference: Run, *, first: int) -> Claim:
    expected = {step: loss for step, loss in reference.losses.items() if step >= first}
    has_all = list(run.losses) == list(expected)
    largest = max((abs(loss - expected[step]) for step, loss in run.losses.items() if step in expected), default=0.0)
    text = f"{run.name} {run.title}: losses agree within {LOSS_TOLERANCE} nats per byte"
    evidence = f"largest difference over {len(run.losses)} steps: {largest:.1e}"
    return Claim(text, has_all and largest <= LOSS_TOLERANCE, evidence)


if __name__ == "__main__":
    sys.exit(main())
