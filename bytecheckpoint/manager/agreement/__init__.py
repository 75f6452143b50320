"""Decisions of rank 0 that all ranks hear, and stops that all ranks make at one boundary."""
