"""A subscriber to KV events that knows only vLLM's protocol: it rebuilds the blocks that are cached."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq


class Subscriber:
    """Reads batches, checks their numbers, and keeps what they say of each block.

    `blocks` has, by group and hash, the hash before, the tokens and the adapter.
    """

    def __init__(self, endpoint: str, replay: str, topic: str = "") -> None:
        self._sub = zmq.Context.instance().socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.subscribe(topic)
        self._replay = replay
        self.blocks: dict[tuple[int, Any], tuple[Any, list[int], Any]] = {}
        self.next = 0
        self.names: list[str] = []
        self.replicas: set[int] = set()

    def read(self) -> None:
        """Read what has come, and ask for what was missed before the first of it."""
        while self._sub.poll(200):
            _, number, payload = self._sub.recv_multipart()
            if (which := int.from_bytes(number, "big")) > self.next:
                self.ask_again(self.next)
            if which >= self.next:
                self._take(which, payload)

    def ask_again(self, first: int) -> list[int]:
        """Take the batches from a number on. Return their numbers."""
        asks = zmq.Context.instance().socket(zmq.DEALER)
        asks.connect(self._replay)
        asks.send_multipart([b"", first.to_bytes(8, "big")])
        numbers = list[int]()
        while asks.poll(5000):
            _, number, payload = asks.recv_multipart()
            if (which := int.from_bytes(number, "big", signed=True)) == -1:
                assert payload == b""
                break
            numbers.append(which)
            if which >= self.next:
                self._take(which, payload)
        else:
            raise AssertionError("a replay has no end")
        asks.close(linger=0)
        return numbers

    def close(self) -> None:
        self._sub.close(linger=0)

    def _take(self, number: int, payload: bytes) -> None:
        assert number == self.next, "a batch is lost"
        self.next += 1
        ts, events, replica = msgspec.msgpack.decode(payload)
        assert ts > 1e9
        self.replicas.add(replica)
        for name, *values in events:
            self.names.append(name)
            getattr(self, name)(*values)

    def BlockStored(  # noqa: N802
        self, hashes: list[Any], parent: Any, tokens: list[int], size: int, lora_id: Any, medium: str, lora_name: Any,
        extra_keys: None, group: int | None,
    ) -> None:  # fmt: skip
        assert medium == "GPU"
        assert len(tokens) == len(hashes) * size
        assert (lora_id is None) == (lora_name is None)
        for place, one in enumerate(hashes):
            assert (group or 0, one) not in self.blocks, "a block is stored twice"
            self.blocks[group or 0, one] = parent, tokens[place * size : (place + 1) * size], lora_name
            parent = one

    def BlockRemoved(self, hashes: list[Any], medium: str, group: int | None) -> None:  # noqa: N802
        assert medium == "GPU"
        for one in hashes:
            del self.blocks[group or 0, one]

    def AllBlocksCleared(self) -> None:  # noqa: N802
        self.blocks.clear()

    def prefix(self, hash_of_last: Any, group: int = 0) -> list[int]:
        """Return the tokens of a prefix, as far as its blocks are cached."""
        found: list[int] = []
        one = hash_of_last
        while one is not None and (group, one) in self.blocks:
            one, tokens, _ = self.blocks[group, one]
            found = tokens + found
        return found
