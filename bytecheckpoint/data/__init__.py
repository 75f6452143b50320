"""Data loading whose state any number of ranks can share: see docs/data.md."""
