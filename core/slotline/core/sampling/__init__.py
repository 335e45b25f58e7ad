"""From logits to tokens: processors, grammars, parameters of a step, the arithmetic in torch and Triton, poolers."""
