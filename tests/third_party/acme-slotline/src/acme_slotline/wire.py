"""Communicator over sockets: a connection between each two ranks, and a thread that reads from each."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch.distributed import distributed_c10d

from slotline.registry.contracts import CommunicatorContext
from slotline.registry.errors import CollectiveError


class WireExchange:
    """Exchange whose parts are read when it is finished."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def finish(self) -> torch.Tensor:
        return self._read()


class Wire:
    """Group of ranks. Parts that arrive early wait under their call's number."""

    def __init__(self, context: CommunicatorContext) -> None:
        self.rank, self.size, self._context = context.rank, len(context.ranks), context
        self._calls, self._aborted = 0, False
        self._letters: dict[tuple[int, int], int] = {}
        self._arrived: dict[tuple[int, Any], Any] = {}
        self._news = threading.Condition()
        self._peers = self._connected()
        for rank, peer in self._peers.items():
            threading.Thread(target=self._read, args=(rank, peer), daemon=True).start()

    def _connected(self) -> dict[int, Connection]:
        """Connect each rank with those before it."""
        store: Any = distributed_c10d._get_default_store()
        place = f"acme_wire/{self._context.name}/{self._context.ranks}"
        place = f"{place}/{store.add(f'{place}/{self.rank}', 1)}"  # one of the same name may have been closed
        peers: dict[int, Connection] = {}
        with Listener(("", 0), backlog=self.size) as listener:
            port = listener.address[1]  # type: ignore[misc]
            store.set(f"{place}/{self.rank}", pickle.dumps((socket.gethostname(), port)))
            for rank in range(self.rank):
                host, port = pickle.loads(store.get(f"{place}/{rank}"))
                peers[rank] = Client(("127.0.0.1" if host == socket.gethostname() else host, port))
                peers[rank].send(self.rank)
            while len(peers) < self.size - 1:
                peer = listener.accept()
                peers[peer.recv()] = peer
        return peers

    def _read(self, rank: int, peer: Connection) -> None:
        with suppress(EOFError, OSError, TypeError):
            while True:
                key, value = pickle.loads(peer.recv_bytes())
                self._arrive(rank, key, value)

    def _arrive(self, rank: int, key: Any, value: Any) -> None:
        with self._news:
            self._arrived[rank, key] = value
            self._news.notify_all()

    def _give(self, rank: int, key: Any, value: Any) -> None:
        if rank == self.rank:
            self._arrive(rank, key, value)
        else:
            self._peers[rank].send_bytes(pickle.dumps((key, value)))

    def _take(self, rank: int, key: Any, what: str) -> Any:
        until = time.monotonic() + self._context.timeout
        with self._news:
            while (rank, key) not in self._arrived:
                if self._aborted or not self._news.wait(until - time.monotonic()):
                    why = "was aborted" if self._aborted else f"has waited {self._context.timeout:g} s"
                    raise CollectiveError(
                        f"acme_wire: {what} in group {self._context.name!r} {why} for rank {rank}",
                        fix="see what this rank says, or raise parallel.timeout",
                    )
            return self._arrived.pop((rank, key))

    def _start(self, parts: Sequence[torch.Tensor]) -> int:
        """Give each rank its part of the next call."""
        self._calls += 1
        for rank in range(self.size):
            self._give(rank, self._calls, parts[rank].clone())
        return self._calls

    def _gather(self, parts: Sequence[torch.Tensor], what: str) -> list[torch.Tensor]:
        call = self._start(parts)
        return [self._take(rank, call, what) for rank in range(self.size)]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return _sum(self._gather([x] * self.size, "all_reduce"))

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(self._gather([x] * self.size, "all_gather"), dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return _sum(self._gather(x.tensor_split(self.size), "reduce_scatter"))

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> WireExchange:
        call = self._start(x.split(list(sent)))
        return WireExchange(lambda: torch.cat([self._take(rank, call, "all_to_all") for rank in range(self.size)]))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._gather([x] * self.size, f"broadcast from {source}")[source]

    def send(self, x: torch.Tensor, to: int) -> None:
        self._give(to, self._letter(self.rank, to), x)

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        found: torch.Tensor = self._take(source, self._letter(source, self.rank), f"receive from {source}")
        return found

    def _letter(self, source: int, to: int) -> str:
        number = self._letters[source, to] = self._letters.get((source, to), 0) + 1
        return f"letter {number}"

    def abort(self) -> None:
        with self._news:
            self._aborted = True
            self._news.notify_all()

    def close(self) -> None:
        for peer in self._peers.values():
            with suppress(OSError):
                peer.close()


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add up in order of the ranks, and round once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
