"""Acme's plugins for slotline; what they are stands in `descriptors`."""
