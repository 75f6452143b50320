"""What a load costs: candidates, how one is timed, tables and targets."""
