"""Agreement of ranks, and the connections between them."""
