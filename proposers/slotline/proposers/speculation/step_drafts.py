"""Drafts of a step: what its inputs and its samples hold for the extension `drafts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from slotline.core.batch.input_batch_cpu import InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.proposers.speculation.draft_table import DraftTable
from slotline.proposers.speculation.draft_tree import DraftTree
from slotline.proposers.speculation.hidden_states import ComputedStates, HiddenStates
from slotline.proposers.speculation.rejected_token_correction import Bounds, upload_bounds
from slotline.proposers.speculation.rejections import Rejections, drafted
from slotline.proposers.speculation.verified_drafts import Proposal, VerifiedDrafts
from slotline.registry.contracts import TreeMask

Int = npt.NDArray[np.int64]
Upload = Callable[[npt.NDArray[Any]], torch.Tensor]


@frozen(kw_only=True, eq=False)
class StepDrafts:
    """Drafts that a step verifies, in `ModelInputs.extras`.

    Attributes:
        token_ids: [num_logits] int64, the draft that each of the logits verifies, -1 after a request's last draft. With
            a tree those of the nodes. None without drafts, and until the step is settled under async scheduling.
        tree: the form of the drafts. None for chains.
        nodes: [num_logits] int64, 0 for the last known token, then 1 + the node of the tree. None for chains.
        mask: of the tree, for attention.
        rejections: the drafts that rejection sampling decides. None for none.
        bounds: places of upper bounds that the device makes exact. None if all numbers are.
        settled: inputs of the verification on the device, under async scheduling.
    """

    token_ids: Int | None = None
    tree: DraftTree | None = None
    nodes: Int | None = None
    mask: TreeMask | None = None
    rejections: Rejections | None = None
    bounds: Bounds | None = None
    settled: VerifiedDrafts | None = None

    @classmethod
    def gather(cls, table: DraftTable, batch: InputBatchCPU, upload: Upload, *, known_distribution: bool) -> StepDrafts:
        """Gather the drafts of a step.

        Args:
            table: the drafts of all rows.
            batch: the step on the host.
            upload: as for `FeatureExtension.gather`.
            known_distribution: whether the drafter gave distributions with its last proposal.
        """
        rows, bounds = table.rows, None
        if batch.pending is not None and batch.pending.any():
            bounds = upload_bounds(batch, batch.pending, rows.max_requests, upload)
        positions = batch.spec_positions
        if positions is None or batch.pending is not None:
            return NO_DRAFTS if bounds is None else cls(bounds=bounds)
        which = batch.logits_rows
        if (tree := table.tree) is not None and batch.num_verified is not None:
            nodes = _nodes(batch.num_verified)
            drafts = rows.token_ids[which, rows.num_tokens[which] + nodes - 1]
            num_nodes = np.maximum(batch.seq_lens[: len(batch.rows)] - rows.num_tokens[batch.rows], 0)
            mask = TreeMask(upload(tree.sees), upload(tree.depths - 1), num_nodes.astype(np.int32))
            return cls(token_ids=drafts, tree=tree, nodes=nodes, mask=mask)
        drafts = drafted(rows, which, positions)
        rejections = None
        if known_distribution:
            sampling = SamplingMetadata.gather(rows, which, positions)
            rejections = Rejections.gather(table, sampling, positions, drafts, upload)
        return cls(token_ids=drafts, rejections=rejections)


NO_DRAFTS = StepDrafts()


@frozen(kw_only=True, eq=False)
class SampledDrafts:
    """What a step's samples hold until its tokens are handed out, in `PendingSample.extras` and `StepOutput.extras`.

    Attributes:
        step: its drafts.
        guesses: [num_logits] int64, the number of drafts of each row that its drafter proposed.
        states: of the logits rows, if the drafter reads any.
        computed: of all tokens, if the drafter reads them.
        proposal: the drafts after it, if the drafter does not wait for the host.
    """

    step: StepDrafts
    guesses: Int
    states: HiddenStates | None
    computed: ComputedStates | None
    proposal: Proposal | None = None


def arrange_tree(rows: RequestTable, tree: DraftTree, batch: InputBatchCPU) -> InputBatchCPU:
    """Return a step's batch with the positions of a tree's nodes, which share positions but not places."""
    assert batch.spec_positions is not None
    nodes = batch.spec_positions
    index = batch.positions - rows.num_tokens[batch.token_rows]
    there = tree.depths[np.maximum(index, 0)] - 1
    return evolve(
        batch,
        positions=np.where(index < 0, batch.positions, batch.positions - index + there),
        spec_positions=tree.positions(nodes),
        spec_paths=np.where(nodes[:, None] > 0, tree.paths[nodes - 1], -1),
    )


def with_mask(inputs: ModelInputs, mask: TreeMask) -> ModelInputs:
    """Return a step's inputs whose attention over the cache sees a tree."""
    return evolve(
        inputs, batches=tuple(evolve(batch, tree=mask) if batch.causal else batch for batch in inputs.batches)
    )


def _nodes(num_verified: Int) -> Int:
    """Return 0 for each request's last known token, then 1 + the index of each draft after it."""
    counts = num_verified + 1
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)
