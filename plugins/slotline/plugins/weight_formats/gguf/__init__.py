"""GGUF: one file with metadata, tokenizer and weights, as llama.cpp reads it."""
