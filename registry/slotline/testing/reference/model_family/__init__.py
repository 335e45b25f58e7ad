"""Model family that the suite itself trusts: a small decoder with every form of attention layer, one tensor a name."""

from __future__ import annotations

from slotline.testing.reference.model_family.descriptor import descriptor

__all__ = ["descriptor"]
