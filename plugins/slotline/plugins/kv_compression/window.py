"""Attention scores of the last tokens of prompts, kept from the step that computes them to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.kernels.async_copy import to_device
from slotline.registry.contracts import AttentionLayer
from slotline.registry.errors import NegotiationError

Int = npt.NDArray[np.int64]


@frozen(eq=False)
class _Window:
    """Last tokens of a prompt in a step.

    Attributes:
        row: of the request.
        first, end: the tokens' places in the step.
        num_keys: of the request.
        blocks: kernel blocks of the request, by cache group.
    """

    row: int
    first: int
    end: int
    num_keys: int
    blocks: Sequence[torch.Tensor]


class Windows:
    """Asks attention backends for scores, behind the layers' `forward`.

    Args:
        parts: of the engine, with its caches.
        size: last tokens of a prompt.
        layers: that own caches, by cache group.

    Attributes:
        scores: by row, then by the layer's index: [num_keys, num_kv_heads] float32.
    """

    def __init__(self, parts: Parts, size: int, layers: Sequence[Sequence[AttentionLayer]]) -> None:
        self.size, self._groups = size, parts.groups
        self.scores: dict[int, dict[int, torch.Tensor]] = {}
        self._open: list[_Window] = []
        scheduler = parts.planned.loaded.config.scheduler
        if size + scheduler.max_requests > scheduler.max_batched_tokens:
            raise NegotiationError(
                f"scheduler.max_batched_tokens = {scheduler.max_batched_tokens} has no room for the last {size} tokens "
                f"of a prompt beside one token of each of {scheduler.max_requests} requests",
                fix=f"raise it to {size + scheduler.max_requests}, or lower scheduler.max_requests",
            )
        if scheduler.microbatches > 1:
            raise NegotiationError(
                f"scheduler.microbatches = {scheduler.microbatches}: the last {size} tokens of a prompt, whose "
                "attention scores are read, may be in two pieces of a step",
                fix="set it to 1, or choose a method without scores in [extensions.kv_compression]",
            )
        router = parts.router
        assert router is not None  # the caches are there
        for group, own in enumerate(layers):
            for layer in own:
                write, forward, cache, position = router.routes[layer.index]
                scores = router.groups[position].backend.attention_scores  # type: ignore[attr-defined]  # negotiated
                watched = partial(self._forward, group, scores, forward)
                router.routes[layer.index] = write, watched, cache, position

    def begin(self, inputs: ModelInputs, ending: Int) -> None:
        """Note the requests `ending` [n] of a step whose prompts end in it. Its forward pass comes next."""
        starts = inputs.query_start_loc_cpu
        self._open = []
        for at in ending.tolist():
            row, end = int(inputs.rows[at]), int(starts[at + 1])
            blocks = [
                to_device(group.kernel_blocks(group.blocks[row]).astype(np.int64), inputs.positions.device)
                for group in self._groups
            ]
            first = max(int(starts[at]), end - self.size)
            self._open.append(_Window(row, first, end, int(inputs.seq_lens_cpu[at]), blocks))
            self.scores[row] = {}

    def restore(self) -> None:
        """Forget all requests."""
        self.scores.clear()
        self._open = []

    def _forward(
        self,
        group: int,
        scores: Any,
        forward: Any,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: Any,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        """Compute a layer's attention, and then the scores of the step's prompts that end."""
        returned = forward(layer, query, key, value, cache, plan, out, sinks, **more)
        for one in self._open:
            given = query[one.first : one.end], cache, one.blocks[group], one.num_keys, sinks
            self.scores[one.row][layer.index] = scores(layer, *given)
        return returned
