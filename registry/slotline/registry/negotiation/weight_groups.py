"""Decisions for quantized weights: the parts of a `Plan` that say which plugin multiplies by which modules."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from slotline.registry.contracts.weights import WeightModule, WeightScheme
from slotline.registry.negotiation.reasons import Rejection, source_of


@frozen(kw_only=True)
class WeightGroupPlan:
    """Modules of one scheme and size, and the plugin that multiplies by their weights.

    Attributes:
        name: name of the group, from the modules' own names.
        kind: ``linear`` or ``experts``, the slot.
        modules: in model order.
        scheme: the form of their weights.
        plugin: the plugin, identified by `distribution`, `version`, `contract` and `inline`.
        num_bytes: bytes of all packed weights of the group.
        plain_bytes: bytes that the same weights would have in the plan's dtype.
        reason: the reason for this plugin.
        measured: (plugin, microseconds of a product of one token, of a token in a product of many). Not part of the
            decision.
        rejected: the other candidates.
    """

    name: str
    kind: str
    modules: tuple[WeightModule, ...]
    scheme: WeightScheme
    plugin: str
    distribution: str = ""
    version: str = ""
    contract: int = 1
    inline: bool = False
    num_bytes: int = 0
    plain_bytes: int = 0
    reason: str = ""
    measured: tuple[tuple[str, float, float], ...] = ()
    rejected: tuple[Rejection, ...] = ()

    def decision(self) -> dict[str, Any]:
        """Return the decision without its reasons."""
        first = self.modules[0]
        return {
            **source_of(self),
            "name": self.name,
            "kind": self.kind,
            "plugin": self.plugin,
            "contract": self.contract,
            "scheme": self.scheme.describe(),
            "modules": [module.name for module in self.modules],
            "in_features": first.in_features,
            "out_features": first.out_features,
            "num_bytes": self.num_bytes,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {
            **self.decision(),
            "plain_bytes": self.plain_bytes,
            "reason": self.reason,
            "measured_us": {name: list(us) for name, *us in self.measured},
            "rejected": [item.to_json() for item in self.rejected],
        }
