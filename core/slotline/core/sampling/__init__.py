"""From logits to tokens: processors, parameters of a step, and the arithmetic."""
