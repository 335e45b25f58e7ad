"""The connector `nixl`: files of blocks in the form of `disk`, whose bytes NIXL moves."""

from __future__ import annotations

import os
import threading
from uuid import uuid4

import numpy as np

from slotline.plugins.kv_connectors.disk.block_file import Transport
from slotline.plugins.kv_connectors.disk.store import build_files
from slotline.plugins.kv_connectors.nixl.agent import Agent, Part
from slotline.plugins.kv_connectors.stores.block_store import Bytes
from slotline.plugins.kv_connectors.stores.staged import StagedConnector
from slotline.registry.contracts import KVConnectorContext

PARAMETERS = {
    "auto": {},
    "uring": {"use_uring": "true"},
    "aio": {"use_aio": "true"},
    "posix_aio": {"use_posix_aio": "true"},
}
"""Of NIXL's plugin POSIX, by the option `api`."""


def build_nixl(context: KVConnectorContext) -> StagedConnector:
    """Build the connector.

    Raises:
        CapacityError: if the size does not hold one block.
        ConfigError: if NIXL does not work here, the folder cannot be used, or the codec does not know the caches.
    """
    transport = FileTransfers(context.options.api)
    transport.agent()  # which shows that it works
    return build_files(context, "kv_connector.nixl", transport)


class FileTransfers(Transport):
    """Transfers of a header and a block between memory and an open file, by NIXL. Each thread has an agent.

    Args:
        api: see `NixlOptions`.
    """

    def __init__(self, api: str) -> None:
        self._parameters, self._own = PARAMETERS[api], threading.local()

    def agent(self) -> Agent:
        """Return the agent of this thread."""
        if not hasattr(self._own, "agent"):
            self._own.agent = Agent(f"slotline-{uuid4().hex}", "POSIX", self._parameters)
        agent: Agent = self._own.agent
        return agent

    def put(self, handle: int, header: bytes, data: Bytes) -> None:
        """Write a header and a block.

        Raises:
            OSError: if they cannot be written, with the system's number if there is no room for them.
        """
        os.posix_fallocate(handle, 0, len(header) + len(data))  # NIXL does not say why a write failed
        self._transfer("WRITE", handle, [np.frombuffer(header, np.uint8), data])

    def get(self, handle: int, header: bytearray, data: Bytes) -> tuple[int, int]:
        """Read a header and a block. Return how many bytes were read, and the size of the file.

        Raises:
            OSError: if they cannot be read.
        """
        size = os.fstat(handle).st_size
        got = min(size, len(header) + len(data))
        parts = [np.frombuffer(header, np.uint8)[:got], data[: max(got - len(header), 0)]]
        self._transfer("READ", handle, [one for one in parts if len(one)])
        return got, size

    def _transfer(self, operation: str, handle: int, pieces: list[Bytes]) -> None:
        """Copy pieces of memory from or to the beginning of a file, one after another."""
        if not pieces:
            return
        agent = self.agent()
        memory = [Part(one.ctypes.data, len(one)) for one in pieces]
        ends = np.cumsum([part.length for part in memory]).tolist()
        places = [Part(end - part.length, part.length, handle) for part, end in zip(memory, ends, strict=True)]
        here = agent.register("DRAM", memory)
        try:
            there = agent.register("FILE", places)
            try:
                agent.transfer(operation, memory, "FILE", places, agent.name, float("inf"))
            finally:
                agent.forget(there)
        finally:
            agent.forget(here)
