"""Loads in which ranks pass on what they read."""
