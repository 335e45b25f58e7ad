"""slotline.backends."""
