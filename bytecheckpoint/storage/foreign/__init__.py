"""Checkpoints that other programs wrote, as manifests whose chunks are raw bytes inside their files: nothing is copied
or converted. One module reads one format; formats.py tells them apart.
"""
