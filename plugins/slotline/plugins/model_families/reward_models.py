"""Reward models that transformers has no class of: a decoder under a head of two layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import Qwen2Model, Qwen2PreTrainedModel


class Qwen2ForProcessRewardModel(Qwen2PreTrainedModel):  # type: ignore[misc]
    """Decoder of Qwen2.5-Math-PRM, whose head gives the scores of a step at the token that ends it.

    Attributes:
        labels: number of scores. None for the configuration's.
    """

    labels: int | None = 2

    def __init__(self, config: Any) -> None:
        if self.labels is not None:
            config.num_labels = self.labels
        super().__init__(config)
        self.model = Qwen2Model(config)
        size = config.hidden_size
        self.score = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, config.num_labels))
        self.post_init()


class Qwen2ForRewardModel(Qwen2ForProcessRewardModel):
    """Decoder of Qwen2.5-Math-RM, whose head gives the reward of a text at its last token."""

    labels = 1


CLASSES: Mapping[str, type] = MappingProxyType(
    {one.__name__: one for one in (Qwen2ForProcessRewardModel, Qwen2ForRewardModel)}
)
"""The classes by the name of their architecture."""
