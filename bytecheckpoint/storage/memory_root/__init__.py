"""A memory root: a folder in tmpfs, shared by the processes of one host, whose files outlive the processes."""
