"""Tests of devices: on a fake of CUDA everywhere, and on a GPU where there is one (`make test-gpu`)."""
