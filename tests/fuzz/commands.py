"""The command line as something that is fuzzed: an input is a folder of files and the words of one command about it. It
may end with any documented exit code and one line, never with a traceback.

Words are chosen from lists, and paths lead into a folder of the input's own: `bcp gc --delete` and a path that fuzzing
has made up do not go together.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import msgspec
from click.testing import CliRunner

from bytecheckpoint.errors import CheckpointError, UnsafeCheckpointError
from bytecheckpoint.manifest.envelope import seal, unseal
from bytecheckpoint.storage.paths import check_name
from bytecheckpoint.tools import exit_codes
from bytecheckpoint.tools.main import cli
from fuzz.memory_store import Files
from fuzz.mutations import DTYPES, NUMBERS, TEXTS, mutate_bytes, mutate_header, mutate_msgpack

FOLDER = "@"
"""Stands for the folder, in words."""
OPTIONS = {
    "show": (
        "--tree",
        "--tensor=*",
        "--tensor=?",
        "--files",
        "--objects",
        "--stats",
        "--step=?",
        "--limit=?",
        "--html=@/x.html",
    ),
    "verify": ("--sample=?", "--threads=2", "--step=?"),
    "diff": ("--step=?", "--atol=?", "--rtol=?", "--ignore-dtype", "--include=?", "--exclude=?", "--threads=2"),
    "timeline": ("--step=?", "--trace=@/x.json"),
    "ls": ("--limit=?",),
    "gc": ("--delete", "--older-than=?", "--save-id=?"),
    "keep": ("--latest=1", "--every=?", "--best=?", "--within=?", "--delete"),
    "rm": ("--step=?", "--force"),
    "pin": ("--step=?",),
    "unpin": ("--step=?",),
}
EXIT_CODES = range(6)
ANSWERS = {0, 1, exit_codes.UNVERIFIED}
"""Those of commands that have printed what they found."""
_MANIFEST = "manifest.bcp"


class Asked(msgspec.Struct):
    """An input."""

    words: list[str]
    files: Files


_decoder = msgspec.msgpack.Decoder(Asked)


def read_command(data: bytes) -> None:
    """Runs it in a folder that is then removed."""
    try:
        asked = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        _write(Path(folder), asked.files)
        words = [word.replace(FOLDER, folder) for word in asked.words]
        result = CliRunner().invoke(cli, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in EXIT_CODES, (words, result.exit_code)
    assert "Traceback" not in result.output, words
    if "--json" in words:
        json.loads(result.stdout)
        assert result.stderr == "", words
    else:
        is_error = result.exit_code not in ANSWERS or not result.stdout
        assert result.stderr.count("\n") == is_error, (words, result.stderr)


def _write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        try:
            path = folder / check_name(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except (UnsafeCheckpointError, OSError, UnicodeEncodeError):
            continue  # no file system has such a name, or it is a folder's


def mutate_command(data: bytes, rng: Random) -> bytes:
    """Other words, or one other file."""
    asked = _decoder.decode(data)
    if rng.random() < 0.4:
        asked.words = random_words(rng)
    if rng.random() < 0.8 and asked.files:
        name = rng.choice(sorted(asked.files))
        kind = rng.random()
        if kind < 0.1:
            del asked.files[name]
        elif kind < 0.2:
            asked.files[name + rng.choice(("x", "/y", ""))] = mutate_bytes(asked.files[name], rng)
        else:
            asked.files[name] = _mutate_file(name, asked.files[name], rng)
    return msgspec.msgpack.encode(asked)


def random_words(rng: Random) -> list[str]:
    command = rng.choice(list(OPTIONS))
    words = [command, FOLDER]
    if command == "diff":
        words.append(FOLDER)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        word = rng.choice(OPTIONS[command])
        text = rng.choice((str(rng.choice(NUMBERS)), rng.choice(TEXTS), rng.choice(DTYPES), "nan", "1d", "50%", "*"))
        words.append(word.replace("?", text.encode("utf-8", "replace").decode()))
    if rng.random() < 0.4:
        words.append("--json")
    return words


def _mutate_file(name: str, content: bytes, rng: Random) -> bytes:
    if name.endswith(_MANIFEST) and rng.random() < 0.9:
        try:
            return seal(mutate_msgpack(bytes(unseal(content)), rng))
        except CheckpointError:
            return mutate_bytes(content, rng)
    return mutate_header(content, rng) if name.endswith(".safetensors") else mutate_bytes(content, rng)
