"""Real ranks, forked from one process."""
