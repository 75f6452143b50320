"""Tests against real frameworks, which `make test-frameworks` installs and runs."""
