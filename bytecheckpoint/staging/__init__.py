"""Snapshots of a state and the images of data files that are written from them."""
