"""Leaves out the tests of frameworks that are not installed: some import theirs at the top."""

from __future__ import annotations

import importlib.util

FRAMEWORKS = ("accelerate", "deepspeed", "lightning", "ray", "torchtitan", "transformers", "verl")

collect_ignore = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]
