"""The state of data loaders: read by stream, united by the coordinator, and dealt out to any number of ranks."""
