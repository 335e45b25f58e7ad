"""Requests and rows: what may come in, what the next step computes, and whether all counts agree."""
