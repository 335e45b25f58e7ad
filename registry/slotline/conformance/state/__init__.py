"""Checks of state plugins; importing this package registers them."""
