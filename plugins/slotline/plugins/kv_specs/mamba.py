"""Descriptor of the `mamba` cache spec: states of fixed size in slots, with checkpoints for shared prefixes."""

from __future__ import annotations

from slotline.registry.capability import Align, Flag, Set
from slotline.registry.contracts.kv_spec import KVSpecCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.KV_SPEC,
    name="mamba",
    capabilities=KVSpecCapabilities(
        kv_kinds=Set(None),  # a plugin's own kinds of states as well
        exact_kinds=Set(("short_conv", "mamba1", "mamba2", "gated_delta", "kda")),
        block_sizes=Align(),
        state=Flag(True),
    ),
    factory="slotline.plugins.kv_specs.state_slots:StateSlots",
    summary="keeps one state for each request, and checkpoints of states where prefixes end",
)
