"""Completion of commands, options, paths, steps and names of tensors in bash, zsh and fish."""
