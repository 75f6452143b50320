"""Modules, pipelines and tensor subclasses of PyTorch."""
