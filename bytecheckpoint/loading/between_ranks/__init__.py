"""Assignments and messages of ranks that read together, and units that pass through the memory of their host."""
