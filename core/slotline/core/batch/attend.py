"""Type of the callable by which a model attends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slotline.registry.contracts import AttentionLayer

Attend = Callable[[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Attend with a layer: (layer, query, key, value, sinks or None) to the layer's output."""
