"""LMCache's client of one store: its coroutines run in a thread, and others wait for them for a limited time."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from slotline.plugins.kv_connectors.stores.block_store import Bytes
from slotline.registry.errors import ConfigError

OBJECTS = 8
"""Values that LMCache has room for at least, of which a thread needs one."""
SMALLEST = 64 * 2**20
"""Bytes of its memory at least."""


class Remote:
    """Client of a store whose values all have the same size. One thread uses it at a time.

    Args:
        url: of the store, in LMCache's form.
        size: bytes of a value.
        timeout: seconds that an answer may take.
        patience: seconds that the connection may take.

    Raises:
        OSError: if the store cannot be reached.
        ConfigError: if LMCache does not work here or knows no such store.
    """

    def __init__(self, url: str, size: int, timeout: float, patience: float) -> None:
        self._timeout, self._size = patience, size
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="kv-lmcache", daemon=True).start()
        try:
            self._client, self._memory, self._modules = self._wait(_connected(url, size, self._loop))
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        self._timeout = timeout
        self._end = weakref.finalize(self, _end, self._client, self._loop)

    def has(self, name: int) -> bool:
        """Return whether there is a value of this name.

        Raises:
            OSError: if the store does not answer.
        """
        return bool(self._wait(self._client.exists(self._key(name))))

    def get(self, name: int) -> Bytes | None:
        """Return a copy of a value, None if there is none.

        Raises:
            OSError: if the store does not answer.
        """
        found = self._wait(self._client.get(self._key(name)))
        if found is None:
            return None
        try:
            return np.frombuffer(_view(found), np.uint8).copy()
        finally:
            found.ref_count_down()

    def put(self, name: int, pieces: Sequence[Bytes | bytes]) -> None:
        """Give a name a value, which is filled up with zeros.

        Raises:
            OSError: if it cannot be sent.
        """
        formats = self._modules.memory_management.MemoryFormat
        value = self._memory.allocate(torch.Size([1, 1, 1, self._size]), torch.uint8, formats.KV_2LTD, busy_loop=False)
        if value is None:
            raise OSError("LMCache has no memory for a value")
        view, first = _view(value), 0
        for piece in pieces:
            view[first : first + len(piece)] = np.frombuffer(piece, np.uint8).data
            first += len(piece)
        view[first:] = bytes(self._size - first)
        self._wait(self._client.put(self._key(name), value))

    def close(self) -> None:
        """End the connection, without waiting for it."""
        self._end()

    def _key(self, name: int) -> Any:
        return self._modules.utils.CacheEngineKey("slotline", 1, 0, name, torch.uint8)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine.

        Raises:
            OSError: if it fails or does not end in time. It may still be under way then.
            ConfigError: as the coroutine.
        """
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._timeout)
        except (OSError, ConfigError):
            raise
        except TimeoutError as error:
            raise OSError(f"no answer in {self._timeout:g} s") from error
        except Exception as error:  # a client of anybody's
            raise OSError(f"{type(error).__name__}: {error}") from error


class Modules:
    """What is used of LMCache.

    Raises:
        ConfigError: if it cannot be imported.
    """

    def __init__(self) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")  # it warns of parts that are not used
        try:
            from lmcache import utils
            from lmcache.v1 import config, memory_management, metadata
            from lmcache.v1.storage_backend import connector, local_cpu_backend
        except ImportError as error:
            raise ConfigError(f"LMCache cannot be imported: {error}", fix="pip install 'slotline[lmcache]'") from error
        self.utils, self.config, self.metadata = utils, config, metadata
        self.memory_management, self.connector, self.local_cpu_backend = memory_management, connector, local_cpu_backend


async def _connected(url: str, size: int, loop: asyncio.AbstractEventLoop) -> tuple[Any, Any, Modules]:
    """Return a client, the memory of its values and what is used of LMCache.

    Raises:
        ConfigError: if LMCache does not work here or knows no such store.
    """
    modules = Modules()
    room = max(SMALLEST, OBJECTS * (size + 4096))
    config = modules.config.LMCacheEngineConfig.from_defaults(
        local_cpu=False, max_local_cpu_size=room / 2**30, remote_url=url, chunk_size=1
    )
    metadata = modules.metadata.LMCacheMetadata("slotline", 1, 1, 0, 0, torch.uint8, (1, 1, 1, 1, size), chunk_size=1)
    memory = modules.local_cpu_backend.LocalCPUBackend(config, metadata, dst_device="cpu")
    try:
        return modules.connector.CreateConnector(url, loop, memory, config, metadata), memory, modules
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"kv_connector.lmcache.url = {url!r}: {error}", fix="write it as LMCache's remote_url, as lm://HOST:PORT"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"kv_connector.lmcache.url = {url!r}: LMCache needs {error.name} for it", fix=f"pip install {error.name}"
        ) from error


def _end(client: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Close a client and end its loop, once it has done what it does."""

    async def end() -> None:
        try:
            await client.close()
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)


def _view(value: Any) -> memoryview:
    return memoryview(value.byte_array).cast("B")
