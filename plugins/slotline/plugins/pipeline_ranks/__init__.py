"""Descriptor of the extension `pipeline_ranks`: a model whose layers are divided among ranks."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="pipeline_ranks",
    capabilities=ExtensionCapabilities(order=96),
    factory="slotline.plugins.pipeline_ranks.extension:PipelineRanks",
    summary="sends hidden states from rank to rank and sampled tokens back, and keeps all ranks at work",
)
