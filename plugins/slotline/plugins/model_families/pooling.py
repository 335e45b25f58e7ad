"""Poolers: what makes embeddings and class scores of a decoder's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen

from slotline.kernels.async_copy import to_device
from slotline.plugins.model_families import logit_score, sentence_transformers
from slotline.plugins.model_families.decoder import DecoderOptions
from slotline.plugins.model_families.dense_layers import DenseLayers
from slotline.plugins.model_families.sentence_transformers import Recipe
from slotline.registry.contracts import ModelContext, PooledTexts, Pooler, PoolingMethod, PoolingParams
from slotline.registry.errors import ModelError, RequestError


@frozen(eq=False)
class EmbeddingPooler:
    """Embeddings: pooled states, cut to the requested dimensions and divided by their length.

    Cutting before normalising follows Matryoshka Representation Learning (Kusupati et al., 2022, section 3).

    Attributes:
        recipe: the checkpoint's recipe, or the default.
        hidden_size: numbers in a whole embedding, after the linear layers.
        dimensions: lengths that the model was trained for, None if it was trained for one length.
        dense: linear layers over the pooled states.
    """

    recipe: Recipe
    hidden_size: int
    dimensions: Sequence[int] | None = None
    dense: DenseLayers | None = None

    @property
    def method(self) -> PoolingMethod:
        """Hidden states to use."""
        return self.recipe.method

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of requests."""
        return ("token_embed",) if self.recipe.each_token else ("embed", "token_embed")

    @property
    def texts(self) -> PooledTexts:
        """Prompts and similarity."""
        return self.recipe.texts

    @property
    def refusals(self) -> Mapping[str, str]:
        """Reasons for tasks that it does not serve."""
        return (
            {"embed": "the model has a vector for each token, and none for the text"} if self.recipe.each_token else {}
        )

    def reload(self, path: Path) -> None:
        """Read the linear layers again, from the same places in a folder.

        Raises:
            ModelError: if they cannot be read.
        """
        if self.dense is not None:
            self.dense.load([path / folder.name for folder in self.recipe.dense])

    def adjust(self, params: PoolingParams) -> PoolingParams:
        """See `slotline.registry.contracts.pooling.Pooler.adjust`."""
        wanted = self.recipe.dimensions if params.dimensions is None else params.dimensions
        if wanted not in (None, self.hidden_size) and (self.dimensions is None or wanted not in self.dimensions):
            raise RequestError(f"dimensions={wanted} is not served by this model", fix=self._allowed())
        normalize = self.recipe.normalize if params.normalize is None else params.normalize
        return evolve(params, dimensions=wanted or self.hidden_size, normalize=normalize)

    def pool(self, states: torch.Tensor, params: Sequence[PoolingParams]) -> torch.Tensor:
        """Return embeddings [n, hidden_size] float32. Numbers past a request's dimensions are 0."""
        if self.dense is not None:
            states = self.dense(states)
        sizes = [one.dimensions or self.hidden_size for one in params]
        if min(sizes, default=self.hidden_size) < self.hidden_size:
            ends = to_device(np.array(sizes), states.device)  # [n] int64
            kept = torch.arange(self.hidden_size, device=states.device) < ends[:, None]  # [n, hidden_size] bool
            states = states * kept
        flags = [bool(one.normalize) for one in params]
        if not any(flags):
            return states
        lengths = states.norm(dim=-1, keepdim=True).clamp_min(1e-12)  # [n, 1]
        if not all(flags):
            chosen = to_device(np.array(flags), states.device)  # [n] bool
            lengths = torch.where(chosen[:, None], lengths, 1.0)
        normalized: torch.Tensor = states / lengths
        return normalized

    def _allowed(self) -> str:
        if self.dimensions is None:
            return (
                f"leave dimensions out: the model's embeddings have {self.hidden_size} numbers, and its config.json "
                "names neither is_matryoshka nor matryoshka_dimensions"
            )
        if isinstance(self.dimensions, range):
            return f"use 1 to {self.hidden_size}"
        return f"use one of {', '.join(map(str, self.dimensions))}"


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
    """Class scores of an encoder: its own head over the first token's state, as transformers does.

    Attributes:
        head: from states [n, 1, hidden_size] to logits [n, num_labels].
    """

    head: Callable[[torch.Tensor], torch.Tensor] = field(kw_only=True)
    method: PoolingMethod = "cls"

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states[:, None])


def make_pooler(context: ModelContext, hf_model: Any) -> tuple[Pooler | None, tuple[str, ...]]:
    """Return the pooler of a loaded model's task, and a note on it. None if tokens are generated.

    Raises:
        ModelError: if the checkpoint or the options ask for a pooling that the task does not have.
    """
    options = context.options if isinstance(context.options, DecoderOptions) else DecoderOptions()
    if context.task != "embed" and options.pooling != "auto":
        raise ModelError(
            f"pooling = {options.pooling!r} is for task 'embed', and the task is {context.task!r}",
            fix="remove pooling from [model_family.transformers_decoder], or set task = 'embed'",
        )
    if context.task == "embed":
        return _embedding_pooler(context, hf_model.config, options)
    if context.task == "classify":
        path = context.facts.path
        scored = sentence_transformers.scores_tokens(path)
        name, activation = _activation(path, hf_model.config, 1 if scored else hf_model.config.num_labels)
        texts = sentence_transformers.texts_of(path)
        if scored:
            note = f"classify: the score of the last token's logits, {name}"
            return LogitPooler(hf_model, activation, texts), (note,)
        note = f"classify: {hf_model.config.num_labels} classes from the last token, {name}"
        return ClassPooler(hf_model, activation, texts), (note,)
    return None, ()


def make_encoder_pooler(context: ModelContext, hf_model: Any) -> tuple[Pooler, tuple[str, ...]]:
    """Return the pooler of a loaded encoder's task, and a note on it.

    Embeddings are those of the first token unless the folder or the options select others.

    Raises:
        ModelError: if the checkpoint or the options ask for a pooling that the task does not have.
    """
    options = context.options if isinstance(context.options, DecoderOptions) else DecoderOptions()
    if context.task == "embed":
        return _embedding_pooler(context, hf_model.config, options, default="cls")
    if options.pooling not in ("auto", "cls"):
        raise ModelError(
            f"pooling = {options.pooling!r}: the head of {context.facts.architecture} reads the first token",
            fix="remove pooling from [model_family.transformers_encoder]",
        )
    name, activation = _activation(context.facts.path, hf_model.config, hf_model.config.num_labels)
    note = f"classify: {hf_model.config.num_labels} classes from the first token, {name}"
    texts = sentence_transformers.texts_of(context.facts.path)
    return HeadPooler(hf_model, activation, texts, head=_encoder_head(hf_model)), (note,)


def reload_pooler(pooler: Pooler | None, path: Path) -> None:
    """Read the weights again that a pooler has beside the model."""
    if isinstance(pooler, EmbeddingPooler):
        pooler.reload(path)


def _encoder_head(hf_model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Map the first token's states [n, 1, hidden_size] to logits [n, num_labels].

    Modules are looked up in each call.
    """
    if hasattr(hf_model, "pre_classifier"):  # DistilBERT
        return lambda states: hf_model.classifier(torch.relu(hf_model.pre_classifier(states[:, 0])))
    if getattr(hf_model.base_model, "pooler", None) is not None:  # BERT
        return lambda states: hf_model.classifier(hf_model.base_model.pooler(states))
    return lambda states: hf_model.classifier(states)  # RoBERTa's head takes the first token itself


def _embedding_pooler(
    context: ModelContext, config: Any, options: DecoderOptions, default: PoolingMethod = "last"
) -> tuple[EmbeddingPooler, tuple[str, ...]]:
    recipe = _recipe(context, options, default)
    pooled = "a vector for each token" if recipe.each_token else f"{recipe.method} pooling"
    note = f"embed: {pooled}{', normalized' if recipe.normalize else ''}, from {recipe.origin}"
    if recipe.method != "last":
        note += "; every prompt is computed as a whole, so no cached prefix is reused"
    size, dense = context.facts.hidden_size, None
    if recipe.dense:
        dense = DenseLayers(recipe.dense, torch.device(context.device), size)
        size = dense.size
        note += f", {len(recipe.dense)} linear layers"
    if recipe.texts.prompts:
        note += f"; prompts {', '.join(recipe.texts.prompts)}, by default {recipe.texts.default_prompt or 'none'}"
    return EmbeddingPooler(recipe, size, _dimensions(config, size, recipe), dense), (note,)


def _recipe(context: ModelContext, options: DecoderOptions, default: PoolingMethod) -> Recipe:
    """Return the options' pooling if they name one, else the checkpoint's, else the default, normalised.

    The defaults are vLLM's for models that were not trained for embeddings.
    """
    named: PoolingMethod | None = None if options.pooling == "auto" else options.pooling
    if sentence_transformers.present(context.facts.path):
        return sentence_transformers.read(context.facts.path, context.facts.hidden_size, named)
    origin = "the default" if named is None else "the option `pooling`"
    return Recipe(method=named or default, normalize=True, origin=origin)


def _dimensions(config: Any, hidden_size: int, recipe: Recipe) -> Sequence[int] | None:
    """Return the lengths that a Matryoshka model lists in config.json, or the folder's default."""
    listed = getattr(config, "matryoshka_dimensions", None)
    if listed:
        return tuple(listed)
    if recipe.dimensions is not None:
        return (recipe.dimensions,)
    return range(1, hidden_size + 1) if getattr(config, "is_matryoshka", False) else None


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda logits: logits,
    "Sigmoid": torch.sigmoid,
    "Softmax": lambda logits: logits.softmax(dim=-1),
    "Tanh": torch.tanh,
}
"""Activations by the name of torch's class, as a cross-encoder's folder gives them."""


def _activation(path: Path, config: Any, num_labels: int) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the activation that the folder names, else that of transformers' text classification pipeline.

    Raises:
        ModelError: if the named one is not served.
    """
    named = sentence_transformers.activation_of(path, config)
    if named is not None:
        activation = _ACTIVATIONS.get(named.rpartition(".")[2]) if named.startswith("torch.nn.") else None
        if activation is None:
            served = ", ".join(f"torch.nn.{name}" for name in _ACTIVATIONS)
            raise ModelError(f"{path} names the activation {named!r}", fix=f"use one of {served}")
        return named.rpartition(".")[2].lower(), activation
    if config.problem_type == "regression":
        return "no activation", lambda logits: logits
    if config.problem_type == "multi_label_classification" or num_labels == 1:
        return "sigmoid", torch.sigmoid
    return "softmax", lambda logits: logits.softmax(dim=-1)
