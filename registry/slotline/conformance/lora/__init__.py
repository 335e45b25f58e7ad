"""Checks of lora plugins; importing this package registers them."""
