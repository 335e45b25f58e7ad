"""Medusa heads in training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from target import Target, write_folder
from torch import Tensor, nn


class MedusaTrainer(nn.Module):
    """Residual blocks, in front of the target's own output projection or one for each head.

    Args:
        kept: the target's tokens that projections of the heads' own know, in rising order; none to share the target's.
    """

    def __init__(self, kind: str, target: Target, options: argparse.Namespace, kept: Tensor) -> None:
        super().__init__()
        self.size, self.num_drafts, self.num_layers = target.config.hidden_size, options.drafts, options.layers
        self.vocab_size, self.floor = target.config.vocab_size, options.floor
        shape = (options.layers, options.drafts, self.size)
        self.weights = nn.Parameter(0.02 * torch.randn(*shape, self.size))
        self.biases = nn.Parameter(torch.zeros(*shape))
        self.register_buffer("kept", kept)
        rows = target.model.get_output_embeddings().weight[kept.cpu().tolist()].float()  # [kept, size]
        own = rows.expand(options.drafts, -1, -1).clone() if len(kept) else None
        self.projections = None if own is None else nn.Parameter(own)  # [drafts, kept, size]

    def states(self, last: Tensor) -> Tensor:
        """What the output projections read, [drafts, n, size], from hidden states [n, size]."""
        x = last.expand(self.num_drafts, *last.shape)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)))
        return x

    def logits(self, target: Target, last: Tensor) -> Tensor:
        """Logits [drafts, n, known tokens] from hidden states [n, size]."""
        states = self.states(last)
        if self.projections is None:
            return target.logits(states)
        return torch.bmm(states, self.projections.transpose(1, 2))

    def loss(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor) -> Tensor:
        """Mean loss over heads and positions of [b, t] tokens: head k names the target's greedy choice k + 1 tokens on.

        Position i counts for head k where the text is greedy up to token i + k + 1: else the text says nothing about
        what the model would write. It counts for `floor` where an earlier head is wrong, since the draft falls then.
        """
        length = windows.shape[1] - 1 - self.num_drafts
        with torch.no_grad():
            best = target.logits(last).argmax(-1)  # [b, t], what stands greedily behind each token
            greedy = best[:, :-1] == windows[:, 1:]
            at = torch.arange(length, device=best.device)[:, None] + torch.arange(self.num_drafts, device=best.device)
            counts = greedy[:, at].cumprod(-1).flatten(0, 1).T  # [drafts, b * length]
            right = best[:, 1 + at].flatten(0, 1).T.contiguous()
            if self.projections is not None:
                counts = counts * torch.isin(right, self.kept)  # type: ignore[arg-type]
                right = torch.searchsorted(self.kept, right).clamp_max(len(self.kept) - 1)  # type: ignore[call-overload,arg-type]
        logits = self.logits(target, last[:, :length].flatten(0, 1)).float()
        with torch.no_grad():
            stood = (logits.argmax(-1) == right).long().cumprod(0).roll(1, 0)
            stood[0] = 1
            weights = counts * (self.floor + (1 - self.floor) * stood)
        each = F.cross_entropy(logits.flatten(0, 1), right.flatten(), reduction="none").view(weights.shape)
        return ((each * weights).sum(-1) / weights.sum(-1).clamp_min(1)).mean()

    @torch.no_grad()
    def drafts(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor) -> Tensor:
        """As `EagleTrainer.drafts`."""
        batch, length = windows.shape[0], windows.shape[1] - 1
        found = self.logits(target, last[:, :-1].flatten(0, 1)).argmax(-1).T.view(batch, length, self.num_drafts)
        return found if self.projections is None else self.kept[found]  # type: ignore[index]

    def save(self, folder: Path) -> None:
        """Write the folder, in bfloat16; output projections of the heads' own know `truncated_vocab_size` tokens."""
        weights = {
            f"{head}.{layer}.linear.{name}": stacked[layer, head].detach().to(torch.bfloat16).contiguous()
            for name, stacked in (("weight", self.weights), ("bias", self.biases))
            for layer in range(self.num_layers)
            for head in range(self.num_drafts)
        }
        config: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": self.num_drafts,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.size,
            "vocab_size": self.vocab_size,
            "original_lm_head": self.projections is None,
        }
        if self.projections is not None:
            config["truncated_vocab_size"] = len(self.kept)  # type: ignore[arg-type]
            weights["token_map"] = self.kept  # type: ignore[assignment]
            for head, rows in enumerate(self.projections):
                weights[f"{head}.{self.num_layers}.weight"] = rows.detach().to(torch.bfloat16).contiguous()
        write_folder(folder, config, weights)
