"""Optimising passes over a loaded transformers decoder: module surgery by structure, each change checked when made."""

from slotline.plugins.model_families.passes.pipeline import optimize

__all__ = ["optimize"]
