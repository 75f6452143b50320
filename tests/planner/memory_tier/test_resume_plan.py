"""Which version a resume takes and from where, beside a model that looks for the bytes themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest

from bytecheckpoint.planner.memory_tier.resume_plan import (
    DamagedHolding,
    FileHolder,
    HeldParity,
    ParityMember,
    ResumePlan,
    SeenByRank,
    SeenVersion,
    StoredVersion,
    plan_resume,
)


def seen(
    save_id: str, *, step: int, generation: int = 0, number: int = 0, **of_host: dict[str, int] | None
) -> SeenVersion:
    """A version as a host shows it; nothing is there unless told."""
    places = {place: of_host.get(place) or {} for place in ("memory", "copies", "local")}
    return SeenVersion(save_id, generation, step, number, of_host.get("needed"), **places, parity=[])


def chosen(plan: ResumePlan) -> list[str]:
    return [version.save_id for version in plan.versions]


def test_the_newest_version_all_of_whose_files_are_held_is_taken() -> None:
    needed = {"a0": 1, "a1": 2}
    old = {"b0": 1, "b1": 2}
    first = [seen("a", step=9, needed=needed, memory={"a0": 1}), seen("b", step=8, needed=old, memory={"b0": 1})]
    second = [seen("a", step=9), seen("b", step=8, needed=old, memory={"b1": 2})]
    plan = plan_resume([SeenByRank("h0", first), SeenByRank("h1", second)], [], ())
    assert chosen(plan) == ["b"]
    assert plan.versions[0].files == {"b0": [FileHolder("memory", "h0")], "b1": [FileHolder("memory", "h1")]}
    assert plan.versions[0].manifest_hosts == ["h0", "h1"]
    (missed,) = plan.passed_over
    assert (missed.save_id, missed.step) == ("a", 9)
    assert missed.what.startswith("1 of 2 data files (a1) are whole in no memory")


def test_files_of_different_saves_are_never_mixed() -> None:
    here = [
        seen("a", step=9, needed={"x": 1, "y": 1}, memory={"x": 1}),
        seen("b", step=9, needed=None, memory={"y": 1}),
    ]
    assert chosen(plan_resume([SeenByRank("h0", here)], [StoredVersion("c", None, 9, {"y": 1}, False)], ())) == []


def test_a_later_generation_beats_later_steps_of_an_abandoned_branch() -> None:
    here = [
        seen("old", step=90, generation=1, needed={"x": 1}, memory={"x": 1}),
        seen("new", step=50, generation=2, needed={"x": 1}, memory={"x": 1}),
    ]
    assert chosen(plan_resume([SeenByRank("h0", here)], [StoredVersion("s", 1, 95, {"x": 1}, True)], ())) == [
        *("new", "s", "old")
    ]


def test_a_step_that_was_saved_again_in_memory_is_the_later_one() -> None:
    here = [
        seen(name, step=5, number=number, needed={"x": 1}, memory={"x": 1}) for name, number in (("z", 3), ("a", 4))
    ]
    assert chosen(plan_resume([SeenByRank("h0", here)], [], ())) == ["a", "z"]


@pytest.mark.parametrize(("step", "expected"), [(5, ["m", "s"]), (6, ["s", "m"]), (4, ["m", "s"])])
def test_a_checkpoint_that_was_saved_without_memory_counts_by_its_step(step: int, expected: list[str]) -> None:
    here = [seen("m", step=5, generation=3, needed={"x": 1}, memory={"x": 1})]
    stored = [StoredVersion("s", None, step, {"x": 1}, True)]
    assert chosen(plan_resume([SeenByRank("h0", here)], stored, ())) == expected


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_save_that_went_to_both_is_read_from_both(is_committed: bool) -> None:
    here = [seen("m", step=5, needed={"x": 1, "y": 2}, memory={"x": 1})]
    stored = [StoredVersion("m", 0, 5, {"x": 1, "y": 2}, is_committed)]
    (version,) = plan_resume([SeenByRank("h0", here)], stored, ()).versions
    assert version.files == {
        "x": [FileHolder("memory", "h0"), FileHolder("storage", "")],
        "y": [FileHolder("storage", "")],
    }
    assert version.manifest_hosts == (["h0", ""] if is_committed else ["h0"])


def test_files_at_the_path_without_a_commit_are_no_version() -> None:
    assert plan_resume([SeenByRank("h0", [])], [StoredVersion("m", 0, 5, {"x": 1}, False)], ()) == ResumePlan([], [])


def test_a_file_of_another_length_is_not_held() -> None:
    here = [seen("m", step=5, needed={"x": 2}, memory={"x": 1})]
    assert chosen(plan_resume([SeenByRank("h0", here)], [], ())) == []


def test_holders_come_by_cost_and_leave_as_they_prove_damaged() -> None:
    needed = {"x": 1}
    hosts = [
        SeenByRank("h0", [seen("m", step=5, needed=needed, local=needed)]),
        SeenByRank("h1", [seen("m", step=5, needed=needed, copies=needed)]),
        SeenByRank(
            "h2", [seen("m", step=5, needed=needed, memory=needed), seen("o", step=4, needed=needed, memory=needed)]
        ),
    ]
    stored = [StoredVersion("m", 0, 5, needed, True)]
    damaged: list[DamagedHolding] = []
    tried = []
    while (plan := plan_resume(hosts, stored, damaged)).versions:
        version = plan.versions[0]
        tried.append((version.save_id, version.files["x"][0].kind))
        damaged.append(DamagedHolding(version.save_id, "x", version.files["x"][0]))
    assert tried == [*(("m", kind) for kind in ("memory", "peer", "local", "storage")), ("o", "memory")]
    assert [(missed.save_id, missed.step) for missed in plan.passed_over] == [("m", 5), ("o", 4)]


def test_what_ranks_tell_survives_its_encoding() -> None:
    block = HeldParity([ParityMember("h0", [("x", 1)]), ParityMember("h1", [])], 1)
    told = SeenByRank("h1", [msgspec.structs.replace(seen("m", step=5, copies={"x": 1}), parity=[block])])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=SeenByRank) == told
    plan = plan_resume([told], [StoredVersion("m", 0, 5, {"x": 1}, True)], ())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=ResumePlan) == plan


class World:
    """Hosts, and the saves of which they have pieces. It knows no plan."""

    def __init__(self, seed: int, num_hosts: int) -> None:
        self.random = random.Random(seed)
        self.hosts = [f"h{number:04d}" for number in range(num_hosts)]
        self.files: dict[str, dict[str, int]] = {}
        """Save -> data file -> bytes."""
        self.order: dict[str, tuple[int, int, int]] = {}
        self.places: set[tuple[str, str, str, str]] = set()
        """Save, data file, kind, host."""
        self.manifests: set[tuple[str, str]] = set()
        self.groups: dict[str, list[list[ParityMember]]] = {}
        self.blocks: set[tuple[str, int, str]] = set()
        """Save, number of the group, host."""
        for number in range(self.random.randrange(1, 5)):
            self._save(f"s{number}", number)

    def _save(self, save_id: str, number: int) -> None:
        draw = self.random
        self.order[save_id] = (draw.randrange(2), draw.randrange(3), number)
        names = [(f"{save_id}-{host}-{index}", host) for host in self.hosts for index in range(draw.randrange(3))]
        self.files[save_id] = {name: draw.randrange(1, 100) for name, _ in names}
        share = draw.choice([0.5, 0.9, 0.99, 1.0])
        for name, host in names:
            self.places |= {(save_id, name, "memory", host)} if draw.random() < share else set()
            if draw.random() < share:
                self.places.add((save_id, name, "peer", draw.choice(self.hosts)))
            if draw.random() < 0.2:
                self.places.add((save_id, name, "local", host))
        self.manifests |= {(save_id, host) for host in self.hosts if draw.random() < share}
        size = draw.randrange(2, 6)
        of_host = {host: [(name, self.files[save_id][name]) for name, at in names if at == host] for host in self.hosts}
        members = [ParityMember(host, of_host[host]) for host in self.hosts]
        self.groups[save_id] = [members[first : first + size] for first in range(0, len(members), size)]
        for group, of_group in enumerate(self.groups[save_id]):
            self.blocks |= {(save_id, group, member.host) for member in of_group if draw.random() < share}

    def lose(self, host: str) -> None:
        self.places = {place for place in self.places if place[3] != host}
        self.manifests = {place for place in self.manifests if place[1] != host}
        self.blocks = {block for block in self.blocks if block[2] != host}

    def seen(self) -> list[SeenByRank]:
        by_host: dict[str, list[SeenVersion]] = {host: [] for host in self.hosts}
        held: dict[tuple[str, str, str], dict[str, int]] = {}
        for save_id, name, kind, host in self.places:
            held.setdefault((save_id, kind, host), {})[name] = self.files[save_id][name]
        for save_id, (generation, step, number) in self.order.items():
            parity: dict[str, list[HeldParity]] = {}
            for of_save, group, host in sorted(self.blocks):
                if of_save == save_id:
                    members = self.groups[save_id][group]
                    position = [member.host for member in members].index(host)
                    parity.setdefault(host, []).append(HeldParity(members, position))
            for host in self.hosts:
                needed = self.files[save_id] if (save_id, host) in self.manifests else None
                memory, copies, local = (held.get((save_id, kind, host), {}) for kind in ("memory", "peer", "local"))
                if needed is not None or memory or copies or local or host in parity:
                    blocks = parity.get(host, [])
                    version = SeenVersion(save_id, generation, step, number, needed, memory, copies, local, blocks)
                    by_host[host].append(version)
        # Every other host is told by two ranks.
        told = [SeenByRank(host, versions) for host, versions in by_host.items()]
        return told + told[::2]

    def best(self) -> str | None:
        """Returns the save that is to be resumed."""
        for save_id in sorted(self.order, key=lambda save_id: (*self.order[save_id], save_id), reverse=True):
            has_manifest = any(of_save == save_id for of_save, _ in self.manifests)
            if has_manifest and all(self.is_held(save_id, name) for name in self.files[save_id]):
                return save_id
        return None

    def is_held(self, save_id: str, name: str) -> bool:
        return any(place[:2] == (save_id, name) for place in self.places) or self.can_rebuild(save_id, name)

    def can_rebuild(self, save_id: str, name: str) -> bool:
        for number, group in enumerate(self.groups[save_id]):
            owner = next((member.host for member in group if name in dict(member.files)), None)
            if owner is None:
                continue
            rest = [member for member in group if member.host != owner]
            return bool(rest) and all(
                (save_id, number, member.host) in self.blocks
                and all((save_id, file, "memory", member.host) in self.places for file, _ in member.files)
                for member in rest
            )
        return False


def worlds() -> Iterator[World]:
    for seed in range(300):
        world = World(seed, 1 + seed % 9)
        for host in world.random.sample(world.hosts, world.random.randrange(min(3, len(world.hosts)))):
            world.lose(host)
        yield world


def test_the_plan_is_that_of_a_model_which_looks_for_every_byte() -> None:
    found = [(world.best(), plan_resume(world.seen(), [], ())) for world in worlds()]
    assert [(chosen(plan) or [None])[0] for _, plan in found] == [best for best, _ in found]
    assert sum(best is not None for best, _ in found) > 100
    assert sum(best is None for best, _ in found) > 30
    rebuilt = [
        plan
        for _, plan in found
        if plan.versions and any(h[0].kind == "parity" for h in plan.versions[0].files.values())
    ]
    assert len(rebuilt) > 10


def test_every_holder_of_a_plan_has_the_file() -> None:
    for world in worlds():
        for version in plan_resume(world.seen(), [], ()).versions:
            for name, holders in version.files.items():
                held = {
                    (kind, host)
                    for save_id, file, kind, host in world.places
                    if (save_id, file) == (version.save_id, name)
                }
                if world.can_rebuild(version.save_id, name):
                    held.add(("parity", ""))
                assert {(holder.kind, holder.host) for holder in holders} == held


def test_tries_end_when_all_is_damaged() -> None:
    for world in worlds():
        damaged: list[DamagedHolding] = []
        for tries in count():
            plan = plan_resume(world.seen(), [], damaged)
            if not plan.versions:
                break
            version = plan.versions[0]
            new = [DamagedHolding(version.save_id, name, holders[0]) for name, holders in version.files.items()]
            assert not {*new} & {*damaged}
            damaged += new
            if not new:  # a checkpoint without data files is whole
                break
            assert tries < 30


def test_a_damaged_block_of_parity_rebuilds_nothing() -> None:
    members = [ParityMember(f"h{number}", [(f"x{number}", 1)]) for number in range(3)]
    needed = {f"x{number}": 1 for number in range(3)}
    told = [
        SeenByRank(
            f"h{number}", [SeenVersion("m", 0, 5, 0, needed, {f"x{number}": 1}, {}, {}, [HeldParity(members, number)])]
        )
        for number in (1, 2)
    ]
    assert plan_resume(told, [], ()).versions[0].files["x0"] == [FileHolder("parity", "")]
    lost = DamagedHolding("m", "", FileHolder("parity", "h2"))
    assert plan_resume(told, [], [lost]).versions == []


def test_thousands_of_hosts_are_planned_with_a_look_at_each_file() -> None:
    hosts = [f"h{number:04d}" for number in range(4096)]
    needed = {f"x{number}": 8 for number in range(4096)}
    told = [
        SeenByRank(
            host,
            [
                seen(
                    "m",
                    step=5,
                    needed=needed if number < 2 else None,
                    memory={f"x{number}": 8} if number != 7 else {},
                    copies={f"x{(number + 1) % 4096}": 8},
                )
            ],
        )
        for number, host in enumerate(hosts)
    ]
    (version,) = plan_resume(told, [], ()).versions
    assert version.files["x7"] == [FileHolder("peer", "h0006")]
    assert version.files["x8"] == [FileHolder("memory", "h0008"), FileHolder("peer", "h0007")]
