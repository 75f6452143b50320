"""The life of the processes of other ranks, as kernels know it."""
