"""What the program's exit codes mean, for scripts. docs/cli.md lists them."""

from __future__ import annotations

FINE = 0
CORRUPT = 1
"""Corrupt, or different."""
USAGE = 2
NOT_FOUND = 3
STORAGE = 4
INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read the output closed it."""
