"""Options that connectors share, with their validators and notes."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from slotline.registry.config import size_in_bytes

LOSSY = "keys and values are kept in eight bits: texts may differ from those that are computed anew"
"""Note of a codec that rounds, in a plan."""


def check_size(_options: object, _field: object, value: str) -> None:
    """Refuse a text that is no size, with a ValueError."""
    size_in_bytes(value)


def positive(_options: object, _field: object, value: int) -> None:
    """Refuse a number below 1, with a ValueError."""
    if value < 1:
        raise ValueError(f"must be at least 1, not {value}")


@frozen(kw_only=True)
class StagedOptions:
    """Options of connectors whose blocks wait in host memory on their way."""

    staging: str = field(
        default="512MiB",
        validator=check_size,
        metadata={"doc": "host memory for blocks on their way, three quarters of it for saves"},
    )
    codec: Literal["none", "int8"] = field(
        default="none",
        metadata={
            "doc": "'int8' rounds keys and values to eight bits with a scale for each token and head, so that texts "
            "may differ; 'none' keeps their bytes"
        },
    )

    def notes(self) -> tuple[str, ...]:
        """Return what a codec changes."""
        return () if self.codec == "none" else (LOSSY,)
