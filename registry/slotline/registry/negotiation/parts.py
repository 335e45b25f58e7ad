"""Check of plugins without groups (drafters, logits processors, LoRA): needs against one offer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slotline.registry.negotiation.offers import refusals_of
from slotline.registry.negotiation.reasons import Reason
from slotline.registry.negotiation.request import Need


def part_reasons(capabilities: Any, needs: Iterable[Need]) -> tuple[Reason, ...]:
    """Return all reasons why an offer does not cover some needs, empty if it may be used.

    Limits between features apply: a limit narrows an offer if the need that it names is active. Needs of None or False
    are inactive.
    """
    wanted = {need.capability: need for need in needs if need.value is not None and need.value is not False}
    active = frozenset(wanted)
    return tuple(reason for need in wanted.values() for reason in refusals_of(capabilities, need, active, "plugin"))
