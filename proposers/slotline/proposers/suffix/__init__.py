"""Drafter `suffix`: proposes what most often followed the end of the text, in it and in what was generated before."""

from __future__ import annotations

from attrs import frozen

from slotline.registry.capability import Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ConfigError


@frozen(kw_only=True)
class SuffixOptions:
    """The table `[drafter.suffix]`.

    Attributes:
        min_tokens: shortest end of the text that is looked up.
        max_depth: longest end that is compared. Longer matches are all equal.
        max_places: places that are compared for an end, the latest first, in the text and in past outputs each.
        past_tokens: latest tokens of finished requests' outputs to keep, 0 for none. Eight bytes each.
        factor: most draft tokens for each token of the match.
        min_probability: a draft continues while at least this share of the matching places agrees.
    """

    min_tokens: int = 2
    max_depth: int = 24
    max_places: int = 32
    past_tokens: int = 1 << 20
    factor: float = 1.0
    min_probability: float = 0.1

    def __attrs_post_init__(self) -> None:
        rules = (
            ("min_tokens", 1 <= self.min_tokens <= self.max_depth, "between 1 and max_depth"),
            ("max_places", 1 <= self.max_places <= 1024, "between 1 and 1024"),
            ("past_tokens", 0 <= self.past_tokens < 2**31, "between 0 and 2,147,483,647"),
            ("factor", self.factor > 0, "above 0"),
            ("min_probability", 0 < self.min_probability <= 1, "above 0 and at most 1"),
        )
        for name, holds, allowed in rules:
            if not holds:
                raise ConfigError(
                    f"drafter.suffix: {name}={getattr(self, name)} is not allowed", fix=f"choose one {allowed}"
                )


descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="suffix",
    summary="proposes what most often followed, in the text and in past outputs",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(), needs_history=True, remembers=True),
    factory="slotline.proposers.suffix.drafter:SuffixDrafter",
    options=SuffixOptions,
)
