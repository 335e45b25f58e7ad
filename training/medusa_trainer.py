"""Medusa heads in training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from target import Target, write_folder
from torch import Tensor, nn

from slotline.proposers.medusa.heads import read_heads
from slotline.registry.errors import ConfigError


def verified(runs: Tensor) -> Tensor:
    """Which positions get a verifying step, [b, t] 0 or 1, if the first does and `runs` [b, t] drafts stand at each.

    Found by doubling: step n knows what is reached in less than 2**n verifying steps, and what is 2**n further on.
    """
    length = runs.shape[1]
    onward = (torch.arange(1, length + 1, device=runs.device) + runs).clamp_max(length)  # past the end: at `length`
    onward = F.pad(onward, (0, 1), value=length)
    reached = torch.zeros_like(onward)
    reached[:, 0] = 1
    for _ in range(length.bit_length()):
        reached = reached.scatter_reduce(1, onward, reached, "amax")
        onward = onward.gather(1, onward)
    return reached[:, :length]


class MedusaTrainer(nn.Module):
    """Residual blocks, in front of the target's own output projection or one for each head.

    Args:
        kept: the target's tokens that projections of the heads' own know, in rising order; none to share the target's.
    """

    def __init__(self, kind: str, target: Target, options: argparse.Namespace, kept: Tensor) -> None:
        super().__init__()
        self.size, self.num_drafts, self.num_layers = target.config.hidden_size, options.drafts, options.layers
        self.vocab_size, self.likely = target.config.vocab_size, options.likely
        self.floor, self.skipped = options.floor, options.skipped
        shape = (options.layers, options.drafts, self.size)
        self.weights = nn.Parameter(0.02 * torch.randn(*shape, self.size))
        self.biases = nn.Parameter(torch.zeros(*shape))
        self.register_buffer("kept", kept)
        self.truncated = 0 < len(kept) < self.vocab_size
        rows = target.model.get_output_embeddings().weight[kept.cpu().tolist()].float()  # [kept, size]
        own = rows.expand(options.drafts, -1, -1).clone() if len(kept) else None
        self.projections = None if own is None else nn.Parameter(own)  # [drafts, kept, size]

    def load(self, folder: Path) -> None:
        """Go on from the heads in a folder.

        Raises:
            ModelError: if they do not fit the model; ConfigError: if they are not of the kind that is trained.
        """
        heads = read_heads(folder, self.size, self.vocab_size)
        own = 0 if heads.projections is None else heads.projections.shape[1]
        if heads.weights.shape[:2] != self.weights.shape[:2] or own != len(self.kept):  # type: ignore[arg-type]
            raise ConfigError(
                f"{folder} holds {heads.num_heads} heads of {len(heads.weights)} blocks, which know {own} tokens",
                fix="set --drafts, --layers and --draft-vocab-size accordingly",
            )
        with torch.no_grad():
            self.weights.copy_(heads.weights)
            self.biases.copy_(heads.biases)
            if self.projections is not None:
                self.projections.copy_(heads.projections)
                self.kept.copy_(torch.arange(own) if heads.token_map is None else heads.token_map)  # type: ignore[operator]

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

    def loss(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor, progress: Tensor) -> Tensor:
        """Mean loss over heads and positions of [b, t] tokens: head k names the target's greedy choice k + 1 tokens on.

        Position i counts for head k where the text is greedy up to token i + k + 1: else the text says nothing about
        what the model would write. It counts for `floor` where an earlier head is wrong, since the draft falls then,
        and for `skipped` where the drafts of positions before it, stood they, would leave it no verifying step. The
        loss is the generalised cross-entropy (Zhang & Sabuncu 2018), from q = 0, the usual one, to q = `likely` at the
        end: with q = 1 it were the share of wrong tokens, so capacity goes where a head can be right.
        """
        length = windows.shape[1] - 1 - self.num_drafts
        with torch.no_grad():
            best = target.logits(last).argmax(-1)  # [b, t], what stands greedily behind each token
            greedy = best[:, :-1] == windows[:, 1:]
            at = torch.arange(length, device=best.device)[:, None] + torch.arange(self.num_drafts, device=best.device)
            counts = greedy[:, at].cumprod(-1).flatten(0, 1).T  # [drafts, b * length]
            right = best[:, 1 + at].flatten(0, 1).T.contiguous()
            if self.truncated:
                counts = counts * torch.isin(right, self.kept)  # type: ignore[arg-type]
                right = torch.searchsorted(self.kept, right).clamp_max(len(self.kept) - 1)  # type: ignore[call-overload,arg-type]
        logits = self.logits(target, last[:, :length].flatten(0, 1)).float()
        with torch.no_grad():
            stands = (logits.argmax(-1) == right).long() * counts
            stands = stands.cumprod(0)
            stood = torch.cat([torch.ones_like(stands[:1]), stands[:-1]])
            weights = counts * (self.floor + (1 - self.floor) * stood)
            if self.skipped < 1:
                visited = verified(stands.sum(0).view(-1, length)).flatten()
                weights = weights * (self.skipped + (1 - self.skipped) * visited)
        each = F.cross_entropy(logits.flatten(0, 1), right.flatten(), reduction="none").view(weights.shape)
        if self.likely:
            power = self.likely * progress
            weights = weights * (-power * each.detach()).exp()  # the gradient is that of (1 - p**q) / q
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
            if self.truncated:
                config["truncated_vocab_size"] = len(self.kept)  # type: ignore[arg-type]
                weights["token_map"] = self.kept  # type: ignore[assignment]
            for head, rows in enumerate(self.projections):
                weights[f"{head}.{self.num_layers}.weight"] = rows.detach().to(torch.bfloat16).contiguous()
        write_folder(folder, config, weights)
