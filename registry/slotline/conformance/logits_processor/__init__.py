"""Checks of logits_processor plugins; importing this package registers them."""
