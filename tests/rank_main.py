"""Runs a program as the interpreter does, exit functions and exit code included, and tears nothing down after it:
`rank_main.py PROGRAM ARGUMENT...`.

Hazard: torch may end a process with SIGABRT ("terminate called without an active exception") while the interpreter is
torn down. A worker thread of gloo that frees a tensor needs the GIL then, and cannot have it (pytorch pull request
179291). Seen where a DDP model lived that long: in 4 of 45 runs of one program, after all that its test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forked_python import end, run

if __name__ == "__main__":
    del sys.argv[0]
    program = Path(sys.argv[0])
    sys.path[0] = str(program.resolve().parent)
    end(run(compile(program.read_bytes(), str(program), "exec"), str(program)))
