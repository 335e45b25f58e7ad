"""Threads that hand out blocks of a store to other engines."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from threading import Thread
from typing import Any

from slotline.plugins.kv_connectors.handoff.items import Items
from slotline.plugins.kv_connectors.handoff.nixl_memory import OpenMemory
from slotline.plugins.kv_connectors.handoff.peer import Identity
from slotline.plugins.kv_connectors.handoff.store import Store
from slotline.plugins.kv_connectors.handoff.wire import VERSION, keys_of, receive, send
from slotline.registry.errors import ConfigError

logger = logging.getLogger("slotline")


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
            send(connection, {"error": f"this engine has {what}: its model, dtype, cache or weights are others"})
            return False
        if "items" in asked:
            outputs = self._items.find([str(one) for one in asked["items"]], self._timeout / 2)
            send(connection, {"items": [None if one is None else one.described() for one in outputs]})
            for output in filter(None, outputs):
                connection.sendall(output.data)
            return True
        store, keys = self._store, keys_of(asked.get("blocks", ()))
        found = store.find(keys, self._timeout / 2)
        answer: dict[str, Any] = {"blocks": [None if one is None else list(one) for one in found]}
        if "blocks" not in asked:
            answer |= {"path": store.path, "secret": store.secret}
            answer |= {} if self._open is None else {"nixl": self._open.hello}
        send(connection, answer)
        if asked.get("send"):
            for one, (group, _) in zip(found, keys, strict=True):
                if one is not None:
                    connection.sendall(store.bytes_of(one.place, group))
        return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
