"""Toolkit of kernel authors: launchers, compilation ahead of time, caches, and what kernels are held against."""
