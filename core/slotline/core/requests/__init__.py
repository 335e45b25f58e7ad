"""What happens to a request: it comes in, joins a step, gets tokens, ends, and is handed back."""
