"""Scores of pairs by a decoder's logits of chosen tokens: the module LogitScore of a sentence-transformers folder."""

from __future__ import annotations

from typing import Any

import torch

from slotline.plugins.model_families import sentence_transformers
from slotline.registry.contracts import ModelContext
from slotline.registry.errors import ModelError


def replace_head(model: Any, context: ModelContext) -> None:
    """Take the output projection off a model that samples nothing. Keep the rows of the tokens that a score reads.

    They become ``score``, a linear layer with one output for each token.

    Raises:
        ModelError: if the folder's tokens are not in the vocabulary, or if the logits would be changed after it.
    """
    if context.task == "classify" and sentence_transformers.scores_tokens(context.facts.path):
        tokens = sentence_transformers.score_tokens(context.facts.path)
        rows = model.lm_head.weight
        if max(tokens) >= len(rows) or min(tokens) < 0:
            raise ModelError(
                f"{context.facts.path} scores by the tokens {tokens} of a vocabulary of {len(rows)}",
                fix="restore the config.json of its LogitScore",
            )
        config = model.config.get_text_config()
        if getattr(config, "final_logit_softcapping", None) or getattr(model.lm_head, "bias", None) is not None:
            raise ModelError(
                f"{context.facts.path} bounds or shifts its logits, which a score by logits does not",
                fix="take a checkpoint with a score head",
            )
        score = torch.nn.Linear(rows.shape[1], len(tokens), bias=False, dtype=rows.dtype, device=rows.device)
        with torch.no_grad():
            score.weight.copy_(rows[list(tokens)])
        model.score = score.requires_grad_(False)
    del model.lm_head  # logits are not read, and the weight may be large


def difference(logits: torch.Tensor) -> torch.Tensor:
    """Return the score's logit [n, 1] of the tokens' [n, 1 or 2]: the first one's, less the second one's."""
    return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]
