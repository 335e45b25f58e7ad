"""Made-up steps, for profiling, warm-up and the capture of graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.input_batch_cpu import PAD_SLOT, InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.registry.contracts.prefix_groups import StepPrefixes


def made_up_inputs(
    preparer: InputPreparer,
    query_lens: Sequence[int],
    *,
    seq_len: int | None = None,
    vocab_size: int = 1,
    shape: GraphShape | None = None,
    prefixes: StepPrefixes | None = None,
    variant: int = 0,
    beginning: bool = False,
) -> ModelInputs:
    """Make up inputs of the given shape that write to no block, for profiling, warm-up and capture.

    State layers write the first slots, so that their work is measured too: no request may live then.

    Args:
        query_lens: tokens of each made-up request.
        seq_len: tokens that each request has in the cache, by default those of its own query.
        vocab_size: token ids are drawn below it, the same in each call, so that a mixture of experts meets all of
            them. 1 gives only token 0.
        shape, prefixes: as in `InputPreparer.gather`.
        variant: of the forward pass.
        beginning: whether all requests begin, so that groups with a fixed number of keys store the most possible.
    """
    counts = np.asarray(query_lens, np.int64)
    num_tokens = int(counts.sum())
    seq_lens = counts if seq_len is None else np.maximum(counts, seq_len)
    rows = np.zeros(len(counts), np.int64)
    num_keys = len(counts) * preparer.max_fixed_len if beginning else 0
    mixed = shape is not None and shape.num_requests > 0
    _, positions, starts = preparer.expand(rows, counts, seq_lens - counts, num_tokens)
    host = InputBatchCPU(
        rows=rows,
        table_rows=np.full(len(counts), preparer.rows.max_requests),
        counts=counts,
        starts=starts,
        seq_lens=seq_lens,
        fixed_lens=np.full(len(counts), preparer.max_fixed_len),
        input_ids=np.random.default_rng(0).integers(0, vocab_size, num_tokens),
        positions=positions,
        slots=[np.full(num_tokens if g.fixed_len is None else num_keys, PAD_SLOT, np.int64) for g in preparer.groups],
        logits_indices=starts[1:] - 1,
        logits_rows=rows,
        num_decodes=int((counts == 1).sum()) if not mixed and (np.diff(counts) >= 0).all() else 0,
        prefixes=prefixes,
        token_rows=np.zeros(num_tokens, np.int64),
        variant=variant,
        made_up=True,
    )
    return preparer.assembler.assemble(host, shape)


def even_split(num_tokens: int, num_requests: int) -> list[int]:
    """Return query lengths of a made-up batch, as even as possible, with the sum `num_tokens`."""
    each, rest = divmod(num_tokens, num_requests)
    return [each] * (num_requests - rest) + [each + 1] * rest


def mixed_split(num_tokens: int, num_requests: int) -> list[int]:
    """Return query lengths of a made-up batch of decodes and one prompt, with the sum `num_tokens`.

    Decodes have up to half of the tokens, and there are at most `num_requests` - 1 of them. The prompt is last.
    """
    decodes = min(num_requests - 1, num_tokens // 2)
    return [1] * decodes + [num_tokens - decodes]
