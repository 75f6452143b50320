"""Checkpoints of other programs, read as manifests."""
