"""How ranks agree, and the connections between them."""
