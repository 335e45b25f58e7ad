"""Checks of kv_spec plugins; importing this package registers them."""
