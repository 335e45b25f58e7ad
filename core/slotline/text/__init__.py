"""Text: tokenizer, detokenizer, and from messages to a prompt by the model's chat template."""
