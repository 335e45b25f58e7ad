"""The connector `handoff`: it keeps full blocks for other engines, and loads those that a request's peer has.

A request says by `kv_transfer_params`, with the names of vLLM, which engine has computed its prompt. That engine's
blocks are asked for by their hashes. The last block of a prompt, which is not full, is computed here.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import finalize

import torch

from slotline.plugins.kv_connectors.handoff import address_of
from slotline.plugins.kv_connectors.handoff.peer import Identity, Inbox, Peer
from slotline.plugins.kv_connectors.handoff.server import BlockServer
from slotline.plugins.kv_connectors.handoff.store import Key, Store
from slotline.ranks.replicas.reports import NUMBER
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import BlockHash, CacheBlock, KVConnectorContext
from slotline.registry.errors import ConfigError

logger = logging.getLogger("slotline")
_MOST = 100_000
"""Blocks of requests that wait, of which it is remembered who has them."""


class Handoff:
    """Connector between engines of different processes. Implements `AsyncKVConnector` and `RequestKVConnector`.

    Raises:
        ConfigError: if the address cannot be had, no peer is named, or NIXL does not work here.
        CapacityError: if the memory holds no block.
    """

    def __init__(self, context: KVConnectorContext) -> None:
        options = context.options
        _refuse(context)
        sizes = [group.block_bytes for group in context.groups]
        self._copy, self._num_groups = context.copy, len(sizes)
        self._resets, self._first = 0, context.identity
        self._identity = Identity(self._first)
        self._store: Store | None = None
        self._server: BlockServer | None = None
        self._rank = _rank(context.part)
        host, port = address_of(options.address)
        nixl = options.transport == "nixl"
        if options.role != "decode":
            states = [number for number, group in enumerate(context.groups) if group.states]
            self._store = Store(size_in_bytes(options.memory), sizes, states)
            if port or not context.part:
                place = (host, port + self._rank if port else 0)
                self._server = BlockServer(self._store, place, self._identity, nixl=nixl)
                finalize(self, self._server.close)
            else:
                logger.warning("kv_connector.handoff.address has no port, so these ranks hand out no blocks")
        self._inbox, self._peers = Inbox(), dict[str, Peer]()
        for one in options.peers if options.role != "prefill" else ():
            name, number = address_of(one)
            self._peers[one] = peer = Peer(
                (name, number + self._rank),
                identity=self._identity,
                sizes=sizes,
                timeout=options.timeout,
                inbox=self._inbox,
                nixl=nixl,
            )
            finalize(self, peer.close)
        self._owner: OrderedDict[Key, Peer] = OrderedDict()
        self._unknown: set[str] = set()  # peers that requests have named in vain
        self._here: set[int] = set()
        self._failed: set[int] = set()

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [self._store is not None and self._store.holds((group, one)) for one in hashes]

    def held_for(self, group: int, hashes: Sequence[BlockHash], params: Mapping[str, Any]) -> Sequence[bool]:
        own, peer = self.held(group, hashes), self._peer(params)
        if peer is None:
            return own
        for one, here in zip(hashes, own, strict=True):
            if not here:
                self._owner[group, one] = peer
        while len(self._owner) > _MOST:
            self._owner.popitem(last=False)
        return [True] * len(hashes)

    def answer(self, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if self._server is None or not params.get("do_remote_decode"):
            return None
        host, port = self._server.address
        first = port - self._rank  # all ranks answer alike
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": hashlib.sha256(f"{host}:{first} {self._resets}".encode()).hexdigest(),
            "remote_host": host,
            "remote_port": first,
        }

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        if self._store is not None and saves:
            new = {_key(one): one for one in saves}
            rows = self._store.take(list(new), {_key(one) for one in loads})
            self._run(self._copy.to_host, [(new[key], row) for key, row in rows])
            self._store.publish()
        asked, own = dict[Peer, list[CacheBlock]](), list[tuple[CacheBlock, torch.Tensor]]()
        for one in loads:
            peer = self._owner.pop(_key(one), None)
            if self._store is not None and self._store.holds(_key(one)):
                own.append((one, self._store.row(_key(one))))
            elif peer is None:
                self._failed.add(one.block)
            else:
                asked.setdefault(peer, []).append(one)
        self._run(self._copy.to_device, own)
        self._here |= {one.block for one, _ in own}
        for peer, blocks in asked.items():
            peer.load(blocks)

    def wait(self) -> None:
        """Do nothing, because saves are complete."""

    def arrived(self) -> Collection[int]:
        ended = self._inbox.take()
        self._failed |= {one.block for one, row in ended if row is None}
        rows = [(one, row) for one, row in ended if row is not None]
        self._run(self._copy.to_device, rows)
        here, self._here = self._here | {one.block for one, _ in rows}, set()
        return here

    def failed(self) -> Collection[int]:
        failed, self._failed = self._failed, set()
        return failed

    def finish(self) -> None:
        for peer in self._peers.values():
            peer.hurried = True
        self._inbox.wait()
        for peer in self._peers.values():
            peer.hurried = False

    def reset(self) -> None:
        """Forget all blocks. From now on the identity is another one, that of a peer which is reset as often."""
        self._resets += 1
        self._identity.text = hashlib.sha256(f"{self._first} {self._resets}".encode()).hexdigest()
        self._owner.clear()
        if self._store is not None:
            self._store.clear()

    def _peer(self, params: Mapping[str, Any]) -> Peer | None:
        """Return the peer that a request names, None if it names none that may be asked."""
        if not params.get("do_remote_prefill"):
            return None
        host, port = params.get("remote_host"), params.get("remote_port")
        address = f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
        if (peer := self._peers.get(address)) is None:
            if address not in self._unknown and len(self._unknown) < 100:
                self._unknown.add(address)
                logger.warning(
                    "kv_connector.handoff: a request names the peer %.80s, which is not in kv_connector.handoff.peers",
                    address,
                )
            return None
        return peer if peer.is_well else None

    def _run(
        self,
        copy: Callable[[int, Sequence[int], Sequence[torch.Tensor]], None],
        blocks: Sequence[tuple[CacheBlock, torch.Tensor]],
    ) -> None:
        """Copy blocks from or to their rows."""
        for group in range(self._num_groups):
            if own := [(one.block, row) for one, row in blocks if one.group == group]:
                copy(group, [block for block, _ in own], [row for _, row in own])


def _key(block: CacheBlock) -> Key:
    return block.group, block.block_hash


def _refuse(context: KVConnectorContext) -> None:
    """Refuse what the connector does not serve.

    Raises:
        ConfigError: naming it.
    """
    options = context.options
    if options.role == "decode" and not options.peers:
        raise ConfigError(
            "kv_connector.handoff.role = 'decode' and kv_connector.handoff.peers is empty",
            fix="name the address of an engine that prefills, such as 127.0.0.1:7000",
        )
    if context.part and options.role == "prefill" and not address_of(options.address)[1]:
        raise ConfigError(
            f"kv_connector.handoff.address = {options.address!r} has no port, and this engine has several ranks",
            fix="name a port: rank k hands out blocks at the port k above",
        )
    if NUMBER in os.environ:
        raise ConfigError(
            "kv_connector 'handoff' serves one engine, and parallel.data starts several",
            fix="take another kv_connector, or set parallel.data = 1",
        )


def _rank(part: str) -> int:
    """Return the number of a rank among those of its engine, from what it has of each block."""
    rank = 0
    for index, count in re.findall(r"(?:pipeline|tensor) (\d+)/(\d+)", part):
        rank = rank * int(count) + int(index)
    return rank
