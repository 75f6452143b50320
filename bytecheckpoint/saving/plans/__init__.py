"""The messages in which ranks agree on the plan of a save."""
