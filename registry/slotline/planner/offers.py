"""What plugins offer on this machine: descriptors with the capabilities that their probes left."""

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
    """Those of the candidates that loaded, each with what its probe left."""
    return {
        (c.descriptor.kind, c.name): evolve(c.descriptor, capabilities=c.capabilities)
        for c in candidates
        if c.descriptor is not None
    }


def narrowed(descriptor: Descriptor[Any], info: DeviceInfo, what: str, fix: str) -> Descriptor[Any]:
    """A named plugin's descriptor with what its probe leaves.

    Args:
        what: the plugin, for the message, in which `fix` is the remedy.

    Raises:
        NegotiationError: if the probe refuses the machine.
    """
    offer = probe(descriptor, info)
    if isinstance(offer, str):
        raise NegotiationError(f"{what} cannot run on {info.type}: {offer}", fix=fix)
    return evolve(descriptor, capabilities=offer)
