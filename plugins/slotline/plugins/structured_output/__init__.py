"""Structured output: plugins that compile schemas, expressions and grammars, and what they share."""
