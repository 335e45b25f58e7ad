"""Scheduler: request queue, admission and token budget."""
