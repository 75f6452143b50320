"""Leaves these tests out where accelerate is not installed: `make test` collects them too."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("accelerate") else ["test_*.py"]
