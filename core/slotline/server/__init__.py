"""The HTTP server: OpenAI's and Anthropic's interfaces over `AsyncLLM`. Needs the extra `slotline[server]`."""
