"""A DFlash head in training."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from target import Target, write_folder
from torch import Tensor, nn
from transformers import LlamaConfig

from slotline.proposers.dflash.network import DFlashConfig, DFlashHead

DECAY = 0.8
"""How much less each further draft counts in the loss, as in `eagle_trainer`."""
BEGIN_NORM = 1.3
"""What norms of queries and keys begin with: scores of up to 1.69 times the root of the head size."""


class Blocks:
    """Attention of blocks at some positions of a window, each over the context before it and over itself.

    Args:
        context: for each layer, keys and values of the window's tokens, [b * t, heads, head_size].
        anchors: [b, a] int64, the positions of the blocks' first tokens.
        size: tokens of a block.
    """

    def __init__(self, context: list[tuple[Tensor, Tensor]], anchors: Tensor, size: int) -> None:
        self._context, self._batch, self._size = context, len(anchors), size
        length = len(context[0][0]) // len(anchors)
        hidden = torch.arange(length, device=anchors.device) >= anchors[:, :, None]  # [b, a, t]
        self._hidden = hidden.repeat_interleave(size, 1)[:, None]  # [b, 1, a * size, t]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Heads of a layer, flattened over windows and blocks, to the same shape as `query`."""
        groups, scale = query.shape[1] // key.shape[1], query.shape[2] ** -0.5

        def heads(x: Tensor) -> Tensor:
            x = x if x.shape[1] == query.shape[1] else x.repeat_interleave(groups, 1)
            return x.unflatten(0, (self._batch, -1)).transpose(1, 2)  # [b, heads, tokens, head_size]

        q, k, v = heads(query), heads(key), heads(value)
        past_keys, past_values = (heads(x) for x in self._context[layer])
        past = (q @ past_keys.transpose(2, 3)).masked_fill(self._hidden, -torch.inf)
        blocks, own_keys, own_values = (x.unflatten(2, (-1, self._size)) for x in (q, k, v))
        own = (blocks @ own_keys.transpose(3, 4)).flatten(2, 3)  # [b, heads, a * size, size]
        weights = (torch.cat([past, own], -1).float() * scale).softmax(-1).to(value.dtype)
        of_past, of_own = weights.split([past.shape[-1], self._size], -1)
        out = of_past @ past_values + (of_own.unflatten(2, (-1, self._size)) @ own_values).flatten(2, 3)
        return out.transpose(1, 2).reshape(query.shape)


class DFlashTrainer(nn.Module):
    """A DFlash head in training. It begins with the target's last layers, over the mean of the states that it reads.

    Args:
        options: drafts, layers, anchors, mask_token_id, intermediate_size, out.
    """

    def __init__(self, kind: str, target: Target, options: argparse.Namespace, kept: Tensor) -> None:
        super().__init__()
        self.num_drafts, self.num_anchors = options.drafts, options.anchors
        config = target.config.to_dict()
        names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        llama = LlamaConfig(
            **{name: config[name] for name in (*names, "max_position_embeddings", "rope_parameters")},
            intermediate_size=options.intermediate_size or config["intermediate_size"],
            num_hidden_layers=options.layers,
        )
        self.config = DFlashConfig(
            path=options.out,
            llama=llama,
            mask_token_id=options.mask_token_id,
            block_size=1 + options.drafts,
            layer_ids=tuple(layer - 1 for layer in target.layer_ids),
            windows=(None,) * options.layers,
            num_target_layers=config["num_hidden_layers"],
        )
        self.head = DFlashHead(self.config, num_states=len(target.layer_ids))
        self._begin(target)

    @torch.no_grad()
    def _begin(self, target: Target) -> None:
        """Copy the target's last layers, as far as shapes agree."""
        size, own = self.config.llama.hidden_size, self.head.layers
        for layer, given in zip(own, target.model.get_decoder().layers[-len(own) :], strict=True):
            found = given.state_dict()
            for name, weight in layer.state_dict().items():
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    weight.fill_(BEGIN_NORM)
                elif name in found and found[name].shape == weight.shape:
                    weight.copy_(found[name])
        self.head.hidden_norm.weight.copy_(own[-1].input_layernorm.weight)  # type: ignore[union-attr,arg-type]
        states = len(target.layer_ids)
        self.head.fc.weight.copy_(torch.eye(size).repeat(1, states) / states)

    def loss(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor, progress: Tensor) -> Tensor:
        """Mean loss over blocks at random places of [b, t] tokens; alike in all of the training."""
        batch, size = windows.shape
        anchors = torch.randint(1, size - self.num_drafts, (batch, self.num_anchors), device=windows.device)
        out = self._out(target, windows, layers, anchors)  # [b, a, drafts, size]
        places = anchors[..., None] + torch.arange(self.num_drafts, device=windows.device)
        right = last.gather(1, places.flatten(1)[..., None].expand(-1, -1, last.shape[-1]))
        with torch.no_grad():
            wanted = target.logits(right).float().softmax(-1)
        found = target.logits(out.flatten(1, 2)).float().log_softmax(-1)
        each = -(wanted * found).sum(-1).view(places.shape)  # of the drafts at the places behind
        return (each.mean((0, 1)) * DECAY ** torch.arange(self.num_drafts, device=each.device)).mean()

    @torch.no_grad()
    def drafts(self, target: Target, windows: Tensor, last: Tensor, layers: Tensor) -> Tensor:
        """Greedy drafts [b, t - 1, drafts] behind each token that follows a position."""
        anchors = torch.arange(1, windows.shape[1], device=windows.device)[None]
        found = [
            target.logits(self._out(target, part, states, anchors)).argmax(-1)
            for part, states in zip(windows.split(1), layers.split(1), strict=True)
        ]
        return torch.cat(found)

    def _out(self, target: Target, windows: Tensor, layers: Tensor, anchors: Tensor) -> Tensor:
        """Outputs [b, a, drafts, size] at the masks of blocks that begin with the tokens at `anchors` [b, a]."""
        batch, size, block = len(windows), windows.shape[1], 1 + self.num_drafts
        every = torch.arange(size, device=windows.device).repeat(batch)
        attend = Blocks(self.head.context(layers.flatten(0, 1), every), anchors, block)
        masks = torch.full((*anchors.shape, self.num_drafts), self.config.mask_token_id, device=windows.device)
        tokens = torch.cat([windows.gather(1, anchors)[..., None], masks], -1)
        positions = anchors[..., None] + torch.arange(block, device=windows.device)
        out: Tensor = self.head(target.embed(tokens).flatten(0, 2), positions.flatten(), attend)
        return out.view(*tokens.shape, -1)[:, :, 1:]

    def save(self, folder: Path) -> None:
        """Write the folder, in bfloat16; embedding and output projection are the target's."""
        weights = {name: value.to(torch.bfloat16).contiguous() for name, value in self.head.state_dict().items()}
        llama = self.config.llama.to_dict() | {"tie_word_embeddings": False, "dtype": "bfloat16"}
        own = {"mask_token_id": self.config.mask_token_id, "target_layer_ids": list(self.config.layer_ids)}
        more = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": own}
        sizes = {"block_size": self.config.block_size, "num_target_layers": self.config.num_target_layers}
        write_folder(folder, llama | more | sizes, weights)
