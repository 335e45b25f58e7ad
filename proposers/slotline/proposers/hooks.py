"""Plugins of this root: drafters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slotline.registry import Descriptor, hookimpl


@hookimpl
def slotline_drafter() -> Iterable[Descriptor[Any]]:
    """Offer the drafters."""
    from slotline.proposers import draft_model, eagle, grammar, medusa, mtp, ngram, suffix

    return (
        draft_model.descriptor,
        eagle.descriptor,
        eagle.descriptor_3,
        grammar.descriptor,
        medusa.descriptor,
        medusa.tree_descriptor,
        mtp.descriptor,
        ngram.descriptor,
        suffix.descriptor,
    )
