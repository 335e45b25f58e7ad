"""Descriptors of our scheduler policies."""

from __future__ import annotations

from slotline.registry.capability import Flag
from slotline.registry.contracts.scheduler_policy import SchedulerPolicyCapabilities
from slotline.registry.descriptor import Descriptor, Kind

fcfs: Descriptor[SchedulerPolicyCapabilities] = Descriptor(
    kind=Kind.SCHEDULER_POLICY,
    name="fcfs",
    capabilities=SchedulerPolicyCapabilities(),
    factory="slotline.plugins.schedulers.ranked:FirstCome",
    summary="first come, first served",
)

priority: Descriptor[SchedulerPolicyCapabilities] = Descriptor(
    kind=Kind.SCHEDULER_POLICY,
    name="priority",
    capabilities=SchedulerPolicyCapabilities(priorities=Flag(True)),
    factory="slotline.plugins.schedulers.ranked:ByPriority",
    summary="the lowest priority number first, then by arrival",
)

shortest: Descriptor[SchedulerPolicyCapabilities] = Descriptor(
    kind=Kind.SCHEDULER_POLICY,
    name="shortest",
    capabilities=SchedulerPolicyCapabilities(),
    factory="slotline.plugins.schedulers.ranked:Shortest",
    options="slotline.plugins.schedulers.ranked:ShortestOptions",
    summary="the shortest first; each later arrival counts as longer, so that none starves",
)

fair: Descriptor[SchedulerPolicyCapabilities] = Descriptor(
    kind=Kind.SCHEDULER_POLICY,
    name="fair",
    capabilities=SchedulerPolicyCapabilities(inputs=("tenant",), accounts=Flag(True), validates=Flag(True)),
    factory="slotline.plugins.schedulers.fair:Fair",
    options="slotline.plugins.schedulers.fair:FairOptions",
    summary="as many tokens for each tenant that waits, in rounds (deficit round robin)",
)
