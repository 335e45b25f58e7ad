"""Medusa (Cai et al. 2024): the most likely token of each head as a chain, or the likelier ones of all as a tree."""

from __future__ import annotations

from pathlib import Path

import torch

from slotline.proposers.medusa import MedusaTreeOptions
from slotline.proposers.medusa.choices import likeliest, ordered, parents_of
from slotline.proposers.medusa.heads import MedusaHeads, read_heads
from slotline.registry.contracts import Draft, DraftBatch, DrafterContext
from slotline.registry.errors import ConfigError


class MedusaDrafter:
    """Implements `Drafter`. It keeps nothing between steps, and all heads run as one batch of matrix products.

    Raises:
        ConfigError: without a folder, or if more tokens are requested than there are heads.
        ModelError: if the folder does not contain heads for this model.
    """

    def __init__(self, context: DrafterContext) -> None:
        self._heads = ProjectedHeads(context, context.num_tokens)

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Do nothing, because no state is kept by row."""

    def propose(self, batch: DraftBatch) -> Draft:
        """Let head i predict the token i + 1 places after the newest one, from the state that predicted that one."""
        assert batch.hidden_states is not None  # declared as a need
        best = self._heads.logits(batch.hidden_states).argmax(-1)
        return Draft(token_ids=self._heads.tokens(best).T.contiguous())

    def release(self, row: int) -> None:
        """Do nothing, because no state is kept by row."""


class MedusaTreeDrafter:
    """The same as a tree: a node of depth d is one of the likeliest tokens of head d - 1 (section 2.1.2).

    Raises:
        ConfigError: as above, and if the choices are no tree of that size.
        ModelError: as above.
    """

    def __init__(self, context: DrafterContext) -> None:
        options: MedusaTreeOptions = context.options or MedusaTreeOptions()
        paths = ordered(options.choices) if options.choices else None
        if paths is not None and len(paths) > context.num_tokens:
            raise ConfigError(
                f"drafter.medusa_tree: choices has {len(paths)} nodes, drafter.tokens is {context.num_tokens}",
                fix=f"set drafter.tokens to {len(paths)}",
            )
        most = max(map(len, paths)) if paths else 0
        self._heads = ProjectedHeads(context, most)
        paths = paths or likeliest(context.num_tokens, self._heads.num_heads)
        self._heads.keep(max(map(len, paths)))
        self._depths = torch.tensor([len(path) - 1 for path in paths])
        self._ranks = torch.tensor([path[-1] for path in paths])
        self._parents = torch.tensor(parents_of(paths))

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Do nothing, because no state is kept by row."""

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose the tree's tokens, with -1 if a head's vocabulary ends before a rank."""
        assert batch.hidden_states is not None  # declared as a need
        logits = self._heads.logits(batch.hidden_states)  # [heads, n, vocab_size]
        most = min(int(self._ranks.max()) + 1, logits.shape[-1])
        tokens = self._heads.tokens(logits.topk(most, dim=-1).indices)  # [heads, n, most]
        ids = tokens[self._depths, :, self._ranks.clamp(max=most - 1)].T
        return Draft(
            token_ids=torch.where((self._ranks < most).to(ids.device), ids, -1).contiguous(), parents=self._parents
        )

    def release(self, row: int) -> None:
        """Do nothing, because no state is kept by row."""


class ProjectedHeads:
    """First heads of a folder with their output projections.

    Args:
        num_heads: number of heads needed, 0 for all.
    """

    def __init__(self, context: DrafterContext, num_heads: int) -> None:
        if context.path is None:
            raise ConfigError("drafter medusa has no heads", fix="set drafter.path to a folder with Medusa heads")
        heads: MedusaHeads = read_heads(Path(context.path), context.hidden_size, context.vocab_size)
        if num_heads > heads.num_heads:
            raise ConfigError(
                f"drafter.tokens = {context.num_tokens}: there are {heads.num_heads} heads in {context.path!r}, "
                f"and {num_heads} places to draft",
                fix=f"draft {heads.num_heads} places or less",
            )
        dtype: torch.dtype = getattr(torch, context.dtype)
        self._heads = heads.first(num_heads or heads.num_heads).to(context.device, dtype)
        self._compute_logits = context.compute_logits
        if heads.projections is None and self._compute_logits is None:
            raise ConfigError(
                f"the heads in {context.path!r} share the model's output projection, and there is no model",
                fix="use them in an engine, or heads with projections of their own",
            )

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self._heads.num_heads

    def keep(self, num_heads: int) -> None:
        """Run only the first heads from now on."""
        self._heads = self._heads.first(num_heads)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [num_heads, n, vocab_size], or the heads' own vocabulary, from hidden states [n, hidden_size]."""
        states = self._heads.states(hidden_states)
        if self._heads.projections is not None:
            return torch.bmm(states, self._heads.projections.transpose(1, 2))
        assert self._compute_logits is not None
        shared: torch.Tensor = self._compute_logits(states.flatten(0, 1))
        return shared.view(*states.shape[:2], -1)

    def tokens(self, index: torch.Tensor) -> torch.Tensor:
        """Return the model's tokens of indices [..] int64 into the logits."""
        return index if self._heads.token_map is None else self._heads.token_map[index]
