"""Computations of the commands about checkpoints. Nothing here prints."""
