"""One rank of a process pool: imports the module that is named, begins, and obeys commands."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from shared.rank_process import Obey, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="has begin(rank, port, **settings)")
    parser.add_argument("settings", type=json.loads, help="in JSON")
    parser.add_argument("--checkout", type=Path, help="whose bytecheckpoint is imported, not the installed one")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()

    def begin() -> tuple[dict[str, Any], Obey]:
        if arguments.checkout is not None:
            import_from(arguments.checkout)
        module = importlib.import_module(arguments.module)
        return module.begin(arguments.rank, arguments.port, **arguments.settings)

    serve(begin)


def import_from(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    found = importlib.import_module("bytecheckpoint").__file__
    if not Path(found).is_relative_to(checkout):
        raise ImportError(f"bytecheckpoint comes from {found}, not from {checkout}")


if __name__ == "__main__":
    main()
