"""Checks of attention plugins; importing this package registers them."""
