"""LLM: the offline API, beam search and best_of."""
