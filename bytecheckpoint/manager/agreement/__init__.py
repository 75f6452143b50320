"""Decisions of rank 0 that all ranks receive, and stops that all ranks make at one boundary."""
