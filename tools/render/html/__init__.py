"""Self-contained pages and pictures: they load no other file."""
