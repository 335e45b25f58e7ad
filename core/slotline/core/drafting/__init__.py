"""Speculation: asking drafters, checking and verifying what they say, and how many drafts pay."""
