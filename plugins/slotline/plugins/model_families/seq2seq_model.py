"""The model family for text to text: the encoder runs once for a prompt, the decoder token by token through slots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import slotline.plugins.model_families.lighter_imports  # noqa: F401

# isort: split
from slotline.plugins.model_families import (
    checkpoint,
    weight_sizes,
)
from slotline.plugins.model_families.encoder_decoder import EncoderDecoderModel, look_at
from slotline.plugins.model_families.seq2seq import ARCHITECTURES
from slotline.registry.contracts.family_example import FamilyExample
from slotline.registry.contracts.model_family import Modality, ModelContext, ModelFacts, ProcessedItem, Shard
from slotline.registry.errors import ModelError, RequestError
from slotline.registry.safe_repr import safe_repr

MODALITY = Modality(name="encoder_prompt", placeholder_token_id=-1, cross=True, prompt=True)

T5_LENGTH = 512
"""Tokens that T5 was trained with on both sides. Relative positions have no longest sequence."""


class TransformersSeq2Seq:
    """Family of every model of `seq2seq.ARCHITECTURES`. It keeps no state, so one instance may load many models."""

    def __init__(self, context: object = None) -> None:
        """Do nothing, because `load` gets its context later."""

    def inspect(self, path: Path, *, quantized: bool = False, shard: Shard | None = None) -> ModelFacts:
        """See `slotline.registry.contracts.model_family.ModelFamily.inspect`."""
        found = checkpoint.read(Path(path), ARCHITECTURES)
        weight_sizes.require_weights(found)
        length = found.max_model_len
        if length == checkpoint.LENGTH_WITHOUT_POSITIONS:
            length = T5_LENGTH
        return ModelFacts(
            architecture=found.architecture,
            path=found.path,
            vocab_size=int(found.config.vocab_size),
            hidden_size=int(found.config.d_model),
            max_model_len=length,
            dtype=found.dtype,
            eos_token_ids=found.eos_token_ids,
            modalities=(MODALITY,),
            max_encoder_len=length,
            decoder_start=_decoder_start(found),
            **look_at(found, length, shard),
        )

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        """Return None, because the core itself captures no cross-attention."""
        return None

    def load(self, context: ModelContext) -> Seq2SeqModel:
        """See `slotline.registry.contracts.model_family.ModelFamily.load`."""
        return Seq2SeqModel(context)

    @staticmethod
    def examples() -> Mapping[str, FamilyExample]:
        """See `slotline.registry.contracts.ExampleFamily.examples`."""
        from slotline.plugins.model_families.examples import seq2seq_examples

        return seq2seq_examples()


class Seq2SeqModel(EncoderDecoderModel):
    """A loaded model, whose items are the encoder's prompts. Implements `MultimodalModel`."""

    architectures = ARCHITECTURES

    def process(self, modality: str, item: Any) -> ProcessedItem:
        """Return the item of a prompt of token ids.

        Raises:
            RequestError: if it is no list of token ids, empty, too long, or has a token that the model does not know.
        """
        try:
            tokens = torch.tensor(list(item), dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(
                f"the encoder prompt is {safe_repr(item)}, no token ids: {error}", fix="give a list of token ids"
            ) from error
        longest, vocab_size = self.facts.max_encoder_len, self.facts.vocab_size
        if not 0 < len(tokens) <= longest:
            raise RequestError(
                f"the encoder prompt has {len(tokens)} tokens, and the encoder reads from 1 to {longest}",
                fix="give a shorter prompt" if len(tokens) else "give at least one token",
            )
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()
        if wrong:
            raise RequestError(
                f"the encoder prompt has token {wrong[0]}, and the model knows {vocab_size} tokens",
                fix=f"give token ids from 0 to {vocab_size - 1}",
            )
        return _item(tokens)

    def example(self, modality: str) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.example`."""
        return _item(torch.ones(self.facts.max_encoder_len, dtype=torch.int64))

    @torch.inference_mode()
    def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the encoder's states [num_tokens, hidden_size] of each prompt.

        Prompts of a similar length are computed together, so that less than half of a batch is padding.
        """
        prompts = [item["input_ids"] for item in items]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        found: dict[int, torch.Tensor] = {}
        for _, group in groupby(order, lambda i: len(prompts[i]).bit_length()):
            places = list(group)
            found |= zip(places, self._states([prompts[i] for i in places]), strict=True)
        return [found[i] for i in range(len(prompts))]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] float32 of hidden states [n, hidden_size]."""
        if getattr(self.hf_model.config, "scale_decoder_outputs", False):
            hidden_states = hidden_states * self.hf_model.config.d_model**-0.5
        logits = super().compute_logits(hidden_states)
        bias: torch.Tensor | None = getattr(self.hf_model, "final_logits_bias", None)
        return logits if bias is None else logits + bias.float()

    def _states(self, prompts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the encoder's states of each prompt of a batch."""
        pad = self.hf_model.config.pad_token_id or 0
        padded = torch.nn.utils.rnn.pad_sequence(list(prompts), batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
        states = self.hf_model.get_encoder()(
            input_ids=padded.to(self._device), attention_mask=mask.to(self._device)
        ).last_hidden_state
        for output, prompt in zip(states, prompts, strict=True):
            yield output[: len(prompt)].clone()


def _item(tokens: torch.Tensor) -> ProcessedItem:
    places = [MODALITY.placeholder_token_id] * len(tokens)
    return ProcessedItem(modality=MODALITY.name, token_ids=places, inputs={"input_ids": tokens})


def _decoder_start(found: checkpoint.Checkpoint) -> int:
    """Return the token that a decoder's prompt begins with.

    Raises:
        ModelError: if the checkpoint names none, or one that is no token of the model.
    """
    name = "decoder_start_token_id"
    token = found.generation.get(name)
    token = getattr(found.config, name, None) if token is None else token
    if not isinstance(token, int) or not 0 <= token < found.config.vocab_size:
        raise ModelError(
            f"{found.path}: {name} = {safe_repr(token)} is no token of the model",
            fix="correct it in generation_config.json, or download the file again",
        )
    return token
