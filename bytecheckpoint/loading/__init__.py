"""The steps of a load: open, match, read, exchange, scatter."""
