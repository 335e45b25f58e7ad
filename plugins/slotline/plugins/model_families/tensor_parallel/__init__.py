"""Tensor parallelism: each rank has a part of each layer, and collectives join what the parts give."""
