"""Drafter `ngram`: proposes the tokens after an earlier occurrence of the last tokens (prompt lookup)."""

from __future__ import annotations

from attrs import frozen

from slotline.registry.capability import Max, Set
from slotline.registry.contracts import DrafterCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ConfigError


@frozen(kw_only=True)
class NgramOptions:
    """The table `[drafter.ngram]`.

    Attributes:
        min_tokens: shortest end of the text that is looked up.
        max_tokens: longest end. The earlier place with the longest match wins, of equal ones the latest.
    """

    min_tokens: int = 2
    max_tokens: int = 5

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"drafter.ngram: min_tokens={self.min_tokens} and max_tokens={self.max_tokens} do not go together",
                fix="choose 1 <= min_tokens <= max_tokens",
            )


descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="ngram",
    summary="looks the last tokens up in the text before",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(), needs_history=True),
    factory="slotline.proposers.ngram.drafter:NgramDrafter",
    options=NgramOptions,
)
