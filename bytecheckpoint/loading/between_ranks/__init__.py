"""What ranks that read together tell one another, and pass on in the memory of their host."""
