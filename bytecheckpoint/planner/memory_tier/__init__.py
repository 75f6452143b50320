"""The plans of the memory tier: which version is resumed and from where, who holds whose copy, and the places of the
bytes of parity.
"""
