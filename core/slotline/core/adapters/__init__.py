"""LoRA adapters at run time: in slots that tokens choose from, or one merged into the weights."""
