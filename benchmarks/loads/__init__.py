"""Candidates of the load benchmark, their timing, tables and targets."""
