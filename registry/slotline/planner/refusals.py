"""The error for a setting that cannot hold beside others."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.registry.config import LoadedConfig
from slotline.registry.errors import NegotiationError


def cannot_hold(loaded: LoadedConfig, key: str, asked: object, texts: Sequence[str], off: object) -> NegotiationError:
    """Return the error for a setting, with every reason.

    Args:
        key: of the setting.
        asked, off: its value and the one without the feature, as they are written in a configuration.
        texts: the reasons.
    """
    return NegotiationError(
        f"{key} = {asked} ({loaded.origins[key].where}) cannot hold: {'; '.join(texts)}",
        fix=f"remove what it cannot hold beside, or set {key} = {off}",
    )
