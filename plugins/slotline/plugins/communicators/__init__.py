"""Communicators over torch.distributed."""
