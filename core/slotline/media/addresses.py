"""Addresses that a server may be sent to by a URL in a request: those of the public internet, and those allowed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from slotline.registry.errors import RequestError

Address = IPv4Address | IPv6Address
_NAT64 = IPv6Network("64:ff9b::/96")
"""IPv6 addresses that a gateway translates to the IPv4 address in their last 32 bits (RFC 6052)."""


def is_public(address: Address) -> bool:
    """Return whether an address is one of the public internet.

    An IPv4 address inside an IPv6 address (mapped, 6to4, NAT64) counts as itself.
    """
    if isinstance(address, IPv6Address):
        if (inner := address.ipv4_mapped or address.sixtofour) is not None:
            return is_public(inner)
        if address in _NAT64:
            return is_public(IPv4Address(address.packed[12:]))
        if address.is_site_local or address.teredo is not None:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


async def resolved(host: str, port: int, networks: Sequence[str]) -> list[Address]:
    """Return the addresses of a host, looked up once.

    Args:
        host: a name or an address.
        port: of the connection.
        networks: networks that are allowed though they are not public, as '10.1.0.0/16'.

    Raises:
        RequestError: if the host has no address, or any that is neither public nor allowed.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"the host {host!r:.80} has no address: {error}", fix="check the URL") from error
    allowed = [ip_network(network) for network in networks]
    addresses = list(dict.fromkeys(ip_address(entry[4][0]) for entry in found))
    for address in addresses:
        if not is_public(address) and not any(address in network for network in allowed):
            raise RequestError(
                f"the host {host!r:.80} has an address that is not public, and this may not be fetched from",
                fix="give a URL of a public host, or add the network to multimodal.url_networks",
            )
    return addresses
