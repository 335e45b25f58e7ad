"""Scheduler policies: who runs next, and who gives way."""
