"""Fuzzing of everything that reads what somebody else may have written: manifests, headers, pickles, archives, folders
of other programs, and the command line on top of them.
"""
