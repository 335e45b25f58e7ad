"""Checks of connectors that a request tells which other one to ask: blocks, states and encoder outputs of a peer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from slotline.registry.contracts import CacheBlock, ItemKVConnector, RequestKVConnector
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.kv_connector import NUM_BLOCKS, PATIENCE, STATE, Pool

NAMES = [f"{i}" for i in range(4)]
STRANGE: tuple[Mapping[str, Any], ...] = (
    {},
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "remote_host": "192.0.2.1", "remote_port": 9},
    {"do_remote_prefill": [1], "remote_host": None, "remote_port": {"a": 1}},
)
"""What anyone may say of a request."""


@check(Kind.KV_CONNECTOR, "kv_connector.requests.peer", Level.NUMERICS, cost=0.1)
def requests_peer(run: Run) -> None:
    """What a peer has saved is held for a request that names it, for no other, and comes back with its states."""
    first, second, params = _pair(run)
    saves = [first.block(group, name, 3 + 10 * group + i) for group in (0, 1) for i, name in enumerate(NAMES)]
    states = NAMES[:2] if len(first.groups) > STATE else []
    saves += [first.block(STATE, name, NUM_BLOCKS + i) for i, name in enumerate(states)]
    first.step(saves, ())
    if any(second.held(0, NAMES)):
        raise Failed("a peer's blocks are held for requests that do not name it")
    connector, loads = cast("RequestKVConnector", second.connector), list[CacheBlock]()
    for group in range(len(first.groups)):
        names = states if group == STATE else NAMES
        held = list(connector.held_for(group, [name.encode() for name in names], params))
        if not all(held):
            raise Failed(f"held_for says {held} of what the peer has saved in group {group}, for a request naming it")
        base = NUM_BLOCKS + 3 if group == STATE else 40 + 10 * group
        loads += [second.wanted(group, name, base + i) for i, name in enumerate(names)]
    second.known = first.known
    if failed := second.step((), loads):
        raise Failed(f"blocks {sorted(failed)} failed, and the peer has them")


@check(Kind.KV_CONNECTOR, "kv_connector.requests.stranger", Level.HOSTILE, cost=0.1)
def requests_stranger(run: Run) -> None:
    """Nothing is held for requests that name nobody, or a peer that the options do not name, and nothing comes."""
    first, second, params = _pair(run)
    first.step([first.block(0, name, 3 + i) for i, name in enumerate(NAMES)], ())
    alone = Pool(run, beside=first)
    for pool, strange in [*((second, one) for one in STRANGE), (alone, params)]:
        try:
            connector = cast("RequestKVConnector", pool.connector)
            held = list(connector.held_for(0, [name.encode() for name in NAMES], strange))
        except Exception:  # which costs the hits
            continue
        if any(held):
            raise Failed(f"held_for says {held} for a request with {dict(strange)!r}, whose peer may not be asked")
    if run.subject.capabilities.items.support:
        _encode(first, {"image": torch.ones(2, 3)})
        found = _items(alone, ["image"], params)
        if found["image"] is not None:
            raise Failed("an item came from a peer that the options do not name")


@check(Kind.KV_CONNECTOR, "kv_connector.items.peer", Level.NUMERICS, cost=0.1)
def items_peer(run: Run) -> None:
    """Encoder outputs of a peer come bit for bit with their shape and dtype, and a missing one is said to be lost."""
    if not run.subject.capabilities.items.support:
        raise NotApplicable("encoder outputs are not handed over: items is not declared")
    first, second, params = _pair(run)
    outputs = {
        "image": torch.randn(7, 24),
        "half": torch.randn(3, 10).bfloat16(),
        "strided": torch.randn(9, 10)[:, ::2],
        "one": torch.randn(1, 5, dtype=torch.float16),
    }
    outputs = {name: one.to(first.device) for name, one in outputs.items()}
    _encode(first, outputs)
    found = _items(second, [*outputs, "absent"], params)
    if found["absent"] is not None:
        raise Failed("an item came that the peer does not have")
    for name, want in outputs.items():
        one = found[name]
        if one is None or one.device.type != "cpu" or one.dtype != want.dtype or not torch.equal(one, want.cpu()):
            about = "lost" if one is None else f"{one.dtype} {tuple(one.shape)} on {one.device.type}, or other numbers"
            raise Failed(f"the item {name!r} is {about}, expected {want.dtype} {tuple(want.shape)} in host memory")


def _pair(run: Run) -> tuple[Pool, Pool, Mapping[str, Any]]:
    """Return a pool, one that may ask it, and what a request says that names the first.

    Raises:
        NotApplicable: for connectors that ask no peers.
        Failed: if the answer does not say where the blocks are.
    """
    if not run.subject.capabilities.by_request.support or not run.subject.capabilities.peers:
        raise NotApplicable("it asks no other connector: peers is not declared")
    first = Pool(run)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    params = cast("RequestKVConnector", first.connector).answer(asked)
    if params is None or not {"remote_host", "remote_port"} <= params.keys():
        raise Failed(f"the answer is {params!r}, and says no remote_host and remote_port")
    host = f"[{params['remote_host']}]" if ":" in str(params["remote_host"]) else params["remote_host"]
    second = Pool(run, beside=first, peers=(f"{host}:{params['remote_port']}",))
    return first, second, params


def _encode(pool: Pool, outputs: Mapping[str, torch.Tensor]) -> None:
    connector = cast("ItemKVConnector", pool.connector)
    for name, one in outputs.items():
        connector.item_encoded(name, one)


def _items(pool: Pool, names: Sequence[str], params: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    """Load items and return them.

    Raises:
        Failed: if one is not told of, is told of twice, or was not asked for.
    """
    connector, found = cast("ItemKVConnector", pool.connector), dict[str, torch.Tensor | None]()
    connector.load_items(names, params)
    latest, calm = time.monotonic() + PATIENCE, 3
    while (left := set(names) - found.keys()) or calm:
        calm -= not left
        told = connector.items()
        if wrong := sorted((told.keys() - set(names)) | (told.keys() & found.keys())):
            raise Failed(f"the items {wrong} are told of twice, or were not asked for")
        found |= told
        if left and time.monotonic() > latest:
            raise Failed(f"the items {sorted(left)} are not told of after {PATIENCE:g} s")
        time.sleep(0.001)
    return found
