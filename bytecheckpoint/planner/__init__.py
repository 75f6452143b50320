"""Which bytes go where. Everything here is a pure function of its arguments: no tensors, no I/O, no clock, no ranks
but as numbers, so that a plan for thousands of ranks can be made and tested in one process.
"""
