"""Dry-run captures that collect the kernels to compile in parallel at start-up.

One part is the attention of eager steps: a backend's launches depend on the number of requests, their tokens and their
pasts. Another part is whole forward passes with the draws after them. The last are operations that few steps need.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from slotline.builder.graph_capture import Recorder, breaking, note_lacking
from slotline.builder.made_up import made_up_inputs
from slotline.builder.sampling_profile import made_up_batch
from slotline.core.batch.attend import Attend
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, AttentionGroup
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.sampling.sampler import sample_checked
from slotline.registry.contracts import AttentionLayer, Device, DeviceOps, MissingKernels


def record_launches(
    router: AttentionDispatcher,
    gatherer: InputPreparer,
    dtype: torch.dtype,
    steps: Iterable[tuple[Sequence[int], int | None]],
    missing: MissingKernels,
    device: Device | None = None,
) -> None:
    """Note the kernels that attention lacks for steps of many sizes.

    Args:
        router: its groups whose attention of any step can be captured are recorded. Nothing runs.
        gatherer: makes the steps up.
        dtype: of queries, keys and values.
        steps: query tokens of each request, and the tokens that each has with its past, as `KernelCompiler.steps`.
        missing: where kernels are noted.
        device: has graphs.
    """
    groups = [g for g in router.groups if g.any_captured and g.layers[0].attention_type == "decoder"]

    def calls() -> Iterator[Callable[[Recorder], object]]:
        for lens, past in steps:
            attend = router.plan(made_up_inputs(gatherer, lens, seq_len=past).batches)
            gatherer.assembler.mark()
            yield from (partial(_attend, attend, group, sum(lens), dtype) for group in groups)

    if groups:
        note_lacking(calls(), missing, "attention", replayed=False, device=device)


def draws(num_rows: int, vocab_size: int, device: str, ops: DeviceOps) -> Callable[[Recorder], object]:
    """Return the draws from `num_rows` rows of logits, greedily and with all options of a draw, for `note_lacking`."""
    batch = made_up_batch(num_rows, vocab_size)
    params = torch.from_numpy(batch.packed()).to(device)

    def draw(recorder: Recorder) -> None:
        logits = torch.empty(num_rows, vocab_size, device=device)
        sample_checked(logits, batch, params, ops)
        sample_checked(logits, batch, None, ops)

    return draw


def rare_operations(vocab_size: int, device: str, ops: DeviceOps) -> None:
    """Call, for one row, the operations that only steps with grammars or logits processors use."""
    logits, tokens = torch.zeros(1, vocab_size, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    places = torch.zeros(1, dtype=torch.int32, device=device)
    words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    ops.apply_bitmask(logits, words, places, in_place=True)
    for touched, all_greedy in product((None, torch.ones(1, dtype=torch.bool, device=device)), (False, True)):
        ops.mark_unusable(logits, logits, touched, tokens, not_finite=-2, none_left=-3, all_greedy=all_greedy)


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
    """Compute a planned step's logits, if the runner samples."""
    attend, wanted = breaking(runner.router, broken, recorder.cut), runner.head.wanted(inputs)
    hidden = runner.forward(inputs, attend, wanted)
    runner.extensions.results()
    if wanted is not None:
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
    more: dict[str, Any] = {}
    if layer.inputs:
        more["inputs"] = {
            each.name: torch.empty(
                num_tokens, *each.shape, dtype=getattr(torch, each.dtype) if each.dtype else dtype, device=group.device
            )
            for each in layer.inputs
        }
    attend(layer, query.unflatten(1, (layer.num_heads, size)).contiguous(), key, value, sinks, **more)
