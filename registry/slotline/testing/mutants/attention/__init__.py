"""Broken attention backends by topic, and right ones whose arithmetic differs."""

from __future__ import annotations

from slotline.testing.mutants.attention import (
    alibi,
    arithmetic,
    bounded,
    cascade,
    contract,
    correct,
    edges,
    formats,
    indexed,
    latents,
    listening,
    masks,
    outputs,
    paging,
    plans,
    prefix_groups,
    scales,
    scores,
    sizes,
    strides,
    workspace,
)

MUTANTS = (
    *contract.MUTANTS,
    *masks.MUTANTS,
    *arithmetic.MUTANTS,
    *paging.MUTANTS,
    *outputs.MUTANTS,
    *plans.MUTANTS,
    *scales.MUTANTS,
    *scores.MUTANTS,
    *cascade.MUTANTS,
    *prefix_groups.MUTANTS,
    *latents.MUTANTS,
    *alibi.MUTANTS,
    *formats.MUTANTS,
    *bounded.MUTANTS,
    *listening.MUTANTS,
    *strides.MUTANTS,
    *workspace.MUTANTS,
    *indexed.MUTANTS,
    *sizes.MUTANTS,
    *edges.MUTANTS,
)
CORRECT = (
    *correct.CORRECT,
    *cascade.CORRECT,
    *prefix_groups.CORRECT,
    *alibi.CORRECT,
    *formats.CORRECT,
    *bounded.CORRECT,
    *listening.CORRECT,
    *workspace.CORRECT,
    *indexed.CORRECT,
    *edges.CORRECT,
)

__all__ = ["CORRECT", "MUTANTS"]
