"""Finds out what a folder or file of unknown origin is, and which calls load it."""
