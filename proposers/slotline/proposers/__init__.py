"""slotline.proposers."""
