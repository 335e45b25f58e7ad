"""Triton kernels of the state kinds, one file each; what launches them stands in the files of the same names above."""
