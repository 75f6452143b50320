"""State of data loaders beside the saves of a manager: gathered ahead of them, and logged between them."""
