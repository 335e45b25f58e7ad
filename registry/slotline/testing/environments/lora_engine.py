"""Small engine for adapters: a random model whose linear modules carry them, and continuous batching over slots.

Requests come and go, and prompts are computed in one step together with single tokens. There are more adapters than
slots, so that they are swapped while other requests continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import define, field, frozen

from slotline.testing.environments.lora import LoraWorld
from slotline.testing.oracles.lora import Adapter

Linear = Callable[[str, torch.Tensor], torch.Tensor]
"""Module path, inputs [num_tokens, in_features] -> outputs [num_tokens, out_features]."""


@frozen
class TextRequest:
    """Prompt and the name of its adapter, or None."""

    prompt: tuple[int, ...]
    adapter: str | None


@define(eq=False)
class TinyModel:
    """Random model.

    A position's state is half of the previous one plus the token's embedding, then each module adds to it.
    """

    world: LoraWorld
    vocab_size: int = 48
    width: int = 32
    embedding: torch.Tensor = field(init=False)
    weights: dict[str, torch.Tensor] = field(init=False)
    into: dict[str, torch.Tensor] = field(init=False)
    out_of: dict[str, torch.Tensor] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.embedding = self._made(self.vocab_size, self.width)
        sizes = self.world.modules.items()
        self.weights = {m: self._made(outer, inner) / inner**0.5 for m, (inner, outer) in sizes}
        self.into = {m: self._made(self.width, inner) / self.width**0.5 for m, (inner, _) in sizes}
        self.out_of = {m: self._made(outer, self.width) / outer**0.5 for m, (_, outer) in sizes}

    def _made(self, *shape: int) -> torch.Tensor:
        return self.world.random(*shape).to(self.world.run.subject.device.type)

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the state of each position, [len(tokens), width]."""
        embedded = self.embedding[list(tokens)]
        state, found = torch.zeros_like(embedded[0]), []
        for one in embedded:
            state = 0.5 * state + one
            found.append(state)
        return torch.stack(found)

    def logits(self, states: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Return [num_tokens, vocab_size] for positions of any requests."""
        for module in self.weights:
            states = states + torch.tanh(linear(module, torch.tanh(states @ self.into[module]))) @ self.out_of[module]
        return states @ self.embedding.T

    def plain(self, request: TextRequest, adapter: Adapter | None, num_tokens: int) -> list[torch.Tensor]:
        """Return the logits of each step of one request's greedy decoding, with the adapter merged into the weights."""
        merged = dict(self.weights)
        for module, (a, b) in ({} if adapter is None else adapter.weights).items():
            assert adapter is not None
            merged[module] = merged[module] + (b.to(merged[module]) @ a.to(merged[module])) * adapter.scale(module)
        tokens, steps = list(request.prompt), list[torch.Tensor]()
        while len(steps) < num_tokens:
            logits = self.logits(self.states(tokens)[-1:], lambda module, inputs: inputs @ merged[module].T)[0]
            steps.append(logits)
            tokens.append(int(logits.argmax()))
        return steps


@define
class AdapterEngine:
    """Continuous batching, first come, first served. A request waits until its adapter has a slot."""

    world: LoraWorld
    model: TinyModel
    adapters: dict[str, Adapter]
    max_requests: int = 4
    swaps: int = 0

    def generate(self, requests: Sequence[TextRequest], num_tokens: int) -> list[list[int]]:
        """Return the greedy text of each request, all generated in mixed batches."""
        texts: list[list[int]] = [[] for _ in requests]
        waiting, running = list(range(len(requests))), list[int]()
        while waiting or running:
            while waiting and len(running) < self.max_requests and self._admit(requests, waiting[0], running):
                running.append(waiting.pop(0))
            self._step(requests, running, texts)
            running = [index for index in running if len(texts[index]) < num_tokens]
        return texts

    def _admit(self, requests: Sequence[TextRequest], index: int, running: Sequence[int]) -> bool:
        """Load the request's adapter, replacing an unused one if necessary."""
        name = requests[index].adapter
        if name is None or name in self.world.loaded:
            return True
        if len(self.world.loaded) == self.world.max_adapters:
            used = {requests[other].adapter for other in running}
            idle = [other for other in self.world.loaded if other not in used]
            if not idle:
                return False
            self.world.unload(idle[0])
            self.swaps += 1
        self.world.load(name, self.adapters[name])
        return True

    def _step(self, requests: Sequence[TextRequest], running: Sequence[int], texts: list[list[int]]) -> None:
        """Run whole prompts of new requests and one token of the others, in one batch."""
        states, names, last = [], list[str | None](), []
        for index in running:
            request = requests[index]
            found = self.model.states([*request.prompt, *texts[index]])
            fresh = found if not texts[index] else found[-1:]
            states.append(fresh)
            names += [request.adapter] * len(fresh)
            last.append(len(names) - 1)
        self.world.plan(names)
        logits = self.model.logits(torch.cat(states), self._linear)
        for index, token in zip(running, logits[last].argmax(dim=-1).tolist(), strict=True):
            texts[index].append(token)

    def _linear(self, module: str, inputs: torch.Tensor) -> torch.Tensor:
        out = inputs @ self.model.weights[module].T
        self.world.lora.apply(module, inputs, out)
        return out
