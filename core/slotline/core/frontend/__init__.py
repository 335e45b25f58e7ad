"""What users call and get: `LLM`, prompts, parameters, outputs, tokenizer. What it needs of torch it imports late."""
