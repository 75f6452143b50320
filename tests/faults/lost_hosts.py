"""Hosts of a job that saves to memory are lost, and what is left in memory is damaged: bits flipped, files cut off,
exchanged or put in the place of later ones. Then another number of ranks resumes. It gets the newest version of which
every byte is left somewhere, with its own values, or an error; never anything else.

Ranks with a memory root of their own stand for hosts, and send between them by sockets. What can be resumed is found by
a look at the bytes of all files.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import bytecheckpoint as bcp
from bytecheckpoint.memory_tier.parity_block import FoundParity, scan_parity
from bytecheckpoint.saving.in_flight import process_state
from bytecheckpoint.staging.copy_slots import scan_copies
from bytecheckpoint.storage.memory_root import slot_file, version_files
from bytecheckpoint.storage.memory_root.job_folder import JobFolder, find_jobs
from bytecheckpoint.storage.memory_root.slot_file import FilePlace, FoundSlot
from distributed.played_hosts import on_host
from distributed.workers import WorkerDied, WorkerHung, WorkerPool
from faults.campaigns import Asked, Broken, Campaign, Outcome, side_by_side

STEPS = range(1, 5)
SHAPE = (480, 257)
NUM_RANKS = 4
NUM_LANES = 2


class World(NamedTuple):
    """A job before anything is lost."""

    hosts: tuple[int, ...]
    """The host of each rank."""
    memory: dict[str, Any]
    stored: int = 0
    """Step that goes to storage as well; 0 for none."""
    kind: str = "sharded"
    """Layout of the state; see `layout_of`."""
    racks: str = ""
    """The label of each host, a letter; empty where each is a failure domain of its own."""

    def domain_of(self, host: int) -> str | None:
        """Returns the label that ranks of a host give."""
        if not self.racks:
            return None
        return self.racks[host] if host < len(self.racks) else f"new {host}"

    def domains(self) -> list[tuple[int, ...]]:
        """Returns the hosts of each failure domain."""
        hosts = sorted({*self.hosts})
        racks = self.racks or hosts
        return [tuple(host for host in hosts if racks[host] == rack) for rack in sorted({*racks}, key=str)]


WORLDS = (
    World((0, 1, 2, 3), {"copies": 2}),
    World((0, 0, 1, 1), {"copies": 2}, stored=2),
    World((0, 1, 2, 2), {"copies": 3}),
    World((0, 1, 2, 3), {"copies": 1, "parity": 1}),
    World((0, 0, 1, 2), {"copies": 1, "parity": 1}, stored=3),
)


REPLICATED = (
    World((0, 0, 1, 1), {"copies": 2}, kind="hsdp"),
    World((0, 1, 2, 3), {"copies": 2}, kind="ddp"),
    World((0, 1, 2, 3), {"copies": 2}, stored=2, kind="hsdp"),
    World((0, 1, 2, 3), {"copies": 2}, kind="zero", racks="aabb"),
    World((0, 0, 1, 2), {"copies": 1, "parity": 1}, kind="zero"),
    World((0, 1, 1, 2), {"copies": 3}, kind="hsdp"),
)
"""Worlds in which ranks of several hosts hold the same."""


class Layout(NamedTuple):
    """The meshes of a call, and how the state lies on them."""

    flat: DeviceMesh
    of_w: DeviceMesh
    placements: list[Placement]
    has_moment: bool


def layout_of(kind: str) -> Layout:
    """Returns where ranks have `w`: sharded over all of them; with `hsdp` over two, which others have alike; with `ddp`
    and `zero` on all alike, the latter with a moment that is sharded over all.
    """
    num_ranks = dist.get_world_size()
    flat = init_device_mesh("cpu", (num_ranks,))
    is_hybrid = kind == "hsdp" and num_ranks == NUM_RANKS
    mesh = init_device_mesh("cpu", (2, 2)) if is_hybrid else flat
    is_sharded = kind in {"sharded", "hsdp"}
    placements = [*([Replicate()] if is_hybrid else []), Shard(0) if is_sharded else Replicate()]
    return Layout(flat, mesh, placements, has_moment=kind == "zero")


def state_of(step: int, layout: Layout) -> dict[str, Any]:
    """Returns small tensors that all ranks have, and a large one."""
    flat = layout.flat
    values = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + 1000 * step
    small = {f"b{number}": torch.full((17,), float(step + number)) for number in range(3)}
    whole = {name: spread(tensor, flat, [Replicate()]) for name, tensor in small.items()}
    state = {"w": spread(values, layout.of_w, layout.placements), **whole, "step": step}
    return state | ({"moment": spread(values + 0.5, flat, [Shard(0)])} if layout.has_moment else {})


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Returns what `distribute_tensor` does where all ranks have the tensor, without messages."""
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            tensor = tensor.tensor_split(mesh.size(dim))[mesh.get_local_rank(dim)].clone()
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


def options(folder: Path, host: int, world: World) -> bcp.SaveOptions:
    memory = bcp.Memory(root=root_of(folder, host), failure_domain=world.domain_of(host), **world.memory)
    return bcp.SaveOptions(memory=memory, timeout_s=20)


def root_of(folder: Path, host: int) -> Path:
    return folder / f"host{host}"


def save_all(rank: int, world_size: int, folder: Path, world: World) -> None:
    """Saves every step, and gives up what the process holds, as its death would."""
    given, layout = options(folder, world.hosts[rank], world), layout_of(world.kind)
    with warnings.catch_warnings(), on_host(world.hosts[rank]):
        warnings.simplefilter("ignore")
        for step in STEPS:
            to = "storage" if step == world.stored else "memory"
            state = state_of(step, layout)
            handle = bcp.save(folder / "ckpt", state, step=step, async_save=True, options=given, to=to)
            handle.held("host")
            handle.result()
    end_process()


def end_process() -> None:
    memories = process_state().memories
    for memory in memories.values():
        memory.close()
    memories.clear()


class Resumed(NamedTuple):
    """What a rank got."""

    step: int
    """0 for nothing."""
    what: str
    """The kind of an error, or what is wrong with the values; empty where all is well."""


def resume(rank: int, world_size: int, folder: Path, hosts: Sequence[int], world: World) -> Resumed:
    layout = layout_of(world.kind)
    state = state_of(0, layout)
    try:
        with warnings.catch_warnings(), on_host(hosts[rank]):
            warnings.simplefilter("ignore")
            given = options(folder, hosts[rank], world)
            patient = bcp.LoadOptions(timeout_s=20)
            report = bcp.resume(folder / "ckpt", state, options=given, load_options=patient)
    except bcp.CheckpointError as error:
        return Resumed(0, f"{error.kind}: {error}")
    finally:
        end_process()
    if report is None:
        return Resumed(0, "")
    expected = state_of(report.step, layout)
    tensors = [name for name in expected if name != "step"]
    odd = [name for name in tensors if not torch.equal(state[name].to_local(), expected[name].to_local())]
    odd += ["step"] * (state["step"] != report.step)
    return Resumed(report.step, f"wrong values: {', '.join(odd)}" if odd else "")


def job_on(folder: Path, host: int) -> JobFolder | None:
    found = find_jobs(str(root_of(folder, host))) if root_of(folder, host).exists() else []
    return found[0][0] if found else None


def content_of(place: FilePlace) -> bytes:
    with open(place.path, "rb") as file:
        file.seek(place.byte_offset)
        return file.read(place.byte_length)


def slots_of(job: JobFolder, kind: str) -> list[FoundSlot]:
    return list(slot_file.scan(job.slots)) if kind == "memory" else scan_copies(job, "copies")


class Left(NamedTuple):
    """What lies in the memory root of a host, right or wrong."""

    host: str
    slots: list[tuple[str, FoundSlot]]
    """Each with its kind."""
    known: set[str]
    """Saves of which there is a manifest."""
    parity: list[FoundParity]


def _left_of(job: JobFolder) -> Left:
    slots = [(kind, slot) for kind in ("memory", "copies") for slot in slots_of(job, kind)]
    known = {version.record.save_id for version in version_files.read_versions(job)}
    return Left(job.host, slots, known, scan_parity(job))


class Truth:
    """What was saved, and what is left of it, by the bytes."""

    def __init__(self, folder: Path, world: World) -> None:
        self._folder = folder
        self._stored = world.stored
        self._files: dict[str, bytes] = {}
        self._saves: dict[str, tuple[int, list[str]]] = {}
        """Save id -> step and data files."""
        self._blocks: dict[tuple[str, str], bytes] = {}
        for host in {*world.hosts}:
            job = job_on(folder, host)
            assert job is not None
            for slot in slots_of(job, "memory"):
                self._files |= {name: content_of(place) for name, place in slot.places().items()}
            for version in version_files.read_versions(job):
                names = [file.name for file in version.files]
                self._saves[version.record.save_id] = version.record.step, names
            for found in scan_parity(job):
                self._blocks[found.save_id, job.host] = content_of(found.place)

    def best(self, hosts: Sequence[int]) -> int:
        """Returns the newest step of which all is left on these hosts, or at the path; 0 if there is none."""
        whole = [self._stored] if self._stored else [0]
        left = [_left_of(job) for job in filter(None, (job_on(self._folder, host) for host in {*hosts}))]
        for save_id, (step, names) in self._saves.items():
            held, has_manifest, blocks = self._left(save_id, left)
            anywhere = {name for name, _, _ in held}
            missing = [name for name in names if name not in anywhere]
            if has_manifest and all(self._can_rebuild(name, held, blocks) for name in missing):
                whole.append(step)
        return max(whole)

    def _left(self, save_id: str, left: Sequence[Left]) -> tuple[set[tuple[str, str, str]], bool, dict[str, Any]]:
        held: set[tuple[str, str, str]] = set()
        has_manifest, blocks = False, {}
        for host, slots, known, parity in left:
            for kind, slot in slots:
                if slot.save_id == save_id:
                    held |= {
                        (name, kind, host)
                        for name, place in slot.places().items()
                        if content_of(place) == self._files.get(name)
                    }
            has_manifest |= save_id in known
            for found in parity:
                is_own = found.held.members[found.held.position].host == host
                if is_own and found.save_id == save_id and content_of(found.place) == self._blocks.get((save_id, host)):
                    blocks[host] = found.held
        return held, has_manifest, blocks

    @staticmethod
    def _can_rebuild(name: str, held: set[tuple[str, str, str]], blocks: dict[str, Any]) -> bool:
        for block in blocks.values():
            owner = next((member for member in block.members if name in dict(member.files)), None)
            others = [member for member in block.members if member is not owner]
            if owner is not None and all(
                member.host in blocks and all((file, "memory", member.host) in held for file, _ in member.files)
                for member in others
            ):
                return True
        return False


def files_in(folder: Path, hosts: Sequence[int]) -> list[Path]:
    """Slots, copies, blocks of parity and manifests that are left, in an order that does not hang on their names, which
    are drawn anew for each run.
    """
    found: list[Path] = []
    for job in filter(None, (job_on(folder, host) for host in sorted({*hosts}))):
        for slots in (slots_of(job, "memory"), scan_copies(job, "copies"), scan_copies(job, "parity")):
            found += [Path(slot.path) for slot in sorted(slots, key=_place_in_order)]
        steps = {version.record.save_id: version.record.step for version in version_files.read_versions(job)}
        manifests = [path for path in Path(job.versions).iterdir() if path.stem in steps]
        found += sorted(manifests, key=lambda path: steps[path.stem])
    return found


def _place_in_order(slot: FoundSlot) -> tuple[int, int]:
    return (slot.header.step, slot.header.rank) if slot.header is not None else (0, 0)


def flip(draw: random.Random, path: Path, others: Sequence[Path]) -> None:
    """Flips a bit, half of the time within what is in use at the beginning."""
    size = path.stat().st_size
    bit = draw.randrange(8 * (size if draw.random() < 0.5 else min(size, 5000)))
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def cut(draw: random.Random, path: Path, others: Sequence[Path]) -> None:
    with path.open("r+b") as file:
        file.truncate(draw.randrange(path.stat().st_size))


def swap(draw: random.Random, path: Path, others: Sequence[Path]) -> None:
    """Exchanges two files of the same kind, on any hosts."""
    other = draw.choice([each for each in others if each.parent.name == path.parent.name])
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def make_stale(draw: random.Random, path: Path, others: Sequence[Path]) -> None:
    """Puts the bytes of another file behind the header of this one."""
    other = draw.choice([each for each in others if each.parent.name == path.parent.name])
    content, older = path.read_bytes(), other.read_bytes()
    path.write_bytes((content[:4096] + older[4096:] + content[len(older) :])[: len(content)])


DAMAGES = (flip, cut, swap, make_stale)


class Trial(NamedTuple):
    """What goes wrong, and who comes back."""

    lost: tuple[int, ...]
    damages: tuple[Any, ...]
    world_size: int
    least: int = 0
    """Step that has to be left, whatever the bytes say."""


def drawn_domain(draw: random.Random, world: World) -> Trial:
    """Draws the loss of one whole failure domain, from which the newest step is resumed."""
    lost = draw.choice(world.domains())
    num_left = len({*world.hosts}) - len(lost)
    return Trial(lost, (), draw.choice((NUM_RANKS, draw.randint(num_left, NUM_RANKS))), STEPS[-1])


def drawn(draw: random.Random, world: World, *, with_damage: bool) -> Trial:
    hosts = sorted({*world.hosts})
    num_lost = draw.choice((0, 1) if with_damage else (1, 1, 2))
    lost = tuple(draw.sample(hosts, min(num_lost, len(hosts) - 1)))
    damages = tuple(draw.choice(DAMAGES) for _ in range(draw.randint(1, 3))) if with_damage else ()
    return Trial(lost, damages, draw.randint(len(hosts) - len(lost), NUM_RANKS))


def new_hosts(draw: random.Random, world: World, trial: Trial) -> list[int]:
    """Returns the host of each rank that comes back: all that are left, and new ones."""
    left = sorted({*world.hosts} - {*trial.lost})
    hosts = left + [draw.choice([*left, 8, 9]) for _ in range(trial.world_size - len(left))]
    draw.shuffle(hosts)
    return hosts


class Attempt(NamedTuple):
    """What came of a trial."""

    seen: str
    is_wrong: str | None


def judged(results: Sequence[Resumed], best: int) -> Attempt:
    first = results[0]
    wrong = next((each.what for each in results if each.step and each.what), None)
    if wrong is not None:
        return Attempt("wrong", f"step {first.step}: {wrong}")
    if len({each.step for each in results}) > 1:
        return Attempt("wrong", f"ranks are at different steps: {[each.step for each in results]}")
    if first.step < best:
        return Attempt("wrong", f"step {best} is left, and step {first.step} was resumed ({first.what})")
    if not first.step:
        is_told = first.what.startswith(("missing_file", "checksum", "truncated", "bad_manifest")) or not first.what
        return Attempt("nothing left", None if is_told else f"an error of another kind: {first.what}")
    return Attempt("the newest" if first.step == STEPS[-1] else "an older one", None)


class Lane:
    """Workers, and the worlds that they have saved. Each world is saved once; its memory is put back before a trial."""

    def __init__(self, workers: WorkerPool, folder: Path, worlds: Sequence[World]) -> None:
        self._workers, self._folder, self._worlds = workers, folder, worlds
        self._saved: dict[int, Truth] = {}

    def attempt(
        self, number: int, draw: random.Random, draw_trial: Callable[[random.Random, World], Trial]
    ) -> tuple[int, Attempt]:
        which = number % len(self._worlds)
        world, folder, kept = self._worlds[which], self._folder / f"{which}", self._folder / f"kept{which}"
        if which not in self._saved:
            self._workers.run(save_all, folder, world, world_size=len(world.hosts))
            self._saved[which] = Truth(folder, world)
            shutil.copytree(folder, kept)
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        return number, attempt(self._workers, self._saved[which], folder, world, draw, draw_trial(draw, world))


def attempts(
    asked: Asked, worlds: Sequence[World], draw_trial: Callable[[random.Random, World], Trial]
) -> list[tuple[int, Attempt]]:
    """Does the trials, in two lanes where they are many: ranks that send to one another wait most of their time."""
    num_lanes = NUM_LANES if len(asked.trials) > NUM_LANES * len(worlds) ** 2 else 1
    with ExitStack() as stack:
        pools = [stack.enter_context(closing(WorkerPool())) for _ in range(num_lanes)]
        lanes = [Lane(pool, asked.folder / f"lane{number}", worlds) for number, pool in enumerate(pools)]
        return side_by_side(asked, lanes, lambda lane, number: lane.attempt(number, asked.rng(number), draw_trial))


def attempt(
    workers: WorkerPool, truth: Truth, folder: Path, world: World, draw: random.Random, trial: Trial
) -> Attempt:
    for host in trial.lost:
        shutil.rmtree(root_of(folder, host))
    hosts = new_hosts(draw, world, trial)
    for damage in trial.damages:
        left = files_in(folder, hosts)
        damage(draw, draw.choice(left), left)
    best = truth.best(hosts)
    outcomes = workers.run_each(resume, folder, hosts, world, world_size=trial.world_size)
    told = [outcome.error for outcome in outcomes if outcome.error is not None]
    if told:
        is_dead = isinstance(told[0], WorkerDied | WorkerHung)
        return Attempt(
            "wrong", f"{'a rank ended or hangs' if is_dead else 'no CheckpointError'}: {told[0]!r} ({trial})"
        )
    found = judged([outcome.value for outcome in outcomes], max(best, trial.least))
    where = f" ({[damage.__name__ for damage in trial.damages]}, lost {trial.lost}, back on {hosts}, {world})"
    return found._replace(is_wrong=found.is_wrong + where if found.is_wrong else None)


def outcome_of(found_by_trial: Iterable[tuple[int, Attempt]]) -> Outcome:
    seen: Counter[str] = Counter()
    broken = []
    for number, found in found_by_trial:
        seen[found.seen] += 1
        if found.is_wrong is not None:
            broken.append(Broken(number, found.is_wrong))
    told = ", ".join(f"{seen[what]:,} {words}" for what, words in RESULTS.items() if seen[what])
    return Outcome(sum(seen.values()), tuple(broken), told)


RESULTS = {
    "the newest": "resumed at the newest step",
    "an older one": "at an older one because no more was left",
    "nothing left": "found nothing left and said so",
    "wrong": "wrong",
}


def run_losses(asked: Asked) -> Outcome:
    return outcome_of(attempts(asked, WORLDS, partial(drawn, with_damage=False)))


def run_damages(asked: Asked) -> Outcome:
    return outcome_of(attempts(asked, WORLDS, partial(drawn, with_damage=True)))


def run_domains(asked: Asked) -> Outcome:
    return outcome_of(attempts(asked, REPLICATED, drawn_domain))


HOW = "ranks with memory roots of their own over gloo; copies on one or two other hosts, or parity over three or four"
CAMPAIGNS = (
    Campaign(
        name="lost-hosts",
        fault="one host or two are lost with their memory; 1 to 4 ranks come back, on old and new hosts",
        how=f"the memory roots are erased; {HOW}",
        unit="losses",
        run=run_losses,
        trials=range(2500),
        quick=range(len(WORLDS)),
    ),
    Campaign(
        name="lost-domains",
        fault="a host or rack is lost with its memory; ranks on several hold the same: HSDP, DDP and ZeRO",
        how=f"as above, with replicas staged where they are; 1 to 4 ranks come back and have the newest step; {HOW}",
        unit="losses",
        run=run_domains,
        trials=range(2000),
        quick=range(2 * len(REPLICATED)),
    ),
    Campaign(
        name="damaged-memory",
        fault="slots, copies, parity and manifests in memory: bits flipped, cut off, exchanged, made stale; in half of "
        "the trials a host is lost as well",
        how=f"up to three of them at once, anywhere; {HOW}",
        unit="damages",
        run=run_damages,
        trials=range(4000),
        quick=range(2 * len(WORLDS)),
    ),
)
