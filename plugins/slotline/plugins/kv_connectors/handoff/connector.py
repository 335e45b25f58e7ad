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
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch

from slotline.plugins.kv_connectors.handoff import address_of
from slotline.plugins.kv_connectors.handoff.items import Items
from slotline.plugins.kv_connectors.handoff.landing import Landing
from slotline.plugins.kv_connectors.handoff.peer import Identity, Inbox, Peer
from slotline.plugins.kv_connectors.handoff.saver import Saver
from slotline.plugins.kv_connectors.handoff.server import BlockServer
from slotline.plugins.kv_connectors.handoff.store import Key, Store, copied, key_of
from slotline.plugins.kv_connectors.stores.copies import devices_of
from slotline.ranks.replicas.reports import NUMBER
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts import BlockHash, CacheBlock, KVConnectorContext
from slotline.registry.errors import ConfigError

logger = logging.getLogger("slotline")
EARLY = 4
"""Connections to a peer for prompts that it computes. The last parts of one hold up nobody else's."""
_MOST = 100_000
"""Blocks of requests that wait, of which it is remembered who has them."""


class Handoff:
    """Connector between engines of different processes.

    Implements `LastingKVConnector`, `ItemKVConnector` and `LayerKVConnector`.

    Raises:
        ConfigError: if the address cannot be had, no peer is named, or NIXL does not work here.
        CapacityError: if the memory holds no block.
    """

    def __init__(self, context: KVConnectorContext) -> None:
        options = context.options
        _refuse(context)
        sizes = [group.block_bytes for group in context.groups]
        self._copy = context.copy
        self._resets, self._first = 0, context.identity
        self._identity = Identity(self._first)
        self._store: Store | None = None
        self._saver: Saver | None = None
        self._items: Items | None = None
        self._server: BlockServer | None = None
        self._rank = _rank(context.part)
        host, port = address_of(options.address)
        nixl = options.transport == "nixl"
        if options.role != "decode":
            states = [number for number, group in enumerate(context.groups) if group.states]
            self._store = Store(size_in_bytes(options.memory), sizes, states)
            self._saver = Saver(self._store, context.copy, context.device, context.groups)
            finalize(self, self._saver.close)
            self._items = Items(size_in_bytes(options.items))
            finalize(self, self._items.close)
            if port or not context.part:
                own = (host, port + self._rank if port else 0)
                self._server = BlockServer(
                    self._store, self._items, own, self._identity, timeout=options.timeout, nixl=nixl
                )
                finalize(self, self._server.close)
            else:
                logger.warning("kv_connector.handoff.address has no port, so these ranks hand out no blocks")
        self._inbox, self._peers = Inbox(), dict[str, Peer]()
        self._early = dict[Peer, list[Peer]]()  # connections on which a peer is asked before it has computed a prompt
        devices = devices_of(context)
        self._landing = Landing(context.copy, devices)
        for one in options.peers if options.role != "prefill" else ():
            name, number = address_of(one)
            build = partial(
                Peer,
                (name, number + self._rank),
                identity=self._identity,
                sizes=sizes,
                timeout=options.timeout,
                inbox=self._inbox,
                pinned=bool(devices),
                nixl=nixl,
            )
            self._peers[one] = peer = build()
            self._early[peer] = [build() for _ in range(EARLY)]
            for lane in (peer, *self._early[peer]):
                finalize(self, lane.close)
        self._owner: OrderedDict[Key, tuple[Peer, str]] = OrderedDict()  # with the name of the prompt
        self._unknown: set[str] = set()  # peers that requests have named in vain
        self._here: set[int] = set()
        self._unsaved: set[int] = set()  # blocks of an engine that saves nothing
        self._failed: set[int] = set()

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [self._store is not None and self._store.holds((group, one)) for one in hashes]

    def held_for(self, group: int, hashes: Sequence[BlockHash], params: Mapping[str, Any]) -> Sequence[bool]:
        own, peer = self.held(group, hashes), self._peer(params)
        if peer is None:
            return own
        for one, here in zip(hashes, own, strict=True):
            if not here:
                self._owner[group, one] = peer, _prompt(params)
        while len(self._owner) > _MOST:
            self._owner.popitem(last=False)
        return [True] * len(hashes)

    def answer(self, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if self._server is None or self._store is None or not params.get("do_remote_decode"):
            return None
        if prompt := _prompt(params):
            self._store.over(prompt)
        host, port = self._server.address
        first = port - self._rank  # all ranks answer alike
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": hashlib.sha256(f"{host}:{first} {self._resets}".encode()).hexdigest(),
            "remote_host": host,
            "remote_port": first,
        }

    def item_encoded(self, mm_hash: str, output: torch.Tensor) -> None:
        if self._items is not None:
            self._items.put(mm_hash, output)

    def load_items(self, mm_hashes: Sequence[str], params: Mapping[str, Any]) -> None:
        peer = self._peer(params)
        if peer is None:
            self._inbox.put_items(dict.fromkeys(mm_hashes))
        else:
            peer.load_items(mm_hashes)

    def items(self) -> Mapping[str, torch.Tensor | None]:
        return self._inbox.take_items()

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        if self._saver is not None:
            self._saver.save(saves, {key_of(one) for one in loads})
        else:
            self._unsaved |= {one.block for one in saves}
        asked, own = dict[tuple[Peer, str], list[CacheBlock]](), list[tuple[CacheBlock, torch.Tensor]]()
        for one in loads:
            owner = self._owner.pop(key_of(one), None)
            if self._store is not None and self._store.holds(key_of(one)):
                own.append((one, self._store.row(key_of(one))))
            elif owner is None:
                self._failed.add(one.block)
            else:
                asked.setdefault(owner, []).append(one)
        copied(self._copy.to_device, own)
        self._here |= {one.block for one, _ in own}
        for (peer, prompt), blocks in asked.items():
            lane = min(self._early[peer], key=lambda one: one.under_way) if prompt else peer
            lane.load(blocks, prompt)

    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        if self._saver is not None:
            self._saver.filling(blocks)

    def wait_layer(self, layer: int) -> None:
        """Do nothing, because a request's blocks are here before it runs."""

    def save_layer(self, layer: int) -> None:
        if self._saver is not None:
            self._saver.save_layer(layer)

    def wait(self) -> None:
        """Do nothing, because blocks stay as they are until they are saved."""

    def saved(self) -> Collection[int]:
        if self._saver is not None:
            return self._saver.saved()
        unsaved, self._unsaved = self._unsaved, set()
        return unsaved

    def arrived(self) -> Collection[int]:
        self._land()
        here, self._here = self._here | self._landing.landed(), set()
        return here

    def failed(self) -> Collection[int]:
        failed, self._failed = self._failed, set()
        return failed

    def finish(self) -> None:
        lanes = [lane for peer, early in self._early.items() for lane in (peer, *early)]
        for one in lanes:
            one.hurry()
        self._inbox.wait()
        for one in lanes:
            one.hurried = False
        self._land()
        self._here |= self._landing.finish()
        if self._saver is not None:
            self._saver.wait()

    def reset(self) -> None:
        """Forget all blocks. From now on the identity is another one, that of a peer which is reset as often."""
        self._resets += 1
        self._identity.text = hashlib.sha256(f"{self._first} {self._resets}".encode()).hexdigest()
        self._owner.clear()
        if self._store is not None and self._saver is not None:
            self._saver.wait()
            self._store.clear()
        if self._items is not None:
            self._items.clear()

    def _land(self) -> None:
        """Take what peers have loaded, or could not load."""
        ended = self._inbox.take()
        self._failed |= {one.block for one, row in ended if row is None}
        self._landing.take((one, row) for one, row in ended if row is not None)

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
    if NUMBER in os.environ and options.role != "decode":
        raise ConfigError(
            f"kv_connector.handoff.role = {options.role!r} hands out blocks at one address, and parallel.data starts "
            "several engines: no answer could say which of them has computed a prompt",
            fix="start a server for each and give `slotline route` several --prefill, or set role = 'decode'",
        )


def _prompt(params: Mapping[str, Any]) -> str:
    """Return the name of a prompt, by which both of its requests call it. Empty if it has none."""
    name = params.get("transfer_id")
    return name if isinstance(name, str) and len(name) <= 100 else ""


def _rank(part: str) -> int:
    """Return the number of a rank among those of its engine, from what it has of each block."""
    rank = 0
    for index, count in re.findall(r"(?:pipeline|tensor) (\d+)/(\d+)", part):
        rank = rank * int(count) + int(index)
    return rank
