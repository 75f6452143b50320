"""Checkpoints of any readable format written in another one: what goes into which file is planned first, then the files
are streamed in bounded memory. Even if a process dies, the target is there whole or not at all.
"""
