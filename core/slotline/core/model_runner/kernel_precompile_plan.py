"""Dry-run captures that collect the Triton kernels to compile in parallel at start-up.

One part is the attention of eager steps: a backend's launches depend on the number of requests, their tokens and their
pasts. The other part is whole forward passes with the draws after them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial

import torch

from slotline.core.batch.attend import Attend
from slotline.core.batch.model_inputs import ModelInputs, even_split
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, AttentionGroup
from slotline.core.model_runner.graph_capture import Recorder, note_lacking
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.sampling.sampler import made_up_batch, sample
from slotline.kernels import triton_precompile as compiling
from slotline.registry.contracts import AttentionLayer, Device

DECODES = 4
"""Requests with a single token in a batch with a prompt."""


def steps(max_tokens: int, max_requests: int, max_model_len: int) -> Iterator[tuple[list[int], int | None]]:
    """Yield the query tokens of each request, and the tokens that each has with its past, or None for no past.

    The steps are prompts of every power of two alone, after a past and together with single tokens. Then numbers of
    requests with few tokens, as in a verifying step, and with many, and a token after every past. Backends choose
    blocks of queries and splits of keys by these.
    """
    most = min(max_tokens, max_model_len - 1)
    for past in powers_of_two(max_model_len):
        yield [1], past
    for size in powers_of_two(most):
        yield [size], None
        yield [size], max_model_len
        if max_requests > DECODES and size + DECODES <= max_tokens:
            yield [*[1] * DECODES, size], max_model_len
    for count in powers_of_two(min(max_requests, max_tokens)):
        lens = even_split(min(max_tokens, count * most), count)
        yield lens, None
        yield lens, max_model_len
        for size in (1, 2, 4, 8, 16):
            if count * size <= max_tokens:
                yield [size] * count, max_model_len


def powers_of_two(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most`."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def record_launches(
    router: AttentionDispatcher,
    gatherer: InputPreparer,
    dtype: torch.dtype,
    max_tokens: int,
    missing: compiling.MissingKernels,
    device: Device | None = None,
) -> None:
    """Note the kernels that attention lacks for steps of many sizes.

    Args:
        router: its groups whose attention of any step can be captured are recorded. Nothing runs.
        gatherer: makes the steps up.
        dtype: of queries, keys and values.
        max_tokens: most tokens of a step.
        missing: where kernels are noted, see `compiling.leaving_out`.
        device: has graphs.
    """
    groups = [g for g in router.groups if g.any_captured and g.layers[0].attention_type == "decoder"]
    rows = gatherer.rows

    def calls() -> Iterator[Callable[[Recorder], object]]:
        for lens, past in steps(max_tokens, rows.max_requests, rows.max_model_len):
            attend = router.plan(gatherer.dummy(lens, seq_len=past).batches)
            gatherer.assembler.mark()
            yield from (partial(_attend, attend, group, sum(lens), dtype) for group in groups)

    if groups:
        note_lacking(calls(), missing, "attention", replayed=False, device=device)


def draws(num_rows: int, vocab_size: int, device: str) -> Callable[[Recorder], object]:
    """Return the draws from `num_rows` rows of logits, greedily and with all options of a draw, for `note_lacking`."""
    batch = made_up_batch(num_rows, vocab_size)
    params = torch.from_numpy(batch.packed()).to(device)

    def draw(recorder: Recorder) -> None:
        logits = torch.empty(num_rows, vocab_size, device=device)
        sample(logits, batch, params)
        sample(logits, batch, None)

    return draw


def forwards(
    runner: ModelRunner, inputs: Iterable[ModelInputs], broken: Container[str]
) -> Iterator[Callable[[Recorder], object]]:
    """Yield the forward pass of each step with its logits, for `note_lacking`.

    Args:
        runner: without states or pooling, and without an extension that plans.
        inputs: each is planned when it is taken. They may lie in the same memory.
        broken: attention groups whose attention cannot be captured. It is left out.
    """
    for each in inputs:
        runner.plan(each)
        yield partial(_forward, runner, each, broken)


def _forward(runner: ModelRunner, inputs: ModelInputs, broken: Container[str], recorder: Recorder) -> None:
    """Compute a planned step's logits."""
    attend = runner.router.breaking(broken, recorder.cut)
    hidden = runner.forward(inputs, attend, inputs.logits_indices)
    if runner.taps is not None:
        runner.taps.take()
    runner.model.compute_logits(hidden)


def _attend(attend: Attend, group: AttentionGroup, num_tokens: int, dtype: torch.dtype, recorder: Recorder) -> None:
    """Compute one layer's attention of made-up tokens, laid out as merged projections leave them."""
    layer: AttentionLayer = next((one for one in group.layers if one.shares_kv_with is None), group.layers[0])
    heads, size, size_v = layer.num_kv_heads, layer.head_size, layer.head_size_v
    widths = [layer.num_heads * size, heads * size, 0 if layer.mla else heads * size_v]
    merged = torch.empty(num_tokens, sum(widths), dtype=dtype, device=group.device)
    query, key, value = merged.split(widths, 1)
    key = key.unflatten(1, (heads, size))
    value = key[..., :size_v] if layer.mla else value.unflatten(1, (heads, size_v))
    sinks = torch.empty(layer.num_heads, dtype=dtype, device=group.device) if layer.sinks else None
    attend(layer, query.unflatten(1, (layer.num_heads, size)).contiguous(), key, value, sinks)
