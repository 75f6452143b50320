"""Tensor memory: its bytes, its overlaps, and copies between host and device."""
