"""Stores, the layout of a checkpoint and data files, and what later tests borrow: a store that fails on demand."""
