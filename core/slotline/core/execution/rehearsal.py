"""Attention of steps that no graph holds, recorded and dropped, so that kernels are compiled before a request waits.

What a backend launches depends on how many tokens each request has, how many have a past, and how many there are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from slotline.core.execution import compiling
from slotline.core.execution.attention import Attend, AttentionGroup, AttentionRouter
from slotline.core.execution.capturing import Capturing, Recorder
from slotline.core.execution.inputs import InputGatherer
from slotline.core.execution.step_inputs import even_split
from slotline.registry.contracts import AttentionLayer

logger = logging.getLogger("slotline")
DECODES = 4
"""Requests with a single token that stand beside a prompt."""


def steps(max_tokens: int, max_requests: int, max_model_len: int) -> Iterator[tuple[list[int], int | None]]:
    """Query tokens of each request, and tokens that each has with its past; None for no past.

    Prompts of every power of two alone, behind a past and beside single tokens, as many requests of a few tokens, as a
    verifying step has, and of many, and a token behind every past: backends choose blocks of queries and splits of keys
    by these.
    """
    most = min(max_tokens, max_model_len - 1)
    for past in _powers_of_two(max_model_len):
        yield [1], past
    for size in _powers_of_two(most):
        yield [size], None
        yield [size], max_model_len
        if max_requests > DECODES and size + DECODES <= max_tokens:
            yield [*[1] * DECODES, size], max_model_len
    for count in _powers_of_two(min(max_requests, max_tokens)):
        lens = even_split(min(max_tokens, count * most), count)
        yield lens, None
        yield lens, max_model_len
        for size in (1, 2, 4, 8, 16):
            if count * size <= max_tokens:
                yield [size] * count, max_model_len


def _powers_of_two(most: int) -> list[int]:
    """Up to `most`, and `most`."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


@torch.inference_mode()
def rehearse(
    router: AttentionRouter,
    gatherer: InputGatherer,
    dtype: torch.dtype,
    max_tokens: int,
    missing: dict[tuple[int, str], compiling.Missing],
) -> None:
    """Note the kernels that attention lacks for steps of many sizes.

    Args:
        router: its groups whose attention of any step can be captured are recorded; nothing runs.
        gatherer: makes the steps up.
        dtype: of queries, keys and values.
        max_tokens: most tokens of a step.
        missing: where kernels are noted, see `compiling.leaving_out`.
    """
    groups = [g for g in router.groups if g.any_captured and g.layers[0].attention_type == "decoder"]
    rows = gatherer.rows
    if not groups:
        return
    with Capturing("report this") as capturing:
        dropped: list[Recorder] = []  # the pool lasts as long as one of its graphs
        try:
            for lens, past in steps(max_tokens, rows.max_requests, rows.max_model_len):
                attend = router.plan(gatherer.dummy(lens, seq_len=past).batches)
                gatherer.assembler.mark()
                for group in groups:
                    dropped.append(Recorder(capturing.pool, [], replayed=False))
                    with compiling.leaving_out(missing):
                        _record(dropped[-1], attend, group, sum(lens), dtype)
        except Exception as error:  # whatever a backend raises at a step that it may never see
            logger.info("attention's kernels are not all compiled ahead: %s", error)
        dropped.clear()
    torch.cuda.empty_cache()


def _record(recorder: Recorder, attend: Attend, group: AttentionGroup, num_tokens: int, dtype: torch.dtype) -> None:
    """Capture one layer's attention; the capture ends whatever happens."""
    recorder.begin()
    try:
        _attend(attend, group, num_tokens, dtype)
    except Exception:
        recorder.give_up()
        raise
    recorder.end()


def _attend(attend: Attend, group: AttentionGroup, num_tokens: int, dtype: torch.dtype) -> None:
    """One layer's attention of made-up tokens, which lie as merged projections leave them."""
    layer: AttentionLayer = next((one for one in group.layers if one.shares_kv_with is None), group.layers[0])
    heads, size, size_v = layer.num_kv_heads, layer.head_size, layer.head_size_v
    widths = [layer.num_heads * size, heads * size, 0 if layer.mla else heads * size_v]
    merged = torch.empty(num_tokens, sum(widths), dtype=dtype, device=group.device)
    query, key, value = merged.split(widths, 1)
    key = key.unflatten(1, (heads, size))
    value = key[..., :size_v] if layer.mla else value.unflatten(1, (heads, size_v))
    sinks = torch.empty(layer.num_heads, dtype=dtype, device=group.device) if layer.sinks else None
    attend(layer, query.unflatten(1, (layer.num_heads, size)).contiguous(), key, value, sinks)
