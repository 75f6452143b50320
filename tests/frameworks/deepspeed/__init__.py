"""Tests against DeepSpeed itself."""
