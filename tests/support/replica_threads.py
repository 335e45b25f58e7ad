"""Replicas as threads of the test's process: the same programs and messages, without the start of processes."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from slotline.core.engine.engine import Engine
from slotline.ranks.replicas import front, replica, replica_front
from slotline.ranks.replicas.replica import serve
from slotline.ranks.replicas.replica_links import ReplicaLinks
from slotline.ranks.start import start_engine
from slotline.registry.config import LoadedConfig

BUILDING = threading.Lock()
"""Held while a thread loads a model: transformers' loading is for one thread at a time."""


@define(eq=False)
class ReplicaThreads:
    """What stands for the processes of replicas."""

    threads: list[threading.Thread] = field(factory=list)

    def ended(self) -> None:
        """No thread ends before it has connected."""

    def exit_of(self, index: int) -> str | None:
        return None if self.threads[index].is_alive() else "exit code 0"

    def pid_of(self, index: int) -> int:
        return os.getpid()

    def end(self, patience: float = 0.0) -> None:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


def start_thread(loaded: LoadedConfig, number: int, address: str) -> Any:
    """Start the program of a replica on a thread."""
    place, key = pickle.loads(bytes.fromhex(address))
    run = partial(_serve, place, key, number)
    thread = threading.Thread(target=run, name=f"replica-{number}", daemon=True)
    thread.start()
    return ReplicaThreads([thread])


def _serve(address: str, key: bytes, number: int) -> None:
    with Client(address, authkey=key) as connection:
        serve(connection, number)


def _built_alone(loaded: LoadedConfig, first: int) -> Engine:
    """Build an engine while no other thread does."""
    with BUILDING:
        return start_engine(loaded, first)


def reload_alone(engine: Engine, path: Path | None) -> None:
    """Read weights while no other thread does."""
    with BUILDING:
        engine.reload_weights(path)


@contextmanager
def replicas_as_threads() -> Iterator[None]:
    """Have replicas that are started meanwhile run as threads of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "ReplicaLinks", partial(ReplicaLinks, start=start_thread))
        patch.setattr(replica, "start_engine", _built_alone)
        patch.setattr(replica_front, "_reload", reload_alone)
        yield
