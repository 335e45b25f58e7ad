"""Quantized weights of transformers' modules: which modules have them, and the modules that take their place."""
