"""Modules that several benchmarks use: states, process pools, results, tables."""
