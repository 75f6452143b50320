"""Damage to the files of a committed checkpoint: bits flipped, ends cut off, files gone, exchanged or of another save.
Each must be an error that names the file, before anything that was loaded can be used.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import bytecheckpoint as bcp
from bytecheckpoint.diagnostics.verify import verify_checkpoint
from bytecheckpoint.storage import layout
from bytecheckpoint.storage.open_store import open_store
from faults.campaigns import EVERY, Asked, Broken, Campaign, Outcome
from faults.savers import NARROW, OWN, SAVERS, Training, WrongBytesError

STEPS = 3
LONG = 300_000
"""Elements of the largest tensor where a checkpoint of several files is wanted."""


class Shot(NamedTuple):
    """What became of one load."""

    seen: str
    """What a table counts it as."""
    is_wrong: str | None


def load_own(root: Path, *, file: str, width: int, or_file: str = "") -> Shot:
    """Loads what was damaged in this file: an error that names it, or the other one that is damaged, and nothing else,
    will do.
    """
    try:
        OWN.steps_loaded(root, step=None, width=width)
    except bcp.CheckpointError as error:
        named = any(name in str(error) for name in (file, or_file) if name)
        return Shot(f"{error.kind}", None if named else f"an error that does not name {file}: {error}")
    except WrongBytesError as error:
        return Shot("loaded wrong", f"damage to {file} was not noticed: {error}")
    except Exception as error:  # noqa: BLE001  # one that is no CheckpointError is what is looked for
        return Shot("crashed", f"damage to {file}: {type(error).__name__}: {error}")
    return _verify(root, file)


def _verify(root: Path, file: str) -> Shot:
    """A load does not read the headers of data files; `bcp verify` does."""
    store = open_store(root, storage_options=None, writer_threads=1)
    manifest = layout.read_manifest(store, "")
    found = verify_checkpoint(
        store,
        "",
        manifest,
        threads=1,
        sample_percent=100,
        rng=random.Random(0),
        on_progress=lambda _: None,
    )
    if any(damage.file is not None and damage.file.endswith(file) for damage in found.damage):
        return Shot("loaded right, found by verify", None)
    return Shot("not noticed", f"neither a load nor verify notices the damage to {file}")


def load_torch(root: Path, *, file: str, width: int) -> Shot:
    """Loads what was damaged in this file: any error will do, and so will the right bits."""
    try:
        SAVERS["torch"].steps_loaded(root, step=None, width=width)
    except WrongBytesError as error:
        return Shot("loaded wrong", f"damage to {file} was not noticed: {error}")
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # torch's own error is no Exception
        return Shot("an error", None)
    return Shot("loaded right", None)


LOADS: dict[str, Callable[..., Shot]] = {"own": load_own, "torch": load_torch}


def saved(folder: Path, *, saver_name: str, width: int = NARROW, **options: object) -> Path:
    """A committed checkpoint of one process."""
    if saver_name == "torch":
        SAVERS["torch"].save(folder, Training(width, steps=STEPS), in_place=True)
    else:
        training = Training(width, steps=STEPS)
        state = {"model": training.model, "optimizer": training.optimizer, "extra_state": training.extra}
        bcp.save(folder, state, options=bcp.SaveOptions(**options))
    return folder


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """The bit is another one within the block."""

    def flip() -> None:
        with file.open("r+b", buffering=0) as opened:
            opened.seek(bit // 8)
            byte = opened.read(1)[0]
            opened.seek(bit // 8)
            opened.write(bytes([byte ^ 1 << bit % 8]))

    flip()
    try:
        yield
    finally:
        flip()


def count(asked: Asked, num_trials: int, shoot: Callable[[int], Shot | None]) -> Outcome:
    """Goes through the trials; None is one that there was nothing to damage for."""
    seen: Counter[str] = Counter()
    broken = []
    for trial in asked.due():
        if trial >= num_trials:
            break
        shot = shoot(trial)
        if shot is None:
            continue
        seen[shot.seen] += 1
        if shot.is_wrong is not None:
            broken.append(Broken(trial, shot.is_wrong))
    counted = ", ".join(f"{number:,} {kind}" for kind, number in seen.most_common())
    return Outcome(seen.total(), tuple(broken), counted)


def flip_manifest(asked: Asked) -> Outcome:
    """Trial k flips bit k of the manifest, which is as a user's are: compressed, with a checksum."""
    root = saved(asked.folder / "ckpt", saver_name="own")
    manifest = root / "manifest.bcp"

    def shoot(bit: int) -> Shot:
        with flipped(manifest, bit):
            return load_own(root, file=manifest.name, width=NARROW)

    return count(asked, 8 * manifest.stat().st_size, shoot)


class Tensors:
    """A checkpoint of this library that was opened before it was damaged, and which tensor has which bytes."""

    def __init__(self, root: Path) -> None:
        self._opened = bcp.open(root)
        self._files = [Path(file.name).name for file in self._opened.manifest.files]
        self._chunks = [
            (self._files[chunk.file], chunk.byte_offset, chunk.byte_offset + chunk.byte_length, fqn)
            for fqn, record in self._opened.manifest.tensors.items()
            for chunk in record.chunks
        ]

    def read_at(self, file: str, byte: int) -> Shot | None:
        """Reads the tensor that has this byte; None where it belongs to none."""
        for name, start, end, fqn in self._chunks:
            if name == file and start <= byte < end:
                return self._read(fqn, file)
        return None

    def _read(self, fqn: str, file: str) -> Shot:
        try:
            self._opened[fqn][...]
        except bcp.CheckpointError as error:
            named = file in str(error) and fqn in str(error)
            return Shot(error.kind, None if named else f"an error that does not name {file} and {fqn}: {error}")
        except Exception as error:  # noqa: BLE001  # one that is no CheckpointError is what is looked for
            return Shot("crashed", f"damage to {file}: {type(error).__name__}: {error}")
        return Shot("not noticed", f"{fqn} was read without an error, with damage to {file}")


WHOLE_LOADS = 10
"""One of so many flips is looked at by a load of everything; in between, by a read of the tensor that was hit."""


def flip_data(asked: Asked, *, saver_name: str) -> Outcome:
    """Trial k flips a bit of a data file, chosen at random. Every other checkpoint of this library is compressed."""
    codecs = {"own": [{}, {"codec": "zstd"}], "torch": [{}]}[saver_name]
    roots = [
        saved(asked.folder / str(number), saver_name=saver_name, **options) for number, options in enumerate(codecs)
    ]
    files = {root: data_files(root) for root in roots}
    opened = {root: Tensors(root) for root in roots if saver_name == "own"}

    def shoot(trial: int) -> Shot:
        rng = asked.rng(trial)
        root = rng.choice(roots)
        file = rng.choices(files[root], weights=[each.stat().st_size for each in files[root]])[0]
        bit = rng.randrange(8 * file.stat().st_size)
        with flipped(file, bit):
            read = opened[root].read_at(file.name, bit // 8) if opened and trial % WHOLE_LOADS else None
            if read is not None:
                return read
            return LOADS[saver_name](root, file=file.name, width=NARROW)

    return count(asked, asked.trials.stop, shoot)


def truncate(asked: Asked) -> Outcome:
    """Trial k cuts the manifest to k bytes, or, when that is whole, a data file to what is left of k."""
    root = saved(asked.folder / "ckpt", saver_name="own")
    files = [root / "manifest.bcp", *data_files(root)]
    lengths = [(file, length) for file in files for length in range(file.stat().st_size)]

    def shoot(trial: int) -> Shot:
        file, length = lengths[trial]
        whole = file.read_bytes()
        file.write_bytes(whole[:length])
        try:
            return load_own(root, file=file.name, width=NARROW)
        finally:
            file.write_bytes(whole)

    return count(asked, len(lengths), shoot)


def mix_up(asked: Asked) -> Outcome:
    """Trial k does something to whole files or pages of them, as a bad copy or a disk that lies does."""
    root = saved(asked.folder / "ckpt", saver_name="own", width=LONG, max_file_bytes=1 << 20)
    other = saved(asked.folder / "other", saver_name="own", width=LONG, max_file_bytes=1 << 20)
    spare = asked.folder / "spare"
    shutil.copytree(root, spare)
    files = data_files(root)
    done: Counter[str] = Counter()

    def shoot(trial: int) -> Shot | None:
        rng = asked.rng(trial)
        damage = rng.choice(DAMAGES)
        hits = damage(files, data_files(other), rng)
        if not hits:
            return None
        done[damage.__name__.strip("_").replace("_", " ")] += 1
        try:
            return load_own(root, file=hits[0].name, width=LONG, or_file=hits[-1].name)
        finally:
            for file in files:
                shutil.copyfile(spare / "data" / file.name, file)

    outcome = count(asked, asked.trials.stop, shoot)
    damages = ", ".join(f"{number:,} x {what}" for what, number in sorted(done.items()))
    return outcome._replace(result=f"{outcome.result} ({damages})")


def _remove(files: list[Path], others: list[Path], rng: random.Random) -> list[Path]:
    hit = rng.choice(files)
    hit.unlink()
    return [hit]


def _exchange(files: list[Path], others: list[Path], rng: random.Random) -> list[Path]:
    """Only files of the same length, whose exchange no look at a folder shows; but not those that hold the same."""
    contents = {file: file.read_bytes() for file in files}
    pairs = [(a, b) for a, b in combinations(files, 2) if len(contents[a]) == len(contents[b])]
    pairs = [(a, b) for a, b in pairs if contents[a] != contents[b]]
    if not pairs:
        return []
    first, second = rng.choice(pairs)
    first.write_bytes(contents[second])
    second.write_bytes(contents[first])
    return [first, second]


def _take_from_other_save(files: list[Path], others: list[Path], rng: random.Random) -> list[Path]:
    number = rng.randrange(len(files))
    stale = bytearray(others[number].read_bytes())
    stale[rng.randrange(len(stale))] ^= 1  # the other save has the same values, so it is of other values by a bit
    files[number].write_bytes(stale)
    return [files[number]]


def _append(files: list[Path], others: list[Path], rng: random.Random) -> list[Path]:
    hit = rng.choice(files)
    with hit.open("ab") as opened:
        opened.write(bytes(rng.randint(1, 5000)))
    return [hit]


def _lose_a_page(files: list[Path], others: list[Path], rng: random.Random) -> list[Path]:
    return _replace_page(rng.choice(files), rng, bytes(4096))


def _misplace_a_page(files: list[Path], others: list[Path], rng: random.Random) -> list[Path]:
    hit = rng.choice(files)
    return _replace_page(hit, rng, hit.read_bytes()[: 2 * 4096][4096:])


def _replace_page(hit: Path, rng: random.Random, page: bytes) -> list[Path]:
    content = bytearray(hit.read_bytes())
    start = 4096 * rng.randrange(len(content) // 4096)
    if content[start : start + 4096] == page:
        return []
    content[start : start + 4096] = page
    hit.write_bytes(content)
    return [hit]


DAMAGES: list[Callable[[list[Path], list[Path], random.Random], list[Path]]] = [
    _remove,
    _exchange,
    _take_from_other_save,
    _append,
    _lose_a_page,
    _misplace_a_page,
]


def data_files(root: Path) -> list[Path]:
    found = [*root.glob("data/*.safetensors"), *root.glob("*.distcp")]
    return sorted(found, key=lambda file: file.name.partition("-")[2])


CAMPAIGNS = (
    Campaign(
        name="flip-manifest",
        fault="A bit of the manifest flipped: every one, one after the other",
        how="written into the file",
        unit="bits",
        run=flip_manifest,
        trials=EVERY,
        quick=range(0, 8000, 397),
    ),
    Campaign(
        name="flip-data",
        fault="A bit of a data file flipped, half of them in compressed ones; every tenth seen by `load`, the others "
        "by a read of the tensor from `open`",
        how="written into the file",
        unit="bits",
        run=partial(flip_data, saver_name="own"),
        trials=range(100_000),
        quick=range(30),
    ),
    Campaign(
        name="truncate",
        fault="The manifest or a data file cut off: at every byte",
        how="written anew",
        unit="lengths",
        run=truncate,
        trials=EVERY,
        quick=range(0, 40_000, 1997),
    ),
    Campaign(
        name="mix-up",
        fault="A data file gone, longer, exchanged, or of another save; a page of it lost or in another's place",
        how="copied over",
        unit="files",
        run=mix_up,
        trials=range(3000),
        quick=range(10),
    ),
    Campaign(
        name="flip-data-torch",
        fault="A bit of a data file flipped",
        how="written into the file",
        unit="bits",
        run=partial(flip_data, saver_name="torch"),
        trials=range(12_000),
        quick=range(3),
        is_peer=True,
    ),
)
