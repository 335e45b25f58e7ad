"""Public data types of requests, and their tokenizer."""
