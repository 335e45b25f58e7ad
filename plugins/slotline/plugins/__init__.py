"""slotline.plugins."""
