"""Mixers of transformers that keep a state (Mamba, Mamba-2, short convolutions, gated delta nets), bound to slots."""

from slotline.plugins.model_families.state_mixers.mixers import bind, find, mixer_of
from slotline.plugins.model_families.state_mixers.slot import output_like

__all__ = ["bind", "find", "mixer_of", "output_like"]
