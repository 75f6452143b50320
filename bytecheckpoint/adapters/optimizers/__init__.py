"""Optimizers: their state by parameter name, their hyperparameters, their wrappers."""
