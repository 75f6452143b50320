"""One store per kind of storage: local file systems, S3, and any fsspec backend."""
