"""Speculative decoding: drafts, their verification and their statistics."""
