"""Traffic over slots of real memory: requests compute prompts, leave checkpoints and continue from those of others."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from attrs import define

from slotline.registry.contracts import BlockHash
from slotline.testing.check import Failed
from slotline.testing.environments.state_rules import Requests, keeps, stops
from slotline.testing.environments.state_spec import Held

NUM_ROWS, NUM_CHECKPOINTS = 3, 5


@define(eq=False)
class Request:
    """Request in its row. It generates the tokens that follow its prompt in `tokens`."""

    row: int
    tokens: list[int]
    prompt: int
    hashes: list[BlockHash]
    branch: int
    computed: int = 0
    steps: int = 0

    def num_units(self, unit: int) -> int:
        """Return the whole units of the prompt, short of its last token."""
        return (self.prompt - 1) // unit


class StateTraffic:
    """Slots of one layer, rows first, whose numbers represent the prefix that a state covers.

    Args:
        held: the spec, with the rules and the memory.
        device: device type.
    """

    def __init__(self, held: Held, device: str) -> None:
        self.held = held
        self.requests: list[Request] = []
        self.hits = 0
        num_slots = NUM_ROWS + NUM_CHECKPOINTS
        layer = held.layers[0]
        raw = torch.zeros(num_slots, held.spec.page_bytes(layer), dtype=torch.uint8, device=device)
        self._tensors = list(held.spec.bind(raw, layer, num_slots).values())
        self._slot_of: OrderedDict[BlockHash, int] = OrderedDict()
        self._free = list(range(NUM_ROWS, num_slots))
        self._seen: set[BlockHash] = set()

    def admit(self, tokens: list[int], prompt: int) -> None:
        """Give a request a row. It continues from the longest prefix whose state is kept."""
        unit, row = self.held.unit, min(set(range(NUM_ROWS)) - {request.row for request in self.requests})
        hashes = hashes_of(tokens, unit)
        own = hashes[: (prompt - 1) // unit]
        branch = next((n for n, block_hash in enumerate(own) if block_hash not in self._seen), len(own)) * unit
        request = Request(row, tokens, prompt, hashes, branch)
        self._seen.update(own)
        hit = self.held.spec.prefix_hit(own, self._slot_of.__contains__)
        if hit:
            self._copy(self._slot_of[own[hit - 1]], row)
            request.computed, self.hits = hit * unit, self.hits + 1
        self.requests.append(request)

    def step(self, rng: Random) -> None:
        """Compute some tokens of each request, then keep the states at positions where one is wanted.

        Raises:
            Failed: if a request does not advance, or its state is not that of its tokens.
        """
        unit = self.held.unit
        ends = [self._end(request, rng) for request in self.requests]
        asked = Requests(
            *(
                np.array(column, np.int64)
                for column in (
                    [request.computed for request in self.requests],
                    ends,
                    [request.num_units(unit) * unit for request in self.requests],
                    [request.branch for request in self.requests],
                )
            )
        )
        found = stops(self.held, asked)
        for index, request in enumerate(self.requests):
            if not request.computed < found[index] <= ends[index]:
                raise Failed(f"stops is {found[index]}: {asked.describe(index)}")
            self._advance(request, int(found[index]))
        for request, wanted in zip(self.requests, keeps(self.held, found, asked).tolist(), strict=True):
            if wanted:
                self._keep(request)
        self.requests = [request for request in self.requests if request.computed < len(request.tokens)]

    def _end(self, request: Request, rng: Random) -> int:
        if request.computed >= request.prompt:
            return request.computed + 1
        return min(request.computed + rng.choice((1, self.held.unit, 5 * self.held.unit + 3, 10000)), request.prompt)

    def _advance(self, request: Request, stop: int) -> None:
        if request.computed:
            self._expect(request)
        number = number_of(request.tokens[:stop])
        for tensor in self._tensors:
            tensor[request.row].fill_(number)
        request.computed = stop
        request.steps += 1

    def _expect(self, request: Request) -> None:
        wanted = number_of(request.tokens[: request.computed])
        for tensor in self._tensors:
            if bool((tensor[request.row] != wanted).any()):
                raise Failed(
                    f"the state in row {request.row} is not that of the {request.computed} tokens that are computed, "
                    f"with units of {self.held.unit} and a prompt of {request.prompt}"
                )

    def _keep(self, request: Request) -> None:
        block_hash = request.hashes[request.computed // self.held.unit - 1]
        if block_hash in self._slot_of:
            return
        slot = self._free.pop() if self._free else self._slot_of.popitem(last=False)[1]
        self._copy(request.row, slot)
        self._slot_of[block_hash] = slot

    def _copy(self, source: int, target: int) -> None:
        for tensor in self._tensors:
            tensor[target].copy_(tensor[source])


def number_of(tokens: Sequence[int]) -> int:
    """Return a number from 1 to 97 that represents a prefix, exact in every dtype."""
    return zlib.crc32(repr(list(tokens)).encode()) % 97 + 1


def hashes_of(tokens: Sequence[int], unit: int) -> list[BlockHash]:
    """Return the chained hashes of the whole units."""
    found, before = [], b""
    for first in range(0, len(tokens) // unit * unit, unit):
        before = zlib.crc32(before + repr(list(tokens[first : first + unit])).encode()).to_bytes(4, "little")
        found.append(before)
    return found
