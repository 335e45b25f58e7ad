"""A step's inputs while they are numbers of the host's, without and with padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import evolve, field, frozen

from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.registry.contracts.prefix_groups import StepPrefixes

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
PAD_SLOT = -1


@frozen(kw_only=True, eq=False)
class InputBatchCPU:
    """CPU-side model inputs of one step. `pad` makes them as large as a captured shape.

    Attributes:
        rows: [num_requests] int64, permanent rows in batch order. `counts` [num_requests] int64 are the tokens of each.
        table_rows: [num_requests] int64, the rows whose block tables are read, padded to the shape's requests. `starts`
            [num_requests + 1] int64, the first token of each, and `seq_lens` [num_requests] int64 are padded too.
        fixed_lens: [num_requests] int64, keys of each in groups whose keys are all there from its first step on.
        input_ids, positions: [num_tokens] int64, padded to the shape's tokens, as are `slots` [num_tokens] int64 by
            cache group.
        logits_indices, logits_rows, spec_positions: [num_logits] int64, as in `ModelInputs`, as are `spec_paths` and
            `num_verified`.
        num_decodes: leading requests with one token.
        prefixes: those to serve apart, None for none.
        cuts_wanted: whether the model may leave out tokens that are not wanted at its end.
        pending: as in `ModelInputs`.
        token_rows: [num_tokens] int64, the row of each token, without padding.
        variant: of captured graphs, as in `GraphShape`.
        made_up: whether the step is made up for profiling, warm-up or capture.
        num_tokens: without padding. `batch_tokens` are the tokens that attention sees, with those of padded requests.
        max_query_len, max_seq_len: of a request.
        starts32, seq_lens32: `starts` and `seq_lens` as kernels read them, padded, int32.
    """

    rows: Int
    table_rows: Int
    counts: Int
    starts: Int
    seq_lens: Int
    fixed_lens: Int
    input_ids: Int
    positions: Int
    slots: list[Int]
    logits_indices: Int
    logits_rows: Int
    num_decodes: int
    prefixes: StepPrefixes | None = None
    cuts_wanted: bool = False
    spec_positions: Int | None = None
    spec_paths: Int | None = None
    num_verified: Int | None = None
    pending: npt.NDArray[np.bool_] | None = None
    token_rows: Int = field()
    variant: int = 0
    made_up: bool = False
    num_tokens: int = field()
    batch_tokens: int = field()
    max_query_len: int = field()
    max_seq_len: int = field()
    starts32: Int32 = field(init=False)
    seq_lens32: Int32 = field(init=False)

    @token_rows.default
    def _token_rows(self) -> Int:
        return np.repeat(self.rows, self.counts)

    @num_tokens.default
    def _num_tokens(self) -> int:
        return len(self.input_ids)

    @batch_tokens.default
    def _batch_tokens(self) -> int:
        return len(self.input_ids)

    @max_query_len.default
    def _max_query_len(self) -> int:
        return int(self.counts.max(initial=0))

    @max_seq_len.default
    def _max_seq_len(self) -> int:
        return int(self.seq_lens.max(initial=0))

    @starts32.default
    def _starts32(self) -> Int32:
        return self.starts.astype(np.int32)

    @seq_lens32.default
    def _seq_lens32(self) -> Int32:
        return self.seq_lens.astype(np.int32)

    def pad(self, shape: GraphShape, null_row: int) -> InputBatchCPU:
        """Return the same as large as a captured shape.

        A padded request has as many query tokens as the others, or none in a mixed batch. It has a sequence length of
        0, the block table of `null_row`, and slots -1.
        """
        changes: dict[str, Any] = {}
        if (padding := shape.num_tokens - self.num_tokens) > 0:
            changes["input_ids"], changes["positions"] = (
                np.pad(one, (0, padding)) for one in (self.input_ids, self.positions)
            )
            changes["slots"] = [np.pad(slots, (0, padding), constant_values=PAD_SLOT) for slots in self.slots]
        if (missing := shape.padded_requests - len(self.rows)) > 0:
            more = np.arange(1, missing + 1) * shape.query_len
            changes["starts"] = np.concatenate([self.starts, self.starts[-1] + more])
            changes["seq_lens"] = np.pad(self.seq_lens, (0, missing))
            changes["table_rows"] = np.pad(self.table_rows, (0, missing), constant_values=null_row)
            if shape.query_len:
                changes["batch_tokens"] = shape.num_tokens
                changes["num_decodes"] = len(self.rows) + missing if self.max_query_len == 1 else 0
        if self.prefixes is not None:
            changes["prefixes"] = self.prefixes.padded(shape.padded_requests, shape.num_tokens)
        return evolve(self, **changes) if changes else self
