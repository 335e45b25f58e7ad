"""slotline.core."""
