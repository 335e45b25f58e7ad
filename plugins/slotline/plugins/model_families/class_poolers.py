"""Class scores and scores of pairs, by the heads of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen

from slotline.kernels.async_copy import to_device
from slotline.plugins.model_families import logit_score, sentence_transformers
from slotline.plugins.model_families.dense_layers import torch_activation
from slotline.registry.contracts import PooledTexts, PoolingMethod, PoolingParams
from slotline.registry.errors import ModelError


@frozen(eq=False)
class ClassPooler:
    """Class scores: the checkpoint's `score` head over the last token's state, as transformers does.

    Attributes:
        hf_model: the model with the head, which is looked up in each call, since weights may be reloaded and modules
            replaced.
        activation: from logits [n, num_labels] to scores.
        texts: prompts before the first text of a pair.
        method: last.
    """

    hf_model: Any
    activation: Callable[[torch.Tensor], torch.Tensor]
    texts: PooledTexts
    method: PoolingMethod = "last"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of requests: scores of pairs only with one label."""
        return ("classify", "token_classify", "score") if self._num_labels == 1 else ("classify", "token_classify")

    @property
    def refusals(self) -> Mapping[str, str]:
        """Reasons for tasks that it does not serve."""
        if self._num_labels == 1:
            return {}
        return {"score": f"the score of a pair needs a model with one label, and this one has {self._num_labels}"}

    @property
    def _num_labels(self) -> int:
        return int(self.hf_model.config.num_labels)

    def adjust(self, params: PoolingParams) -> PoolingParams:
        """See `slotline.registry.contracts.pooling.Pooler.adjust`."""
        return params if params.use_activation is not None else evolve(params, use_activation=True)

    def pool(self, states: torch.Tensor, params: Sequence[PoolingParams]) -> torch.Tensor:
        """Return class scores [n, num_labels] float32."""
        logits = self._logits(states.to(self.hf_model.dtype)).float()  # [n, num_labels]
        flags = [bool(one.use_activation) for one in params]
        if not any(flags):
            return logits
        if all(flags):
            return self.activation(logits)
        chosen = to_device(np.array(flags), logits.device)  # [n] bool
        return torch.where(chosen[:, None], self.activation(logits), logits)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.hf_model.score(states)
        return scores


@frozen(eq=False)
class LogitPooler(ClassPooler):
    """Score of a pair: the logit of a token at the prompt's end, or its difference from another token's."""

    @property
    def _num_labels(self) -> int:
        return 1

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return logit_score.difference(self.hf_model.score(states).float())


@frozen(eq=False)
class HeadPooler(ClassPooler):
    """Class scores of an encoder: its own head over the first token's state or the mean, as transformers does.

    Attributes:
        head: from states [n, 1, hidden_size] to logits [n, num_labels].
    """

    head: Callable[[torch.Tensor], torch.Tensor] = field(kw_only=True)
    method: PoolingMethod = "cls"

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states[:, None])


@frozen(eq=False)
class TokenPooler(ClassPooler):
    """Class scores of each token, by the model's own head.

    Attributes:
        head: from states [n, hidden_size] to logits [n, num_labels].
    """

    head: Callable[[torch.Tensor], torch.Tensor] = field(kw_only=True)
    tasks: tuple[str, ...] = field(default=("token_classify",), init=False)

    @property
    def refusals(self) -> Mapping[str, str]:
        """Reasons for tasks that it does not serve."""
        reason = "the model has a head for each token, and none for the text"
        return {"classify": reason, "score": reason}

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states)


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": torch.sigmoid,
    "Softmax": lambda logits: logits.softmax(dim=-1),
    "Tanh": torch.tanh,
}
"""Activations by the name of torch's class, as a cross-encoder's folder gives them."""


def activation_of(path: Path, config: Any, num_labels: int) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the activation that the folder names, else that of transformers' text classification pipeline.

    Raises:
        ModelError: if the named one is not served.
    """
    named = sentence_transformers.activation_of(path, config)
    if named is not None:
        activation = torch_activation(named, _ACTIVATIONS)
        if activation is None:
            served = ", ".join(f"torch.nn.{name}" for name in _ACTIVATIONS)
            raise ModelError(f"{path} names the activation {named!r}", fix=f"use one of {served}")
        return named.rpartition(".")[2].lower(), activation
    if config.problem_type == "regression":
        return "no activation", lambda logits: logits
    if config.problem_type == "multi_label_classification" or num_labels == 1:
        return "sigmoid", torch.sigmoid
    return "softmax", lambda logits: logits.softmax(dim=-1)
