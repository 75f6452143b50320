"""Stands in for megatron.bridge, which needs a GPU to be imported: what its loop calls, and none of its code."""
