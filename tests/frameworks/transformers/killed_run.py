"""Trains in one process, and kills it after step 7: the program of a test."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer_runs import kill_after, trainer

out = Path(sys.argv[1])
trainer(out, at_step={7: kill_after(out / "checkpoint-6")}).train()
