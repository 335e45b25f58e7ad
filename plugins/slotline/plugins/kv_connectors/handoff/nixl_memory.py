"""Memory of another process that NIXL's plugin UCX reads, by InfiniBand, TCP or within the machine."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch

from slotline.plugins.kv_connectors.nixl.agent import Agent, Part

_ABANDONED: list[torch.Tensor] = []
"""Memory that a transfer may still write to, since it has not ended in time."""


class OpenMemory:
    """Memory of this process that others may read.

    Args:
        memory: [bytes] uint8. It must last as long as this.

    Attributes:
        hello: what others need to know, as JSON has it.

    Raises:
        ConfigError: if NIXL does not work here.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._agent = Agent(_name(), "UCX", {}, progress=True)
        part = Part(memory.data_ptr(), memory.numel())
        self._registered = self._agent.register("DRAM", [part])
        self.hello = {"metadata": b64encode(self._agent.metadata).decode(), "address": part.address}

    def close(self) -> None:
        """Let nobody read it any more."""
        self._agent.forget(self._registered)


class FarMemory:
    """Memory of another process.

    Args:
        hello: what that process says of it, see `OpenMemory`.
        timeout: seconds that a transfer may take.

    Raises:
        ConfigError: if NIXL does not work here.
        KeyError, ValueError: if that is not what was said.
    """

    def __init__(self, hello: Mapping[str, Any], timeout: float) -> None:
        self._agent, self._timeout = Agent(_name(), "UCX", {}), timeout
        self._address = int(hello["address"])
        self._whose = self._agent.add(b64decode(hello["metadata"]))

    @contextmanager
    def writing(self, memory: torch.Tensor) -> Iterator[None]:
        """Let `read` write to memory of this process meanwhile, [bytes] uint8."""
        registered = self._agent.register("DRAM", [Part(memory.data_ptr(), memory.numel())])
        try:
            yield
        except TimeoutError:
            _ABANDONED.append(memory)
            raise
        except BaseException:
            self._agent.forget(registered)
            raise
        self._agent.forget(registered)

    def read(self, places: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copy stretches of that memory.

        Args:
            places: their first bytes.
            rows: where they go, [length] uint8 each, in memory that `writing` was given.

        Raises:
            OSError: if that process has gone or does not answer.
        """
        if rows:
            here = [Part(row.data_ptr(), row.numel()) for row in rows]
            there = [Part(self._address + place, part.length) for place, part in zip(places, here, strict=True)]
            self._agent.transfer("READ", here, "DRAM", there, self._whose, self._timeout)


def _name() -> str:
    return f"slotline-{uuid4().hex}"
