"""EAGLE and EAGLE-3 heads in training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from target import Target, write_folder
from torch import Tensor, nn
from transformers import LlamaConfig

from slotline.proposers.eagle.heads import Eagle3Head, EagleHead, HeadConfig

DECAY = 0.8
"""How much less each further draft counts in the loss (EAGLE-3, section 3.2)."""


class Unrolled:
    """Attention of a head that drafts from every position of a window at once.

    Entry i of the first step is position i, with the target's state, and attends over entries 0 .. i. Entry i of a
    later step s is position i + s with the head's own state: it attends over what entry i of the first step saw, and
    over entry i of the steps since.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Heads of one layer (the only one), flattened over the batch, to the same shape as `query`."""
        groups = query.shape[1] // key.shape[1]
        q, k, v = (
            x.view(self.batch, -1, *x.shape[1:]).transpose(1, 2)  # [b, heads, t, head_size]
            for x in (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        )
        self.keys.append(k)
        self.values.append(v)
        first = len(self.keys) == 1
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if first else self._later(q)
        return out.transpose(1, 2).reshape(query.shape)

    def _later(self, q: Tensor) -> Tensor:
        t, scale = q.shape[2], q.shape[3] ** -0.5
        seen = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
        first = (q @ self.keys[0].transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)  # [b, heads, t, t]
        own = [(q * key).sum(-1, keepdim=True) * scale for key in self.keys[1:]]
        weights = torch.cat([first, *own], -1).float().softmax(-1).to(q.dtype)
        out = weights[..., :t] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            out = out + weights[..., t + step, None] * value
        return out


class EagleTrainer(nn.Module):
    """An EAGLE or EAGLE-3 head in training.

    Args:
        kept: [draft_vocab_size] int64, the target's tokens that an EAGLE-3 head knows, in rising order.
    """

    def __init__(self, kind: str, target: Target, options: argparse.Namespace, kept: Tensor) -> None:
        super().__init__()
        self.kind, self.num_drafts = kind, options.drafts
        config = target.config.to_dict()
        names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        llama = LlamaConfig(
            **{name: config[name] for name in (*names, "max_position_embeddings", "rope_parameters")},
            intermediate_size=options.intermediate_size or config["intermediate_size"],
            num_hidden_layers=1,
        )
        shape = HeadConfig(path=options.out, llama=llama, draft_vocab_size=len(kept), layer_ids=target.layer_ids)
        self.config = shape
        self.head: Any
        if kind == "eagle3":
            self.head = Eagle3Head(shape, num_states=len(target.layer_ids))
            self.head.lm_head.weight.data.copy_(target.model.get_output_embeddings().weight[kept.cpu().tolist()])
        else:
            self.head = EagleHead(shape, bias=True)
        self.register_buffer("kept", kept)

    def logits(self, target: Target, out: Tensor) -> Tensor:
        """The head's logits over the tokens it knows."""
        logits: Tensor = self.head.lm_head(out) if self.kind == "eagle3" else target.logits(out)
        return logits

    def loss(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor, progress: Tensor) -> Tensor:
        """Mean loss over all steps and positions of [b, t] tokens; alike in all of the training."""
        batch, size = windows.shape
        length = size - 1 - self.num_drafts  # entries that have a right answer in every step
        attend, positions = Unrolled(batch), torch.arange(length, device=windows.device)
        hidden = self.head.enter((layers if self.kind == "eagle3" else last)[:, :length].flatten(0, 1))
        total = hidden.new_zeros((), dtype=torch.float32)
        for step in range(self.num_drafts):
            tokens = windows[:, 1 + step : 1 + step + length]
            out, hidden = self.head(
                target.embed(tokens).flatten(0, 1), hidden, (positions + step).repeat(batch), attend
            )
            right = last[:, 1 + step : 1 + step + length].flatten(0, 1)  # the states that give the next tokens
            total = total + DECAY**step * self._step_loss(target, out, right)
        return total / self.num_drafts

    def _step_loss(self, target: Target, out: Tensor, right: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target.logits(right).float()
            best = wanted.argmax(-1)
            if self.kind == "eagle3":
                wanted = wanted[:, self.kept]  # type: ignore[index]
            soft = wanted.softmax(-1)
        found = self.logits(target, out).float().log_softmax(-1)
        each = -(soft * found).sum(-1)
        if self.kind == "eagle3":
            known = torch.isin(best, self.kept)  # type: ignore[arg-type]
            return (each * known).sum() / known.sum().clamp_min(1)
        distance = F.smooth_l1_loss(out.float(), right.float(), reduction="none").mean(-1)
        return each.mean() + 0.1 * distance.mean()

    @torch.no_grad()
    def drafts(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor) -> Tensor:
        """Greedy drafts [b, t - 1, drafts] behind each token that follows a position."""
        batch, length = windows.shape[0], windows.shape[1] - 1
        attend, positions = Unrolled(batch), torch.arange(length, device=windows.device)
        hidden = self.head.enter((layers if self.kind == "eagle3" else last)[:, :length].flatten(0, 1))
        tokens, found = windows[:, 1:], []
        for step in range(self.num_drafts):
            out, hidden = self.head(
                target.embed(tokens).flatten(0, 1), hidden, (positions + step).repeat(batch), attend
            )
            best = self.logits(target, out).argmax(-1)
            tokens = (self.kept[best] if self.kind == "eagle3" else best).view(batch, length)  # type: ignore[index]
            found.append(tokens)
        return torch.stack(found, -1)

    def save(self, folder: Path) -> None:
        """Write the folder, in bfloat16; embedding (and EAGLE's output projection) are the target's."""
        weights = {name: value.to(torch.bfloat16).contiguous() for name, value in self.head.state_dict().items()}
        config = self.config.llama.to_dict() | {"tie_word_embeddings": False, "dtype": "bfloat16"}
        config |= {"architectures": ["LlamaForCausalLM"]}
        if self.kind == "eagle3":
            vocab_size, kept = self.config.llama.vocab_size, self.kept.cpu()  # type: ignore[union-attr,operator]
            weights["d2t"] = kept - torch.arange(len(kept))  # what is added to a draft token to make it the target's
            weights["t2d"] = torch.isin(torch.arange(vocab_size), kept)
            ids = {"eagle_aux_hidden_state_layer_ids": list(self.config.layer_ids)}
            config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(kept), "eagle_config": ids}
        write_folder(folder, config, weights)
