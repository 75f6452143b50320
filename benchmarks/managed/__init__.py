"""A manager on several ranks, and an S3 for one."""
