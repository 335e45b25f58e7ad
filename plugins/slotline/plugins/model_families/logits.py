"""Conversion of hidden states to logits, with the scaling of some families. Models without logits have a stand-in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from slotline.plugins.model_families import structure


class _Head:
    """Head of a transformers model, which can say what the whole model gives."""

    _model: Any

    def of_transformers(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size] float32 of the whole transformers model for tokens [n]."""
        given = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
        logits: torch.Tensor = self._model(**structure.taking(self._model.forward, given)).logits[0]
        return logits.float()


class LogitsHead(_Head):
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


class WholeHead(_Head):
    """Everything that a transformers model computes after its decoder, by its own forward.

    The forward runs on a copy of the model that shares all modules but the decoder. In its place stands one that
    returns the hidden states.
    """

    def __init__(self, hf_model: Any) -> None:
        self._model = hf_model
        self._stand_in = _StandIn(_outermost_body(hf_model))
        self._copy = copy.copy(hf_model)
        self._copy._modules = {
            name: self._stand_in if child is self._stand_in.original else child
            for name, child in hf_model._modules.items()
        }
        self._tokens = torch.zeros((1, 1), dtype=torch.int64)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab_size] float32 of hidden states [n, hidden_size]."""
        self._stand_in.hidden_states = hidden_states[None]
        self._copy._modules |= {n: m for n, m in self._model._modules.items() if m is not self._stand_in.original}
        given = {"input_ids": self._tokens, "use_cache": False, "return_dict": True}
        logits: torch.Tensor = self._copy(**structure.taking(self._copy.forward, given)).logits[0]
        return logits.float()


class _StandIn(nn.Module):
    """Module in the place of a decoder that returns given hidden states."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "original", original)
        self.hidden_states = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return self if name == "decoder" else getattr(self.__dict__["original"], name)

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        """Return the hidden states as a decoder does."""
        return _Outputs(last_hidden_state=self.hidden_states)


class _Outputs(BaseModelOutputWithPast):  # type: ignore[misc]
    """Output of a decoder that has nothing but hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _outermost_body(hf_model: Any) -> nn.Module:
    """Return the model's own child that has the decoder."""
    body = hf_model.base_model
    found: nn.Module = next(child for child in hf_model.children() if body in set(child.modules()))
    return found


def head_of(hf_model: Any, *, vetted: bool) -> LogitsHead | WholeHead:
    """Return the shorter head if it gives the logits of the model's own.

    Args:
        vetted: True for a model whose head the tests compare.
    """
    if vetted:
        return LogitsHead(hf_model)
    whole = WholeHead(hf_model)
    if not isinstance(getattr(hf_model, "lm_head", None), nn.Module):
        return whole
    weight = next(one for one in hf_model.parameters() if one.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, structure.hidden_size(hf_model), generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        try:
            short, expected = LogitsHead(hf_model)(states), whole(states)
        except (RuntimeError, TypeError, AttributeError):
            return whole
    same = short.shape == expected.shape and torch.allclose(short, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    return LogitsHead(hf_model) if same else whole


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
