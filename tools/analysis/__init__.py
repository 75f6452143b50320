"""What commands compute about checkpoints. Nothing here prints."""
