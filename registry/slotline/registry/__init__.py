"""slotline.registry."""
