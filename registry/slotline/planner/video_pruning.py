"""Choice of the pruning of items' tokens (`multimodal.video_pruning_rate`)."""

from __future__ import annotations

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Setting

KEY = "multimodal.video_pruning_rate"


def choose_video_pruning(loaded: LoadedConfig, facts: ModelFacts) -> tuple[Setting, ...]:
    """Return the setting that records which items lose tokens. Empty if none do.

    Raises:
        NegotiationError: if the model has no items whose tokens can be pruned.
    """
    rate, origin = loaded.config.multimodal.video_pruning_rate, loaded.origins[KEY].where
    if rate == 0:
        return ()
    names = [modality.name for modality in facts.modalities if modality.prunable]
    if not names:
        taken = ", ".join(modality.name for modality in facts.modalities) or "nothing"
        raise NegotiationError(
            f"{KEY} = {rate} ({origin}) cannot hold: {facts.architecture} takes {taken} besides text, and no video "
            "whose tokens can be pruned",
            fix=f"set {KEY} = 0, or take a model such as Qwen2.5-VL or Qwen3-VL",
        )
    said = f"{origin}; of the tokens behind the first frame, of each {' and '.join(names)}"
    return (Setting(key=KEY, asked=str(rate), resolved=str(rate), origin=said, explicit=True),)
