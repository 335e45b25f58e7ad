"""From logits to tokens: processors, grammars, parameters of a step, the arithmetic, poolers."""
