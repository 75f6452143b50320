"""Tests against Megatron itself."""
