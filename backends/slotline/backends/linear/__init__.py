"""Products with quantized weights: plugins of the slots `linear` and `experts`."""
