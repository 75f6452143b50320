"""Framework state turned into shards and plain data, and back. Adapters do not plan, and open no files."""
