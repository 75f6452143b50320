"""Named, immutable byte objects: stores, the layout of a checkpoint in one, and the data files in it. Nothing here
knows a tensor or torch.
"""
