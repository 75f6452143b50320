"""Training jobs of other frameworks, for benchmarks/in_trainers.py: a module for each, which has `train`."""
