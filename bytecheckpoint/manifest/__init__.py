"""The manifest: what a checkpoint is made of, and how it is encoded, decoded and validated."""
