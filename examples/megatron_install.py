"""Runs a training script of Megatron-LM, which then saves and loads by this library; its arguments stay as they are.

Put Megatron-LM on PYTHONPATH, and this line between torchrun and the script:

torchrun --nproc-per-node 8 examples/megatron_install.py pretrain_gpt.py --save run --load run --async-save ...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import bytecheckpoint as bcp
from bytecheckpoint.integrations import megatron


def main() -> None:
    # In a script of your own these two lines before `pretrain(...)` are all.
    options = bcp.SaveOptions(max_file_bytes=4 * 2**30)
    megatron.install(options=options)

    del sys.argv[0]
    script = Path(sys.argv[0])
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
