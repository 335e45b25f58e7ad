"""NIXL's agent: registered memory, and transfers that are polled until they end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from slotline.registry.errors import ConfigError

PAUSE = 0.00005
"""Seconds between two questions for the state of a transfer."""


class Part(NamedTuple):
    """A stretch of memory or of a file.

    Attributes:
        address: in memory, or the offset in the file.
        length: bytes.
        device: 0 for memory, and the handle of an open file.
    """

    address: int
    length: int
    device: int = 0


class Agent:
    """One agent with one of NIXL's plugins, for one thread at a time.

    Args:
        name: of the agent, another one for each.
        plugin: ``POSIX`` or ``UCX``.
        parameters: of the plugin.
        progress: whether a thread of NIXL's serves other agents.

    Attributes:
        name: of the agent.

    Raises:
        ConfigError: if the package is missing or has no such plugin that works here.
    """

    def __init__(self, name: str, plugin: str, parameters: Mapping[str, str], *, progress: bool = False) -> None:
        nixl = _imported()
        self.name, self._plugin = name, plugin
        try:
            self._agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=progress, backends=[]))
            self._agent.create_backend(plugin, dict(parameters))
        except Exception as error:  # of NIXL's own types
            given = f" with {dict(parameters)}" if parameters else ""
            raise ConfigError(
                f"NIXL's plugin {plugin}{given} does not work here: {error}",
                fix="choose other options, or another kv_connector",
            ) from error

    @property
    def metadata(self) -> bytes:
        """What another agent needs to know of this one and of the memory that is registered."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, kind: str, parts: Sequence[Part]) -> Any:
        """Make memory or files known. Return what `forget` takes.

        Args:
            kind: ``DRAM`` or ``FILE``.
            parts: the stretches.
        """
        rows = [(part.address, part.length, part.device, "") for part in parts]
        return self._agent.register_memory(rows, kind, backends=[self._plugin])

    def forget(self, registered: Any) -> None:
        """Undo `register`."""
        self._agent.deregister_memory(registered, backends=[self._plugin])

    def add(self, metadata: bytes) -> str:
        """Make another agent known. Return its name."""
        return _text(self._agent.add_remote_agent(metadata))

    def remove(self, name: str) -> None:
        """Undo `add`."""
        self._agent.remove_remote_agent(name)

    def transfer(
        self, operation: str, memory: Sequence[Part], kind: str, parts: Sequence[Part], whose: str, timeout: float
    ) -> None:
        """Copy between registered memory and other registered parts, and wait until all of it is done.

        Args:
            operation: ``READ`` into the memory or ``WRITE`` from it.
            memory: the stretches in this process.
            kind: of the others, see `register`.
            parts: the others, of the same lengths.
            whose: name of the agent that has registered them.
            timeout: seconds after which to give up.

        Raises:
            OSError: if it fails. After a timeout NIXL may still write to the memory, if it cannot cancel.
        """
        agent = self._agent
        here, there = (
            agent.get_xfer_descs([tuple(part) for part in some], what)
            for some, what in ((memory, "DRAM"), (parts, kind))
        )
        latest = time.monotonic() + timeout
        try:
            handle = agent.initialize_xfer(operation, here, there, whose, backends=[self._plugin])
            with ExitStack() as stack:
                stack.callback(handle.release)
                state = agent.transfer(handle)
                while state == "PROC":
                    if time.monotonic() > latest:
                        raise TimeoutError(f"a transfer of NIXL's plugin {self._plugin} has not ended in {timeout:g} s")
                    time.sleep(PAUSE)
                    state = agent.check_xfer_state(handle)
        except OSError:
            raise
        except Exception as error:  # of NIXL's own types
            raise OSError(f"NIXL's plugin {self._plugin} failed: {error}") from error
        if state != "DONE":
            raise OSError(f"NIXL's plugin {self._plugin} ended in the state {state}")


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _imported() -> Any:
    """Return NIXL's module, which is kept from writing to the standard output and from silencing other loggers.

    Raises:
        ConfigError: if it is not installed or does not work here.
    """
    others = [one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    enabled, raises = [one for one in others if not one.disabled], logging.raiseExceptions
    try:
        import nixl
    except ImportError as error:
        raise ConfigError(f"NIXL cannot be imported: {error}", fix="pip install 'slotline[nixl]'") from error
    finally:  # its own configuration of logging disables all loggers that there are
        for one in enabled:
            one.disabled = False
        logging.raiseExceptions = raises
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl
