"""Extension that keeps a part of each request's tokens in the cache.

A prompt is compressed between the step that computes its last tokens and the next one, in each layer and KV head by
itself. No step computes tokens beyond such a place together with tokens before it. So a request that was preempted
frees the same tokens when it is computed again, and its text does not depend on when steps end.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve

from slotline.builder.freed_tokens import Move, freed_tokens
from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.kernels.async_copy import to_device
from slotline.plugins.kv_compression import CompressionOptions
from slotline.plugins.kv_compression.window import Windows
from slotline.registry.contracts import AttentionLayer, ExtensionContext, KVCache, KVCompressor, KVCompressorContext
from slotline.registry.errors import ConfigError, PluginError
from slotline.registry.loading import typed_failures

Int = npt.NDArray[np.int64]
UNLIMITED = np.iinfo(np.int64).max // 2


class KVCompression:
    """Frees the tokens that a method finds to matter least."""

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        assert parts.router is not None  # the caches are there
        freed = freed_tokens(parts.groups)
        assert freed is not None  # negotiated
        self._rows, self._freed = parts.rows, freed
        self._options: CompressionOptions = context.options
        self._layers = [
            [layer for layer in group.layers if layer.shares_kv_with is None]
            for group in parts.planned.plan.cache_groups
        ]
        self._caches: dict[int, KVCache] = {
            layer.index: parts.router.routes[layer.index][2] for layers in self._layers for layer in layers
        }
        self.method = method_of(self._options, tuple(layer for layers in self._layers for layer in layers))
        freed.window = max(1, self.method.window)
        self.windows = Windows(parts, self.method.window, self._layers) if self.method.window else None
        self._done = np.zeros(context.max_requests, bool)  # rows whose prompt is compressed
        self._waits = np.zeros(context.max_requests, bool)  # rows that lack blocks to be compressed
        self._again: list[Request] = []

    def before_schedule(self, rows: Int) -> Sequence[tuple[int, Exception]]:
        """Compress the rows that are due: the last steps that compute their tokens have been launched."""
        self._waits[:] = False
        computed, held = self._computed(rows), self._held(rows)
        due = (computed >= self._rows.num_prompt_tokens[rows]) & ~self._done[rows]
        if self._options.interval:
            due |= self._done[rows] & (held >= self._limit)
        for row in rows[due].tolist():
            self._waits[row] = not self._compress(row)
        if self._waits[rows].any():  # others hold its blocks: the last one to run gives them back
            self._again = [self._rows.request(int(rows[-1]))]
        return ()

    def requeue(self) -> Sequence[Request]:
        """Return a request that gives way, so that another one can be compressed."""
        given, self._again = self._again, []
        return given

    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        """Let no step go beyond the place at which a row is compressed next."""
        left = self._rows.num_prompt_tokens[rows] - self._computed(rows)
        further = self._limit - self._held(rows) if self._options.interval else UNLIMITED
        room = np.where(left > 0, left, further)
        room[self._waits[rows]] = 0
        return np.minimum(counts, room)

    def limit_prompt(self, request: Request, computed: int, count: int) -> int:
        """Let the first step of a request end with its prompt, also if it was preempted and has more tokens."""
        length = len(request.prompt_token_ids)
        count = min(count, length - computed)
        return int(self._whole_windows(np.array([length]), np.array([computed]), np.array([count]))[0])

    def trim_tokens(self, rows: Int, counts: Int) -> Int:
        """Let the last tokens of a prompt, whose scores are read, be computed in one step."""
        if self.windows is None:
            return counts
        return self._whole_windows(self._rows.num_prompt_tokens[rows], self._computed(rows), counts)

    def needs_eager(self, scheduled: SchedulerOutput) -> bool:
        """Return True for a step in which a prompt ends whose scores are read."""
        return self.windows is not None and bool(len(self._ending(scheduled.rows, scheduled.num_scheduled)))

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Have the last layer compute all tokens of a step whose scores are read."""
        if self.windows is None or inputs.made_up or inputs.wanted is None:
            return inputs
        return evolve(inputs, wanted=None) if len(self._ending(inputs.rows, inputs.num_scheduled)) else inputs

    def plan(self, inputs: ModelInputs) -> None:
        """Note the requests of a step whose scores are read."""
        if self.windows is not None:
            ending = self._ending(inputs.rows, inputs.num_scheduled) if not inputs.made_up else np.zeros(0, np.int64)
            self.windows.begin(inputs, ending)

    def unschedule(self, request: Request) -> None:
        """Forget what a request has freed: it has lost its blocks."""
        if request.row >= 0:
            self._done[request.row] = False
            if self.windows is not None:
                self.windows.scores.pop(request.row, None)

    def restore(self, requests: Sequence[Request]) -> None:
        """Forget all requests: none has blocks."""
        self._done[:] = self._waits[:] = False
        self._again = []
        if self.windows is not None:
            self.windows.restore()

    @property
    def _limit(self) -> int:
        """The tokens in the cache at which a running request is compressed again."""
        return self._options.most + self._options.interval

    def _computed(self, rows: Int) -> Int:
        computed: Int = self._rows.num_computed_tokens[rows]
        return computed

    def _held(self, rows: Int) -> Int:
        """Return the tokens [n] that the slots of rows hold."""
        held: Int = self._computed(rows) - self._freed.count[rows]
        return held

    def _whole_windows(self, lengths: Int, computed: Int, counts: Int) -> Int:
        """Return the tokens of each request in a step, so that the last ones of a prompt are computed in one step.

        Args:
            lengths, computed, counts: [n] int64, tokens of each prompt, those that are computed, and those of the step.
        """
        if self.windows is None:
            return counts
        before = np.maximum(lengths - self.windows.size, 0) - computed  # tokens before the last ones
        apart = (before >= 0) & (counts > before) & (computed + counts < lengths)
        return np.where(apart, before, counts)

    def _ending(self, rows: Int, counts: Int) -> Int:
        """Return the positions in `rows` [n] whose prompt ends in a step of `counts` [n] tokens, before its launch."""
        computed, lengths = self._computed(rows), self._rows.num_prompt_tokens[rows]
        ending: Int = np.flatnonzero((computed < lengths) & (computed + counts >= lengths))
        return ending

    def _compress(self, row: int) -> bool:
        """Free tokens of a row that is due. Return False, with nothing done, if it lacks blocks to keep the others."""
        computed = int(self._rows.num_computed_tokens[row])
        held = computed - int(self._freed.count[row])
        kept = kept_of(held, self._options, again=bool(self._done[row]))
        moves = self._freed.keep(row, computed, kept)
        if moves is None:
            return False
        self._done[row] = True
        scores = {} if self.windows is None else self.windows.scores.pop(row, {})
        for layers, move in zip(self._layers, moves, strict=bool(moves)):
            for layer in layers:
                self._move(layer, move, held, kept, scores.get(layer.index))
        return True

    @torch.inference_mode()
    def _move(self, layer: AttentionLayer, move: Move, held: int, kept: int, scores: torch.Tensor | None) -> None:
        """Put the tokens of a layer that stay into their places."""
        cache = self._caches[layer.index]
        sources = to_device(move.sources.astype(np.int64), cache.key.device)
        targets = to_device(move.targets.astype(np.int64), cache.key.device)
        keys, values = (each[sources].flatten(0, 1)[:held] for each in cache)  # [held, num_kv_heads, size], copies
        with typed_failures(f"compression method {self._options.method!r}", "choose another method"):
            importance = self.method.importance(layer, keys, values, scores)
        if importance.shape != keys.shape[:2]:
            raise PluginError(
                f"compression method {self._options.method!r}: importance gave {list(importance.shape)}, expected "
                f"{list(keys.shape[:2])}",
                fix="tell the author of the method, or choose another",
            )
        chosen = most_important(importance, kept, self._options.first, self._options.last)  # [kept, num_kv_heads]
        size = cache.key.shape[1]
        places = torch.arange(kept, device=chosen.device)
        blocks, offsets = targets[places // size], places % size
        for each, tokens in zip(cache, (keys, values), strict=True):
            _bytes(each)[blocks, offsets] = _bytes(tokens).gather(
                0, chosen[:, :, None].expand(-1, -1, _bytes(tokens).shape[2])
            )


def kept_of(held: int, options: CompressionOptions, *, again: bool) -> int:
    """Return the tokens that stay of those that a request holds.

    Args:
        held: tokens in the cache: the prompt's, or those after it too.
        options: of the extension.
        again: whether its prompt was compressed before.
    """
    kept = options.most if again else ceil(options.keep * held)
    if options.most:
        kept = min(kept, options.most)
    return min(held, max(kept, options.first + options.last, 1))


def most_important(importance: torch.Tensor, kept: int, first: int, last: int) -> torch.Tensor:
    """Return the tokens that stay, in ascending order: [kept, num_kv_heads] int64.

    Args:
        importance: [num_tokens, num_kv_heads] float32.
        kept: how many, `first + last` at least unless there are fewer tokens.
        first: tokens at the start that stay in any case.
        last: tokens at the end that stay in any case.
    """
    fixed = torch.zeros(len(importance), dtype=torch.bool, device=importance.device)
    fixed[:first] = True
    fixed[max(0, len(importance) - last) :] = True
    ranked = importance.float().nan_to_num(nan=-torch.inf).masked_fill(fixed[:, None], torch.inf)
    return ranked.topk(kept, dim=0).indices.sort(dim=0).values


def method_of(options: CompressionOptions, layers: tuple[AttentionLayer, ...]) -> KVCompressor:
    """Build the method that the options name.

    Raises:
        PluginLoadError: if there is none of that name, or it cannot be imported.
        PluginError: if it cannot be built.
        ConfigError: if scores are read where there are none.
    """
    factory = options.factory
    with typed_failures(f"compression method {options.method!r}", "correct its options, or choose another method"):
        method: KVCompressor = factory(KVCompressorContext(layers=layers, options=options.options))
    if method.window and options.interval:
        raise ConfigError(
            f"interval = {options.interval} beside method = {options.method!r}, which reads the scores of a prompt's "
            "last tokens",
            fix="leave interval out, or choose a method without scores",
        )
    return method


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as bytes if its elements have one byte: not every operation knows all such dtypes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
