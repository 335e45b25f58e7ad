"""The suite's processors that have a floor or companions, for engines that load plugins from files."""

from slotline.testing.reference.logits_processor import paired, sampled

__all__ = ["paired", "sampled"]
