"""Watches whether the processes of other ranks have ended, as far as kernels tell."""
