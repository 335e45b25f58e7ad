"""Chat: from messages to a prompt by the model's template."""
