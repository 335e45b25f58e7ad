"""Checks of drafter plugins; importing this package registers them."""
