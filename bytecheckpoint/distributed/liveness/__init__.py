"""Notices that other ranks have ended or failed: by what kernels tell of their processes, or by the call itself."""
