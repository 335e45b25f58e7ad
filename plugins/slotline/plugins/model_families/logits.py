"""Conversion of hidden states to logits, with the scaling of some families. Models without logits have a stand-in."""

from __future__ import annotations

from typing import Any

import torch


class LogitsHead:
    """Output projection with the configuration's logit scaling and final soft cap.

    Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`, Falcon-H1 by `lm_head_multiplier`. Gemma 2
    caps with `final_logit_softcapping`, RecurrentGemma with `logits_soft_cap`.
    """

    def __init__(self, hf_model: Any) -> None:
        config = hf_model.config
        self._model = hf_model
        self._soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._soft_cap = self._soft_cap or getattr(config, "logits_soft_cap", None)
        self._factor = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        self._factor = self._factor / (getattr(config, "logits_scaling", None) or 1.0)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] float32 of hidden states [n, hidden_size]."""
        # `lm_head` is looked up in each call: adapters may have replaced it.
        logits: torch.Tensor = self._model.lm_head(hidden_states).float()  # [n, vocab_size]
        if self._factor != 1.0:
            logits = logits * self._factor
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits

    def of_transformers(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size] float32 of the whole transformers model for tokens [n]."""
        outputs = self._model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        logits: torch.Tensor = outputs.logits[0]
        return logits.float()


class NoHead:
    """Hidden states as they are, for tasks that have no logits."""

    def __init__(self, hf_model: Any) -> None:
        self._base = hf_model.base_model

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [n, hidden_size] in float32."""
        return hidden_states.float()

    def of_transformers(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states [n, hidden_size] float32 of transformers' base model for tokens [n]."""
        outputs = self._base(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden_states: torch.Tensor = outputs.last_hidden_state[0]
        return hidden_states.float()
