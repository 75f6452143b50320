"""Runs a script that trains with DeepSpeed on a host without a GPU: on gloo, and without ops that DeepSpeed would
compile first.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()
    init_distributed = deepspeed.init_distributed
    deepspeed.init_distributed = lambda: init_distributed(dist_backend="gloo")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
