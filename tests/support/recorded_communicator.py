"""Descriptor of a communicator of ranks that are threads, for recorded graphs."""

from __future__ import annotations

from slotline.registry.capability import Flag, GraphSupport, Level, Set
from slotline.registry.contracts import CommunicatorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.COMMUNICATOR,
    name="recorded",
    summary="ranks that are threads of one process, for recorded graphs",
    capabilities=CommunicatorCapabilities(
        devices=Set(None),
        dtypes=Set(None),
        batch_invariant=Flag(True),
        graphs=Level(GraphSupport.ALWAYS),
        priority=100,
    ),
    factory="recorded_collectives:join",
)
