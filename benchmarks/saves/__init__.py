"""What a save costs: candidates, how one is timed, tables and targets."""
