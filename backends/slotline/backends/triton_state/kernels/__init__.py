"""Triton kernels of the state kinds, one file each. The files of the same names in the parent folder launch them."""
