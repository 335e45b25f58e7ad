"""Causal models for decoders of transformers that exist only inside models of images and text."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast


@cache
def causal_class(text_class: Any) -> Any:
    """Return the class of a decoder `model` with the output projection `lm_head`, built from the text configuration.

    Its name is the decoder's, with ``ForCausalLM`` in place of ``TextModel``.
    """
    (pretrained,) = text_class.__bases__

    def build(self: Any, config: Any) -> None:
        pretrained.__init__(self, config)
        self.model = text_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    members = {
        "__init__": build,
        "__module__": __name__,
        "forward": _forward,
        "config_class": text_class.config_class,
        "base_model_prefix": "model",
        "_can_set_experts_implementation": pretrained._can_set_experts_implementation,  # read from its source
    }
    return type(text_class.__name__.replace("TextModel", "ForCausalLM"), (pretrained,), members)


def _forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    use_cache: bool | None = None,
) -> CausalLMOutputWithPast:
    """Return the logits of tokens [batch, num_tokens]."""
    found = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)
    return CausalLMOutputWithPast(logits=self.lm_head(found.last_hidden_state))
