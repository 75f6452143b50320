"""Tries the installed package where the source tree is not: `make test-package` runs it with the Python of a new
environment, in an empty folder. The first argument is the README, whose first program runs twice.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Raises for what does not work."""
    readme = Path(sys.argv[1])
    package = Path(str(files("bytecheckpoint")))
    tree = readme.parent.resolve()
    if tree in package.resolve().parents and "site-packages" not in package.parts:
        raise SystemExit(f"{package} is the source tree, not an installation")
    for name in ("py.typed", "name_maps/maps/megatron-gpt-to-hf-llama.toml", "tools/main.py"):
        if not (package / name).is_file():
            raise SystemExit(f"{package / name} is not in the wheel")
    if find_spec("tools") is not None:
        raise SystemExit("the wheel installs a top-level `tools`")
    (block,) = re.findall(r"```python\n(import torch\n.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    Path("train.py").write_text(block, encoding="utf-8")
    printed = [run(sys.executable, "-W", "error", "train.py") for _ in range(2)]
    if [text.split()[-1] for text in printed] != ["0", "100"]:
        raise SystemExit(f"the README's program printed {printed}")
    commands()
    sys.stdout.write("the installed package works\n")


def commands() -> None:
    """Runs what a new user would."""
    bcp = str(Path(sys.executable).with_name("bcp"))
    run(bcp, "--version")
    for line in ("ls run", "show run --tree", "verify run", "report run", "cat run model.bias"):
        run(bcp, *line.split())
    run(bcp, "show", "run", "--html", "page.html", "--histograms")
    for kind in ("hf", "dcp", "torch"):
        run(bcp, "convert", "run", f"as-{kind}", "--to", kind)
    run(bcp, "diff", "run", "as-dcp", "--to", "dcp")
    if find_spec("s3fs") is None:
        url = "s3://arn:aws:s3:us-east-1:1:accesspoint:x/run"
        ended = subprocess.run([bcp, "ls", url], capture_output=True, text=True, check=False)
        if ended.returncode != 4 or "bytecheckpoint[s3fs]" not in ended.stderr:
            raise SystemExit(f"without s3fs: {ended.returncode} {ended.stderr}")


def run(*command: str) -> str:
    """Returns what a command prints."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
    return ended.stdout


if __name__ == "__main__":
    main()
