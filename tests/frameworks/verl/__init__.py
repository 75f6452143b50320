"""Tests against verl itself. Whatever of it they import comes after this."""

import warnings
from contextlib import suppress
from importlib import import_module

with suppress(ImportError), warnings.catch_warnings():  # collected in an environment without it
    warnings.simplefilter("ignore")  # of what verl and ray import
    import_module("verl.trainer.ppo.ray_trainer")
