"""The memory tier: checkpoints in the memory of the hosts, which outlive the processes that saved them."""
