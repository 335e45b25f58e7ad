"""The sampler's parts: a step's parameters (`batch`), and the arithmetic in torch and in Triton."""
