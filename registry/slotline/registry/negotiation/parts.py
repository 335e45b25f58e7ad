"""Plugins that stand alone (drafters, logits processors, state backends, LoRA): needs against one offer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slotline.registry.negotiation.offers import reason_of
from slotline.registry.negotiation.plan import Reason
from slotline.registry.negotiation.request import Need


def part_reasons(capabilities: Any, needs: Iterable[Need]) -> tuple[Reason, ...]:
    """Why an offer does not cover some needs, one reason each; empty if it may be used.

    Limits between features count: a limit narrows an offer where the need that it names is active. A need of None or
    False is none.
    """
    active = {need.capability: need for need in needs if need.value is not None and need.value is not False}
    reasons = []
    for name, need in active.items():
        offer = getattr(capabilities, name, None)
        if offer is None:
            reasons.append(reason_of(name, "needs it, the plugin says nothing of it", need.origin))
            continue
        refusal = offer.refusal(need.value)
        if refusal is None:
            for limit in getattr(capabilities, "limits", ()):
                if limit.capability == name and limit.when in active and (text := limit.offer.refusal(need.value)):
                    refusal = f"{text} with {limit.when}" + (f" ({limit.note})" if limit.note else "")
                    break
        if refusal is not None:
            reasons.append(reason_of(name, refusal, need.origin))
    return tuple(reasons)
