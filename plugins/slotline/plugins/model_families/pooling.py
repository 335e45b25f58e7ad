"""Choice of the pooler that makes embeddings or class scores of a model's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from slotline.plugins.model_families import sentence_transformers
from slotline.plugins.model_families.class_poolers import (
    ClassPooler,
    HeadPooler,
    LogitPooler,
    TokenPooler,
    activation_of,
)
from slotline.plugins.model_families.decoder import DecoderOptions
from slotline.plugins.model_families.dense_layers import DenseLayers
from slotline.plugins.model_families.embedding_pooler import EmbeddingPooler
from slotline.plugins.model_families.sentence_transformers import Recipe
from slotline.registry.contracts import ModelContext, PooledTexts, Pooler, PoolingMethod
from slotline.registry.errors import ModelError


def _token_pooler(
    context: ModelContext, hf_model: Any, head: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Pooler, tuple[str, ...]]:
    """Return the pooler of a model with a head for each token, and a note on it."""
    name, activation = activation_of(context.facts.path, hf_model.config, hf_model.config.num_labels)
    note = f"token_classify: {hf_model.config.num_labels} classes of each token, {name}"
    return TokenPooler(hf_model, activation, PooledTexts(), head=head), (note,)


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
        name, activation = activation_of(path, hf_model.config, 1 if scored else hf_model.config.num_labels)
        texts = sentence_transformers.texts_of(path)
        if scored:
            note = f"classify: the score of the last token's logits, {name}"
            return LogitPooler(hf_model, activation, texts), (note,)
        note = f"classify: {hf_model.config.num_labels} classes from the last token, {name}"
        return ClassPooler(hf_model, activation, texts), (note,)
    if context.task == "token_classify":
        return _token_pooler(context, hf_model, lambda states: hf_model.score(states))
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
    if context.task == "token_classify":
        return _token_pooler(context, hf_model, _tagger_head(hf_model))
    method: PoolingMethod = getattr(hf_model.config, "classifier_pooling", "cls")  # ModernBERT's
    where = {"cls": "the first token", "mean": "the mean of all tokens"}[method]
    if options.pooling not in ("auto", method):
        raise ModelError(
            f"pooling = {options.pooling!r}: the head of {context.facts.architecture} reads {where}",
            fix="remove pooling from [model_family.transformers_encoder]",
        )
    name, activation = activation_of(context.facts.path, hf_model.config, hf_model.config.num_labels)
    note = f"classify: {hf_model.config.num_labels} classes from {where}, {name}"
    texts = sentence_transformers.texts_of(context.facts.path)
    return HeadPooler(hf_model, activation, texts, method, head=_encoder_head(hf_model)), (note,)


def _tagger_head(hf_model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Map the states of tokens [n, hidden_size] to logits [n, num_labels]. Modules are looked up in each call."""
    if hasattr(hf_model, "head"):  # ModernBERT
        return lambda states: hf_model.classifier(hf_model.head(states))
    return lambda states: hf_model.classifier(states)


def reload_pooler(pooler: Pooler | None, path: Path) -> None:
    """Read the weights again that a pooler has beside the model."""
    if isinstance(pooler, EmbeddingPooler):
        pooler.reload(path)


def _encoder_head(hf_model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Map the pooled states [n, 1, hidden_size] to logits [n, num_labels].

    Modules are looked up in each call.
    """
    if hasattr(hf_model, "pre_classifier"):  # DistilBERT
        return lambda states: hf_model.classifier(torch.relu(hf_model.pre_classifier(states[:, 0])))
    if hasattr(hf_model, "head"):  # ModernBERT
        return lambda states: hf_model.classifier(hf_model.head(states[:, 0]))
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
