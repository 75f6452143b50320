"""An object store in memory, and candidates that move bytes to it."""
