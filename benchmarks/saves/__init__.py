"""Candidates of the save benchmark, their timing, tables and targets."""
