"""Offers of plugins on this machine: descriptors with the capabilities that their probes left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import evolve

from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Candidate
from slotline.registry.probing import probe

Offers = Mapping[tuple[Kind, str], Descriptor[Any]]
"""Descriptors by kind and name."""


def offers_of(candidates: Iterable[Candidate]) -> Offers:
    """Return the descriptors of the candidates that loaded, each with the capabilities that its probe left."""
    return {
        (c.descriptor.kind, c.name): evolve(c.descriptor, capabilities=c.capabilities)
        for c in candidates
        if c.descriptor is not None
    }


def narrowed(descriptor: Descriptor[Any], info: DeviceInfo, what: str, fix: str) -> Descriptor[Any]:
    """Return a named plugin's descriptor with the capabilities that its probe leaves.

    Args:
        what: the plugin's name in the error message.
        fix: the remedy in the error message.

    Raises:
        NegotiationError: if the probe refuses the machine.
    """
    offer = probe(descriptor, info)
    if isinstance(offer, str):
        raise NegotiationError(f"{what} cannot run on {info.type}: {offer}", fix=fix)
    return evolve(descriptor, capabilities=offer)
