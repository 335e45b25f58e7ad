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
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.proposers.speculation.draft_table import DraftTable
from slotline.proposers.speculation.draft_tree import VerifiedTrees
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
        trees: the forms of the drafts. None for chains.
        mask: of the trees, for attention.
        rejections: the drafts that rejection sampling decides. None for none.
        bounds: places of upper bounds that the device makes exact. None if all numbers are.
        settled: inputs of the verification on the device, under async scheduling.
    """

    token_ids: Int | None = None
    trees: VerifiedTrees | None = None
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
            forms = (np.broadcast_to(one, (len(which), len(one))) for one in (tree.parents, tree.depths))
            num_nodes = np.maximum(batch.seq_lens[: len(batch.rows)] - rows.num_tokens[batch.rows], 0)
            mask = TreeMask(upload(tree.sees), upload(tree.depths - 1), num_nodes.astype(np.int32))
            return cls.of_nodes(table, batch, VerifiedTrees.of(_nodes(batch.num_verified), *forms), mask)
        drafts = drafted(rows, which, positions)
        rejections = None
        if known_distribution:
            sampling = SamplingMetadata.gather(rows, which, positions)
            rejections = Rejections.gather(table, sampling, positions, drafts, upload)
        return cls(token_ids=drafts, rejections=rejections)

    @classmethod
    def gather_trees(cls, table: DraftTable, batch: InputBatchCPU, upload: Upload) -> StepDrafts:
        """Gather the drafts of a step in which each request has a tree of its own.

        What is uploaded has the same shapes in all steps of a captured shape.
        """
        trees, rows = table.trees, table.rows
        assert trees is not None
        missing = len(batch.seq_lens) - len(batch.rows)
        num_nodes = np.maximum(batch.seq_lens[: len(batch.rows)] - rows.num_tokens[batch.rows], 0)
        padded = np.pad(num_nodes * (not batch.made_up), (0, missing)).astype(np.int32)
        own = np.pad(batch.rows, (0, missing))
        mask = TreeMask(upload(trees.sees[own]), upload(trees.depths[own] - 1), padded, upload(padded))
        if batch.num_verified is None:
            return cls(mask=mask)
        which, nodes = batch.logits_rows, _nodes(batch.num_verified)
        found = VerifiedTrees.of(nodes, trees.parents[which], trees.depths[which])
        return cls.of_nodes(table, batch, found, mask)

    @classmethod
    def of_nodes(cls, table: DraftTable, batch: InputBatchCPU, trees: VerifiedTrees, mask: TreeMask) -> StepDrafts:
        """Return the drafts of a step that verifies trees."""
        which = batch.logits_rows
        drafts = table.rows.token_ids[which, table.rows.num_tokens[which] + trees.nodes - 1]
        return cls(token_ids=drafts, trees=trees, mask=mask)


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


def arrange_trees(table: DraftTable, batch: InputBatchCPU) -> InputBatchCPU:
    """Return a step's batch with the positions of trees' nodes, which share positions but not places."""
    rows, nodes, which = table.rows, batch.spec_positions, batch.logits_rows
    assert nodes is not None
    index = batch.positions - rows.num_tokens[batch.token_rows]
    at, before = np.maximum(index, 0), np.maximum(nodes - 1, 0)
    if (trees := table.trees) is not None:
        there, depths, paths = (
            trees.depths[batch.token_rows, at],
            trees.depths[which, before],
            trees.paths[which, before],
        )
    else:
        assert table.tree is not None
        there, depths, paths = table.tree.depths[at], table.tree.depths[before], table.tree.paths[before]
    return evolve(
        batch,
        positions=np.where(index < 0, batch.positions, batch.positions - index + there - 1),
        spec_positions=np.where(nodes > 0, depths, 0),
        spec_paths=np.where(nodes[:, None] > 0, paths, -1),
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
