"""Tests against Lightning itself."""
