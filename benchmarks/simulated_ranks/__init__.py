"""Thousands of ranks, simulated by one process."""
