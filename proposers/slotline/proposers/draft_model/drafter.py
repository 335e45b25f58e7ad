"""Speculative decoding with a draft model (Leviathan et al. 2023): chains, greedy.

The model is any that a model family serves. Its keys and values lie in the served model's blocks, position by position.
"""

from __future__ import annotations

from pathlib import Path

import torch

from slotline.core.device import TorchOps
from slotline.registry.contracts import (
    AttentionLayer,
    ComputedTokens,
    Draft,
    DraftBatch,
    DrafterContext,
    DrafterInspection,
)
from slotline.registry.errors import ConfigError, ContractError, ModelError


class ModelDrafter:
    """Implements `Observer`. Its class is the `KVDrafterFactory`."""

    def __init__(self, context: DrafterContext) -> None:
        if context.load_model is None:
            raise ContractError("a draft model is loaded by an engine, and there is none", fix="use it in an engine")
        self._num_tokens = context.num_tokens
        self._argmax = (context.ops or TorchOps()).argmax
        self._model = context.load_model(_folder(context.path))

    @classmethod
    def attention_layers(cls, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        """Return the draft model's attention layers.

        Raises:
            ModelError: if its vocabulary differs, if its sequences are too short, or if it is not a plain decoder.
        """
        target, facts = inspection.facts, inspection.inspect_model(_folder(inspection.path))
        name, fix = f"draft model {facts.architecture} in {str(facts.path)!r}", "name another model in drafter.path"
        if facts.vocab_size != target.vocab_size:
            raise ModelError(
                f"{name} has a vocabulary of {facts.vocab_size} tokens, {target.architecture} in {str(target.path)!r} "
                f"one of {target.vocab_size}: a draft must be the model's own token",
                fix="name a model with the same tokenizer in drafter.path",
            )
        if facts.max_model_len < inspection.max_model_len:
            raise ModelError(
                f"{name} takes sequences of {facts.max_model_len} tokens, and max_model_len is "
                f"{inspection.max_model_len}",
                fix=f"set drafter.max_model_len = {facts.max_model_len}, so that longer requests go without drafts, "
                f"or scheduler.max_model_len to so many or less, or {fix}",
            )
        if "generate" not in facts.tasks:
            raise ModelError(f"{name} generates no tokens", fix=fix)
        if facts.state_layers:
            kinds = ", ".join(dict.fromkeys(layer.state_kind for layer in facts.state_layers))
            raise ModelError(f"{name} keeps states ({kinds}), which a drafter has no place for", fix=fix)
        return facts.layers

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        """Do nothing, because no state is kept by row."""

    def release(self, row: int) -> None:
        """Do nothing, because no state is kept by row."""

    def observe(self, computed: ComputedTokens) -> None:
        """Compute what the served model computed: that fills the cache."""
        assert computed.attend is not None
        self._model.forward(computed.token_ids, computed.positions, computed.attend)

    def propose(self, batch: DraftBatch) -> Draft:
        """Propose the likeliest token after the newest, the likeliest after that, and so on.

        The first pass also computes the token before the newest. If all drafts of the previous step were accepted, that
        is the last of them, which no pass has computed yet.
        """
        assert batch.attend is not None
        assert batch.previous_token_ids is not None
        pairs = torch.stack([batch.previous_token_ids, batch.last_token_ids], 1).flatten()
        places = torch.stack([batch.positions - 1, batch.positions], 1).flatten()
        hidden = self._model.forward(pairs, places, batch.attend(0))[1::2]
        found = [self._argmax(self._model.compute_logits(hidden))]
        for offset in range(1, self._num_tokens):
            hidden = self._model.forward(found[-1], batch.positions + offset, batch.attend(offset))
            found.append(self._argmax(self._model.compute_logits(hidden)))
        return Draft(token_ids=torch.stack(found, 1))


def _folder(path: str | None) -> Path:
    if path is None:
        raise ConfigError("drafter draft_model has no model", fix="set drafter.path to the folder of a smaller model")
    return Path(path)
