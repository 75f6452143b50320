"""Checkpoints of any readable format written in another one: what goes into which file is planned first, then the files
are streamed in bounded memory. Whatever becomes of the process, the target is there whole or not at all.
"""
