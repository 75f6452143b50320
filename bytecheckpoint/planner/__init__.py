"""Plans which bytes go where. Everything here is a pure function of its arguments: no tensors, no I/O, no clock, and
ranks only as numbers, so that a plan for thousands of ranks can be made and tested in one process.
"""
