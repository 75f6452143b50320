"""What ranks plan of a save: the messages in which they agree on it, and each rank's part of the result."""
