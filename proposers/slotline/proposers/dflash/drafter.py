"""DFlash as a drafter: chains, greedy, from one pass over a block of each request.

Entry i of the head's cache is made of the target's hidden states at position i. A block's own keys lie behind them, in
the places of tokens that the model has not computed. They are overwritten once it has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slotline.core.device import TorchOps
from slotline.proposers.dflash.network import DFlashConfig, DFlashHead, read_config
from slotline.proposers.eagle.heads import fill, read_weights, refuse_strange, stored
from slotline.registry.contracts import (
    AttentionLayer,
    ComputedTokens,
    Draft,
    DraftBatch,
    DrafterContext,
    DrafterInspection,
)
from slotline.registry.errors import ContractError, ModelError


class DFlashDrafter:
    """Implements `Observer` and `LayerReader`. Its class is the `KVDrafterFactory`.

    Attributes:
        layer_ids: the target's layers whose inputs it reads, which are the outputs of those before them.
    """

    def __init__(self, context: DrafterContext) -> None:
        if context.embed is None or context.compute_logits is None:
            raise ContractError(
                "a DFlash head shares the model's embedding, and this model family gives none",
                fix="use a model family whose models have `embed`",
            )
        config = read_config(_folder(context.path))
        self._num_tokens, self._layers = context.num_tokens, context.layers
        self._embed, self._logits = context.embed, context.compute_logits
        self._argmax = (context.ops or TorchOps()).argmax
        self._last = context.max_model_len - 1
        self._masks = torch.full((context.num_tokens,), config.mask_token_id, device=context.device)
        self._offsets = torch.arange(1 + context.num_tokens, device=context.device)
        self.layer_ids = tuple(1 + layer for layer in config.layer_ids)
        self._head = _loaded(config).to(context.device, getattr(torch, context.dtype)).eval().requires_grad_(False)
        self._head.prepare()
        self._head.merge()

    @classmethod
    def attention_layers(cls, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """Return the head's decoder layers, from its config.json.

        Raises:
            ModelError: if the folder does not contain a head, or contains the head of another model, or one of smaller
                blocks.
        """
        config = read_config(_folder(inspection.path))
        _refuse_other_target(config, inspection)
        llama, size = config.llama, int(config.llama.head_dim)
        if len(stored(config.path)) < llama.num_hidden_layers:
            raise ModelError(
                f"the head in {str(config.path)!r} has fewer tensors than num_hidden_layers = "
                f"{llama.num_hidden_layers}",
                fix="use the config.json that belongs to these weights",
            )
        return tuple(
            AttentionLayer(
                name=f"layers.{index}",
                index=index,
                num_heads=llama.num_attention_heads,
                num_kv_heads=llama.num_key_value_heads,
                head_size=size,
                head_size_v=size,
                scale=size**-0.5,
                window=window,
                kv_kind="full" if window is None else "sliding",
            )
            for index, window in enumerate(config.windows)
        )

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Do nothing, because no state is kept by row."""

    def release(self, row: int) -> None:
        """Do nothing, because no state is kept by row."""

    def observe(self, computed: ComputedTokens) -> None:
        """Fill the cache from the hidden states of all that the model computed."""
        assert computed.layer_hidden_states is not None
        if computed.store is None:
            return
        found = self._head.context(computed.layer_hidden_states, computed.positions)
        for layer, (key, value) in zip(self._layers, found, strict=True):
            computed.store(layer, key, value)

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose the likeliest token at each mask of a block, all in one pass."""
        assert batch.attend_block is not None
        count = len(batch.rows)
        tokens = torch.cat([batch.last_token_ids[:, None], self._masks.expand(count, -1)], 1)
        positions = (batch.positions[:, None] + self._offsets).clamp(max=self._last)
        attend = batch.attend_block(tokens.shape[1])

        def own(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = attend(self._layers[layer], query, key, value, None)
            return out

        out = self._head(self._embed(tokens.flatten()), positions.flatten(), own)
        drafted = out.unflatten(0, tuple(tokens.shape))[:, 1:].flatten(0, 1)
        return Draft(token_ids=self._argmax(self._logits(drafted)).view(count, self._num_tokens))


def _loaded(config: DFlashConfig) -> DFlashHead:
    with torch.device("meta"):
        head = DFlashHead(config, num_states=len(config.layer_ids))
    weights = read_weights(config.path)
    refuse_strange(head, weights, config.path, fix="use the config.json that belongs to these weights")
    fill(head, weights, config.path, assign=True)
    return head


def _refuse_other_target(config: DFlashConfig, inspection: DrafterInspection) -> None:
    """Raise ModelError if the head was made for another model, or for fewer drafts."""
    facts, llama = inspection.facts, config.llama
    layers = len(facts.parts.layers) if facts.parts else len(facts.layers)
    pairs: list[tuple[str, Any, Any]] = [
        ("vocab_size", llama.vocab_size, facts.vocab_size),
        ("hidden_size", llama.hidden_size, facts.hidden_size),
        ("num_target_layers", config.num_target_layers or layers, layers),
    ]
    for what, own, models in pairs:
        if own != models:
            raise ModelError(
                f"the head in {str(config.path)!r} has {what} {own}, {facts.architecture} in {str(facts.path)!r} has "
                f"{models}",
                fix="name a head that was trained for this model in drafter.path",
            )
    if not config.layer_ids or not 0 <= min(config.layer_ids) <= max(config.layer_ids) < layers - 1:
        raise ModelError(
            f"the head in {str(config.path)!r} reads outputs of target_layer_ids = {list(config.layer_ids)}, and those "
            f"of 0 to {layers - 2} can be read of {facts.architecture} in {str(facts.path)!r}",
            fix="name a head that was trained for this model in drafter.path",
        )
    if not 0 <= config.mask_token_id < facts.vocab_size:
        raise ModelError(
            f"the head in {str(config.path)!r} has mask_token_id {config.mask_token_id} of {facts.vocab_size} tokens",
            fix="name a head that was trained for this model in drafter.path",
        )
    if inspection.num_tokens >= config.block_size:
        raise ModelError(
            f"drafter.tokens = {inspection.num_tokens}, and the head in {str(config.path)!r} was trained with "
            f"block_size = {config.block_size}, tokens of a block with the newest one included",
            fix=f"set drafter.tokens to {config.block_size - 1} or less",
        )


def _folder(path: str | None) -> Path:
    if path is None:
        raise ModelError("no head is named, and the model has none in its folder", fix="set drafter.path to its folder")
    return Path(path)
