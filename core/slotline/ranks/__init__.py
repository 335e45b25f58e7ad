"""Engines that run over several processes: how ranks start, what rank 0 tells the others, and what ends them."""
