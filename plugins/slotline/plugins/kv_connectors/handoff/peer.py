"""A thread that loads blocks from another engine: by its memory on the same machine, or over the connection."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from attrs import define

from slotline.plugins.kv_connectors.handoff.items import output_of
from slotline.plugins.kv_connectors.handoff.nixl_memory import FarMemory
from slotline.plugins.kv_connectors.handoff.store import HEADER, checksum_of
from slotline.plugins.kv_connectors.handoff.wire import VERSION, fill, named, receive, send
from slotline.registry.contracts import CacheBlock

logger = logging.getLogger("slotline")
T = TypeVar("T")
PAUSE = 1.0
"""Seconds after a failure in which nothing is loaded from a peer."""
Loaded = tuple[CacheBlock, torch.Tensor | None]
"""A block with its bytes, None if it could not be loaded."""


@define(eq=False)
class Identity:
    """Name of the bytes that this engine can use. It changes with the weights."""

    text: str


class BlocksAsked(NamedTuple):
    """Blocks that are to be loaded.

    Attributes:
        blocks: which ones.
        prompt: the name of the prompt if the peer may be computing it, empty for one that has been computed.
    """

    blocks: tuple[CacheBlock, ...]
    prompt: str


class ItemsAsked(NamedTuple):
    """Encoder outputs that are to be loaded, by their hashes."""

    mm_hashes: tuple[str, ...]


class Inbox:
    """Blocks and encoder outputs that peers have loaded, or could not load."""

    def __init__(self) -> None:
        self._items: dict[str, torch.Tensor | None] = {}
        self._blocks: list[Loaded] = []
        self._expected, self._changed = 0, Condition()

    def expect(self, count: int) -> None:
        """Note blocks that are under way from now on."""
        with self._changed:
            self._expected += count

    def put(self, block: CacheBlock, row: torch.Tensor | None) -> None:
        """Take a block. Any thread may call it."""
        with self._changed:
            self._blocks.append((block, row))
            self._expected -= 1
            self._changed.notify_all()

    def put_items(self, found: Mapping[str, torch.Tensor | None]) -> None:
        """Take encoder outputs. Any thread may call it."""
        with self._changed:
            self._items |= found

    def take_items(self) -> dict[str, torch.Tensor | None]:
        """Return the encoder outputs that have come since the last call."""
        with self._changed:
            items, self._items = self._items, {}
        return items

    def take(self) -> list[Loaded]:
        """Return the blocks that have come since the last call."""
        with self._changed:
            blocks, self._blocks = self._blocks, []
        return blocks

    def wait(self) -> None:
        """Wait until no block is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._expected)


class Peer:
    """Another engine that blocks are loaded from.

    Args:
        address: where it hands out blocks.
        identity: of this engine.
        sizes: bytes of a block of each cache group.
        timeout: seconds without a byte after which it counts as gone.
        inbox: gets each block.
        nixl: whether NIXL reads the blocks.
        pinned: whether blocks come into pinned memory, from which copies to a GPU are asynchronous.

    Attributes:
        hurried: whether blocks that have not been asked for yet fail at once.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        identity: Identity,
        sizes: Sequence[int],
        timeout: float,
        inbox: Inbox,
        nixl: bool = False,
        pinned: bool = False,
    ) -> None:
        self._address, self._identity, self._sizes = address, identity, tuple(sizes)
        self._timeout, self._inbox = timeout, inbox
        self._asked: SimpleQueue[BlocksAsked | ItemsAsked | None] = SimpleQueue()
        self._connection: socket.socket | None = None
        self._memory: mmap.mmap | None = None
        self._far: FarMemory | None = None
        self._nixl, self._pinned = nixl, pinned
        self._failed_at: float | None = None
        self.hurried = False
        self._waits = False  # for a prompt that may not have been computed
        self._changed, self._under_way = Lock(), 0
        self._thread: Thread | None = None

    @property
    def mapped(self) -> bool:
        """Whether blocks come through the peer's memory."""
        return self._memory is not None

    @property
    def is_well(self) -> bool:
        """Whether it is worth asking."""
        return self._failed_at is None or time.monotonic() - self._failed_at > PAUSE

    @property
    def under_way(self) -> int:
        """How much was asked of it that has not ended."""
        return self._under_way

    def hurry(self) -> None:
        """Have blocks fail at once that have not been asked for yet, or that may not have been computed."""
        self.hurried = True
        if self._waits:
            self._shut()

    def load(self, blocks: Sequence[CacheBlock], prompt: str = "") -> None:
        """Load blocks soon, as they are computed if their prompt has a name."""
        self._inbox.expect(len(blocks))
        self._ask(BlocksAsked(tuple(blocks), prompt))

    def load_items(self, mm_hashes: Sequence[str]) -> None:
        """Load encoder outputs soon."""
        self._ask(ItemsAsked(tuple(mm_hashes)))

    def _ask(self, asked: BlocksAsked | ItemsAsked) -> None:
        with self._changed:
            self._under_way += 1
        if self._thread is None:
            self._thread = Thread(target=self._run, name="slotline-handoff", daemon=True)
            self._thread.start()
        self._asked.put(asked)

    def close(self) -> None:
        """End the thread and the connection."""
        self.hurried = True
        self._asked.put(None)
        self._shut()

    def _shut(self) -> None:
        """End the connection. Who waits for it gets an error."""
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            if isinstance(asked, ItemsAsked):
                nothing: dict[str, torch.Tensor | None] = dict.fromkeys(asked.mm_hashes)
                load = partial(self._loaded_items, asked.mm_hashes)
                self._inbox.put_items(self._tried(load, nothing, f"{len(nothing)} encoder outputs"))
            else:
                left = {one.block: one for one in asked.blocks}
                self._waits = bool(asked.prompt)
                self._tried(partial(self._load, left, asked.prompt), None, f"{len(left)} blocks")
                self._waits = False
                for block in left.values():
                    self._inbox.put(block, None)
            with self._changed:
                self._under_way -= 1
        self._disconnect()

    def _tried(self, load: Callable[[], T], nothing: T, what: str) -> T:
        """Return what was loaded, or `nothing` if the peer does not give it."""
        try:
            if not self.hurried and self.is_well:
                found = self._once_more(load)
                self._failed_at = None
                return found
        except Exception as error:
            self._failed_at = time.monotonic()
            self._disconnect()
            logger.warning("kv_connector.handoff: %s of %s:%d are computed again: %s", what, *self._address, error)
        return nothing

    def _once_more(self, load: Callable[[], T]) -> T:
        """Return what was loaded, over a new connection if the old one has ended meanwhile."""
        old = self._connection is not None
        try:
            return load()
        except ConnectionError:
            if not old or self.hurried:
                raise
            self._disconnect()
            return load()

    def _loaded_items(self, mm_hashes: Sequence[str]) -> dict[str, torch.Tensor | None]:
        """Return encoder outputs, None for those that the peer lacks or whose checksum is wrong."""
        connection = self._connected()
        self._send(connection, items=list(mm_hashes))
        answer = self._received(connection)["items"]
        if len(answer) != len(mm_hashes):
            raise ValueError(f"the peer tells of {len(answer)} encoder outputs, of {len(mm_hashes)}")
        found = dict[str, torch.Tensor | None]()
        for mm_hash, known in zip(mm_hashes, answer, strict=True):
            found[mm_hash] = None
            if known is not None:
                shape, dtype, size, checksum = known
                data = bytearray(int(size))
                fill(connection, memoryview(data))
                if zlib.crc32(data) == checksum:
                    found[mm_hash] = output_of(data, shape, dtype)
        return found

    def _load(self, left: dict[int, CacheBlock], prompt: str) -> None:
        """Load blocks, and put each into the inbox once it is whole, without bytes if its checksum is wrong.

        Args:
            left: the blocks, by number. Those that are put away are deleted.
            prompt: its name, see `BlocksAsked`.
        """
        connection, blocks, wrong = self._connected(), list(left.values()), 0
        keys = [(one.group, one.block_hash) for one in blocks]
        self._send(connection, blocks=named(keys), prompt=prompt, send=not self.mapped and self._far is None)
        sizes = [self._sizes[block.group] for block in blocks]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._pinned)
        rows, ended = memory.split(sizes), 0
        with self._registered(memory):
            while ended < len(blocks):
                answer = self._received(connection)
                self._read_parts(connection, answer["parts"], rows)
                for index, checksum in answer["ended"]:
                    block, row, ended = blocks[index], rows[index], ended + 1
                    good = checksum is not None and checksum_of(row.numpy()) == checksum
                    wrong += checksum is not None and not good
                    if left.pop(block.block, None) is None:
                        raise ValueError(f"the peer tells twice of the block {index}")
                    self._inbox.put(block, row if good else None)
        if wrong:
            text = "kv_connector.handoff: %d blocks of %s:%d have other checksums"
            logger.warning(text, wrong, *self._address)

    def _registered(self, memory: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context in which NIXL may write to memory, if it reads the blocks."""
        return nullcontext() if self._far is None else self._far.writing(memory)

    def _read_parts(self, connection: socket.socket, parts: Sequence[Any], rows: Sequence[torch.Tensor]) -> None:
        """Copy parts of blocks.

        Args:
            parts: of each the number of its block, the block's place, and the part's first byte and its end.
            rows: of the blocks.

        Raises:
            OSError: if the peer has gone.
            ValueError: if a part is none of its block.
        """
        places, own = list[int](), list[torch.Tensor]()
        for index, place, first, end in parts:
            if not (0 <= index < len(rows) and 0 <= first <= end <= len(rows[index]) and place >= 0):
                raise ValueError(f"bytes {first} to {end} of block {index}")
            places.append(place + first)
            own.append(rows[index][first:end])
        self._read(connection, places, own)

    def _read(self, connection: socket.socket, places: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copy bytes from their places in the peer's memory, or as they come over the connection.

        Raises:
            OSError: if the peer has gone.
        """
        if self._far is not None:
            self._far.read(places, rows)
            return
        for place, row in zip(places, rows, strict=True):
            if self._memory is None:
                fill(connection, _view(row))
            else:  # numpy lets other threads run meanwhile
                np.copyto(row.numpy(), np.frombuffer(self._memory, np.uint8, len(row), place))

    def _connected(self) -> socket.socket:
        """Return the connection, with the peer's memory mapped if it is on this machine."""
        if self._connection is not None:
            return self._connection
        connection = socket.create_connection(self._address, self._timeout)
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(connection)
        hello = self._received(connection)
        if self._nixl:
            if "nixl" not in hello:
                raise ValueError("the peer has no kv_connector.handoff.transport = 'nixl'")
            self._far = FarMemory(hello["nixl"], self._timeout)
        else:
            self._memory = _mapped(hello["path"], hello["secret"])
        return connection

    def _send(self, connection: socket.socket, **message: Any) -> None:
        send(connection, {"version": VERSION, "identity": self._identity.text, **message})

    def _received(self, connection: socket.socket) -> dict[str, Any]:
        answer = receive(connection)
        if "error" in answer:
            raise ValueError(f"{answer['error']}; ours is {self._identity.text[:12]}")
        return answer

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._memory = self._far = None


def _view(row: torch.Tensor) -> memoryview:
    return memoryview(row.numpy()).cast("B")  # type: ignore[arg-type]


def _mapped(path: str, secret: str) -> mmap.mmap | None:
    """Return a peer's memory, None if it is on another machine or of another user."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        memory = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return memory if secret and memory[:HEADER] == secret.encode() else None
