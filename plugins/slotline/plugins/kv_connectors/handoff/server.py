"""Threads that hand out blocks of a store to other engines."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import suppress
from threading import Thread
from typing import Any

from slotline.plugins.kv_connectors.handoff.items import Items
from slotline.plugins.kv_connectors.handoff.nixl_memory import OpenMemory
from slotline.plugins.kv_connectors.handoff.peer import Identity
from slotline.plugins.kv_connectors.handoff.store import Found, Key, Store
from slotline.plugins.kv_connectors.handoff.wire import VERSION, keys_of, receive
from slotline.plugins.kv_connectors.handoff.wire import send as say
from slotline.registry.errors import ConfigError

logger = logging.getLogger("slotline")
GRACE = 0.25
"""Seconds after the end of a prompt in which its last blocks may still come."""


class BlockServer:
    """Server of a store's blocks.

    A peer first says which blocks it can use. If its identity is another one, it gets an error instead of blocks.

    Args:
        store: the blocks.
        items: encoder outputs.
        address: where it listens, with port 0 for a free one.
        identity: of this engine.
        timeout: seconds in which a peer expects an answer. It waits for blocks that are being saved for half of them.
        nixl: whether NIXL reads the blocks.

    Attributes:
        address: with the port.

    Raises:
        ConfigError: if the address cannot be had, or NIXL does not work here.
    """

    def __init__(
        self,
        store: Store,
        items: Items,
        address: tuple[str, int],
        identity: Identity,
        *,
        timeout: float,
        nixl: bool = False,
    ) -> None:
        self._store, self._items, self._identity, self._timeout = store, items, identity, timeout
        self._open = OpenMemory(store.memory) if nixl else None
        try:
            self._listener = socket.create_server(address, family=_family(address[0]))
        except OSError as error:
            host, port = address
            raise ConfigError(
                f"kv_connector.handoff.address = '{host}:{port}' cannot be had: {error.strerror or error}",
                fix="choose another address or port, or end the process that has it",
            ) from error
        self.address: tuple[str, int] = (address[0], self._listener.getsockname()[1])
        self._connections: set[socket.socket] = set()
        Thread(target=self._accept, name="slotline-handoff", daemon=True).start()

    def close(self) -> None:
        """End, and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if self._open is not None:
            self._open.close()
        self._store.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            Thread(target=self._serve, args=(connection,), name="slotline-handoff", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._answer(connection, receive(connection)):
                    pass
            except (OSError, ValueError, KeyError) as error:
                logger.debug("a peer of kv_connector.handoff has gone: %s", error)
            finally:
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket, asked: dict[str, Any]) -> bool:
        """Answer a message. Return whether to go on."""
        if (asked["version"], asked["identity"]) != (VERSION, self._identity.text):
            what = f"version {VERSION} and identity {self._identity.text[:12]}"
            say(connection, {"error": f"this engine has {what}: its model, dtype, cache or weights are others"})
            return False
        if "items" in asked:
            outputs = self._items.find([str(one) for one in asked["items"]], self._timeout / 2)
            say(connection, {"items": [None if one is None else one.described() for one in outputs]})
            for output in filter(None, outputs):
                connection.sendall(output.data)
            return True
        if "blocks" in asked:
            self._hand_out(connection, keys_of(asked["blocks"]), str(asked["prompt"])[:100], send=bool(asked["send"]))
        else:
            answer: dict[str, Any] = {"path": self._store.path, "secret": self._store.secret}
            say(connection, answer | ({} if self._open is None else {"nixl": self._open.hello}))
        return True

    def _hand_out(self, connection: socket.socket, keys: list[Key], prompt: str, *, send: bool) -> None:
        """Tell of the parts of blocks as they are written, and of each block once it is whole or will not come.

        Blocks that nobody is writing are waited for if their prompt is being computed. After half of the timeout
        without a new part the blocks that have not come will not.

        Args:
            prompt: its name, empty for one that has been computed.
            send: send the bytes behind each message.
        """
        left, sent, version = dict(enumerate(keys)), [0] * len(keys), -1
        latest = time.monotonic() + self._timeout / 2
        while left:
            pause = max(latest - time.monotonic(), 0.0)
            version, found = self._store.look(list(left.values()), version, min(pause, GRACE) if prompt else pause)
            waits = bool(prompt) and not self._store.is_over(prompt, since=GRACE)
            parts, ended = list[tuple[int, int, int, int]](), list[tuple[int, int | None]]()
            for (index, (group, _)), one in zip(left.items(), found, strict=True):
                if one is None:
                    ended += [] if waits else [(index, None)]
                    sent[index] = 0
                    continue
                written = self._store.size(group) if isinstance(one, Found) else one.written
                if sent[index] > written:  # it is written once more
                    sent[index] = 0
                if written > sent[index]:
                    parts.append((index, one.place, sent[index], written))
                    sent[index] = written
                if isinstance(one, Found):
                    ended.append((index, one.checksum))
            if parts or ended:
                latest = time.monotonic() + self._timeout / 2
            elif time.monotonic() >= latest:
                ended = [(index, None) for index in left]
            if parts or ended:
                self._tell(connection, parts, ended, send=send)
            for index, _ in ended:
                del left[index]

    def _tell(
        self,
        connection: socket.socket,
        parts: list[tuple[int, int, int, int]],
        ended: list[tuple[int, int | None]],
        *,
        send: bool,
    ) -> None:
        say(connection, {"parts": parts, "ended": ended})
        for _, place, first, end in parts if send else ():
            connection.sendall(self._store.bytes_of(place + first, place + end))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
