"""The checkpoint manager: when to save, which checkpoints to keep, where to resume and when to stop."""
