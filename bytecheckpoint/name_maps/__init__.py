"""Name maps: the tensors of one framework under the names and in the layout of another."""
