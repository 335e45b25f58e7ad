"""Simulations of the core's environment of a plugin, which make wrong reads and writes visible."""
