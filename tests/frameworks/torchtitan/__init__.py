"""Tests against torchtitan itself. Whatever of it they import comes after this."""

import warnings
from contextlib import suppress
from importlib import import_module

from frameworks.torchtitan.cpu_device import import_torchtitan

with suppress(ImportError), warnings.catch_warnings():  # collected in an environment without it
    warnings.simplefilter("ignore")  # torch's own, of what it compiles when torchtitan is imported
    import_torchtitan()
    import_module("torchtitan.trainer")
