"""EAGLE and EAGLE-3 as drafters: chains, greedy, with the head's attention in the model's cache.

Entry i of the head's cache is the hidden state at position i and the token after it. A block of the cache may be shared
by requests that continue differently after it. Its last entry is then that of the request that computed it. This
occasionally costs a guess, but never changes a text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slotline.core.device import TorchOps
from slotline.proposers.eagle import EagleTreeOptions
from slotline.proposers.eagle.candidates import FIRST_RANK, RANK_FACTOR, Candidates
from slotline.proposers.eagle.heads import (
    Eagle3Head,
    EagleHead,
    Head,
    fill,
    read_config,
    read_weights,
    refuse_more_layers,
    refuse_strange,
    stored,
)
from slotline.registry.contracts import (
    AttentionLayer,
    ComputedTokens,
    Draft,
    DraftBatch,
    DrafterContext,
    DrafterInspection,
    ModelFacts,
)
from slotline.registry.errors import ContractError, ModelError

Call = Callable[[torch.Tensor], torch.Tensor]


class EagleDrafter:
    """Implements `Observer`. Its class is the `KVDrafterFactory`."""

    has_norms = False
    """True for a norm before the first layer and one behind the last."""
    most_layers: int | None = None

    def __init__(self, context: DrafterContext) -> None:
        self._num_tokens, self._layers = context.num_tokens, context.layers
        self._argmax = (context.ops or TorchOps()).argmax
        self._facts, self._embed, self._logits = _shared(context)
        self._device, self._dtype = context.device, getattr(torch, context.dtype)
        self._head: Any = self._build(context)

    @classmethod
    def attention_layers(cls, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """Return the head's decoder layers, from its config.json.

        Raises:
            ModelError: if the folder does not contain a head, or contains the head of another model.
        """
        facts, config = inspection.facts, read_config(_folder(inspection.path))
        llama = config.llama
        for what, own, models in (
            ("vocab_size", llama.vocab_size, facts.vocab_size),
            ("hidden_size", llama.hidden_size, facts.hidden_size),
        ):
            if own != models:
                raise ModelError(
                    f"the head in {str(config.path)!r} has {what} {own}, {facts.architecture} in {str(facts.path)!r} "
                    f"has {models}",
                    fix="name a head that was trained for this model in drafter.path",
                )
        config.refuse_norms(present=cls.has_norms)
        if cls.most_layers is not None and llama.num_hidden_layers > cls.most_layers:
            raise ModelError(
                f"the head in {str(config.path)!r} has num_hidden_layers = {llama.num_hidden_layers}, and heads of "
                f"this kind have {cls.most_layers}",
                fix="use the config.json that belongs to these weights",
            )
        refuse_more_layers(config, stored(config.path))
        size = int(llama.head_dim)
        return tuple(
            AttentionLayer(
                name=f"layers.{index}",
                index=index,
                num_heads=llama.num_attention_heads,
                num_kv_heads=llama.num_key_value_heads,
                head_size=size,
                head_size_v=size,
                scale=size**-0.5,
            )
            for index in range(llama.num_hidden_layers)
        )

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Do nothing, because no state is kept by row."""

    def release(self, row: int) -> None:
        """Do nothing, because no state is kept by row."""

    def observe(self, computed: ComputedTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head over all that the model computed: that fills its cache, and gives each request's first guess."""
        hidden = self._head.enter(self._states(computed))
        embeds = self._embed(computed.next_token_ids) if computed.next_embeds is None else computed.next_embeds
        return self._step(embeds, hidden, computed.positions, computed.attend)

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose the head's likeliest token, the likeliest after it, and so on."""
        assert batch.attend is not None
        out, hidden = batch.observed
        token_ids = [self._tokens(out)]
        for offset in range(self._num_tokens - 1):
            out, hidden = self._step(self._embed(token_ids[-1]), hidden, batch.positions + offset, batch.attend(offset))
            token_ids.append(self._tokens(out))
        return Draft(token_ids=torch.stack(token_ids, 1))

    def _step(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def own(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = attend(self._layers[layer], query, key, value, None)
            return out

        found: tuple[torch.Tensor, torch.Tensor] = self._head(embeds, hidden, positions, own)
        return found

    def _build(self, context: DrafterContext) -> torch.nn.Module:
        config = read_config(_folder(context.path))
        weights = read_weights(config.path)
        with torch.device("meta"):
            head = EagleHead(config, bias="fc.bias" in weights)
        refuse_strange(head, weights, config.path)
        fill(head, weights, config.path, assign=True)
        return self._placed(head)

    def _placed(self, head: Head) -> torch.nn.Module:
        placed = head.to(self._device, self._dtype).eval().requires_grad_(False)
        placed.prepare()
        placed.merge()
        return placed

    def _states(self, computed: ComputedTokens) -> torch.Tensor | None:
        return computed.hidden_states

    def _tokens(self, out: torch.Tensor) -> torch.Tensor:
        return self._argmax(self._logits(out))

    def _best(self, out: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest `count` tokens [n, count] and the logarithms of their probabilities."""
        found = self._logits(out).float().log_softmax(-1).topk(count)
        return found.indices, found.values


class Eagle3Drafter(EagleDrafter):
    """Implements `LayerReader` too."""

    has_norms, most_layers = True, 1
    layer_ids: tuple[int, ...]

    def _build(self, context: DrafterContext) -> torch.nn.Module:
        config, facts = read_config(_folder(context.path)), self._facts
        self.layer_ids = config.layers_of(len(facts.parts.layers) if facts.parts else len(facts.layers))
        weights = {_name(name): tensor for name, tensor in read_weights(config.path).items()}
        with torch.device("meta"):
            head = Eagle3Head(config, num_states=len(self.layer_ids), bias="fc.bias" in weights)
        refuse_strange(head, weights, config.path)
        fill(head, weights, config.path, assign=True)
        # d2t holds what is added to a draft token to make it the model's; without it both count alike.
        offsets = weights.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64)).long()
        kept = torch.arange(config.draft_vocab_size) + offsets
        if len(offsets) != config.draft_vocab_size or not 0 <= int(kept.min()) <= int(kept.max()) < context.vocab_size:
            raise ModelError(
                f"d2t of the head in {str(config.path)!r} has {len(offsets)} entries for draft_vocab_size="
                f"{config.draft_vocab_size}, up to token {int(kept.max())} of {context.vocab_size}",
                fix="name a head that was trained for this model in drafter.path",
            )
        self._kept = kept.to(self._device)
        return self._placed(head)

    def _states(self, computed: ComputedTokens) -> torch.Tensor | None:
        return computed.layer_hidden_states

    def _tokens(self, out: torch.Tensor) -> torch.Tensor:
        return self._kept[self._argmax(self._head.lm_head(out))]

    def _best(self, out: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._head.lm_head(out).float().log_softmax(-1).topk(count)
        return self._kept[found.indices], found.values


class EagleTreeDrafter(EagleDrafter):
    """Proposes a tree that is built by confidence (EAGLE-2, Li et al. 2024, arXiv 2406.16858, sections 4.1 and 4.2).

    The confidence of a node is the product of the head's probabilities on its path. Each level is made of the likeliest
    children of the `branches` nodes of the level before that have the highest confidence. Of all these nodes those of
    the highest confidence are proposed.
    """

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        options: EagleTreeOptions = context.options or EagleTreeOptions()
        self._form, self._differs = context.form, options.by_confidence and context.form == "request_trees"
        self._branches = min(options.branches, context.num_tokens)
        self._levels = min(options.levels, 1 + context.num_tokens // self._branches)  # their keys need as many slots

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose a tree, or a chain where trees are not verified."""
        if self._form == "chain" or batch.attend_tree is None:
            return super().propose(batch)
        count, branches = len(batch.rows), self._branches
        if not count:
            none = batch.positions.new_empty(0, self._num_tokens)
            return Draft(
                token_ids=none, parents=none if self._differs else torch.arange(-1, self._num_tokens - 1).to(none)
            )
        out, hidden = batch.observed
        tokens, values = self._children(out[:, None], values=out.new_zeros(count, 1, dtype=torch.float32))
        grown = Candidates(tokens, values, torch.full_like(tokens, -1))
        frontier = torch.arange(branches, device=tokens.device).expand(count, -1)  # candidates, [n, branches]
        expanded, hidden = torch.full_like(frontier, -1), hidden[:, None].expand(-1, branches, -1)
        for level in range(1, self._levels):
            first = (level - 1) * branches
            parents = expanded if self._differs else expanded[0]
            out, after = self._step(
                self._embed(grown.token_ids.gather(1, frontier).flatten()),
                hidden.flatten(0, 1),
                (batch.positions + level - 1).repeat_interleave(branches),
                batch.attend_tree(parents, first),
            )
            values = grown.values.gather(1, frontier)
            tokens, values = self._children(out.view(count, branches, -1), values)
            start = grown.token_ids.shape[1]
            grown = grown.with_children(tokens, values, frontier.repeat_interleave(branches, 1))
            best = values.topk(branches).indices  # among the new ones
            frontier, parent = start + best, best // branches
            hidden = after.view(count, branches, -1).gather(1, parent[:, :, None].expand(-1, -1, after.shape[-1]))
            expanded = torch.cat([expanded, first + parent], 1)
        token_ids, parents = grown.best(self._num_tokens)
        return Draft(token_ids=token_ids, parents=parents if self._differs else parents[0])

    def _children(self, out: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest children of nodes [n, m], each with its confidence: [n, m * branches] twice.

        Without confidence all requests have one tree, by what each rank is worth.
        """
        tokens, found = self._best(out.flatten(0, 1), self._branches)
        if not self._differs:
            found = torch.arange(self._branches, device=found.device) * RANK_FACTOR + FIRST_RANK
            found = found.expand(len(tokens), -1)
        children = values.flatten()[:, None] + found.view(-1, self._branches)
        return tokens.view(len(out), -1), children.view(len(out), -1)


class Eagle3TreeDrafter(EagleTreeDrafter, Eagle3Drafter):
    """An EAGLE-3 head that proposes trees."""


def _folder(path: str | None) -> Path:
    if path is None:
        raise ModelError("no head is named, and the model has none in its folder", fix="set drafter.path to its folder")
    return Path(path)


def _name(name: str) -> str:
    """Return the authors' name of a weight. Other tools write `layers.0` for `midlayer`."""
    return name.replace("layers.0.", "midlayer.")


def _shared(context: DrafterContext) -> tuple[ModelFacts, Call, Call]:
    """Return the facts, the embedding and the output projection that a head shares with its model."""
    if context.facts is None or context.embed is None or context.compute_logits is None:
        raise ContractError(
            "the drafter's layers share the model's embedding, and this model family gives none",
            fix="use a model family whose models have `embed`",
        )
    return context.facts, context.embed, context.compute_logits
