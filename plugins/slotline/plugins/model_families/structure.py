"""Parts of a decoder of transformers, found by looking at it: its body, its layers, its last norm and its sizes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization

from slotline.plugins.model_families.lighter_imports import lighter_imports

BODY = "slotline_body"
"""Attribute of a model whose decoder lies in a wrapper, e.g. OPT's."""

_SCALED = re.compile(r"embed\w*\(input_ids\)\s*\*\s*self\.(\w+)")


def without_memory(model_class: Any, config: Any) -> Any:
    """Return a new model on the meta device: shapes and dtypes, no storage.

    No initial values are drawn.
    """
    with lighter_imports(), torch.device("meta"), initialization.no_init_weights():
        model = model_class(config)
    model.tie_weights()
    return model


def find_body(hf_model: Any) -> Any:
    """Return the model with `base_model` set to the decoder without its head.

    Some classes (Llama 4's) are named after their place in a larger model, and transformers finds no body in them. Some
    wrap the decoder in a module that has nothing else (OPT, BART). The decoder's list of layers is then `layers`, and
    its last norm is `norm`, whatever their names are.
    """
    if not hasattr(hf_model, hf_model.base_model_prefix) and hasattr(hf_model, "model"):
        hf_model.base_model_prefix = "model"
    body = hf_model.base_model
    if [name for name, _ in body.named_children()] == ["decoder"]:
        object.__setattr__(hf_model, BODY, body.decoder)
        hf_model.base_model_prefix = BODY
    _name_parts(hf_model.base_model)
    return hf_model


def _name_parts(body: nn.Module) -> None:
    """Let `layers` and `norm` name these parts of a decoder, without making them children once more."""
    if not isinstance(getattr(body, "layers", None), nn.ModuleList) and (layers := layers_of(body)) is not None:
        object.__setattr__(body, "layers", layers)
    if not hasattr(body, "norm") and (norm := _last_norm(body)) is not None:
        object.__setattr__(body, "norm", norm)


def layers_of(body: nn.Module) -> nn.ModuleList | None:
    """Return the longest list of modules that is not part of another list."""
    lists: list[nn.ModuleList] = []

    def collect(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                lists.append(child)
            else:
                collect(child)

    collect(body)
    return max(lists, key=len, default=None)


def _last_norm(body: nn.Module) -> nn.Module | None:
    """Return the only norm among the children after the layers."""
    children = list(body.children())
    places = [number for number, child in enumerate(children) if child is getattr(body, "layers", None)]
    norms = [child for child in children[places[0] + 1 :] if "norm" in type(child).__name__.lower()] if places else []
    return norms[0] if len(norms) == 1 else None


def vocab_size(hf_model: Any) -> int:
    """Return the number of logits, or of embeddings in a model without a head."""
    head = hf_model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        weight = hf_model.get_input_embeddings().weight
    return int(weight.shape[0])


def hidden_size(hf_model: Any) -> int:
    """Return the width of the hidden states."""
    stated = getattr(hf_model.config, "hidden_size", None)
    return int(hf_model.get_input_embeddings().weight.shape[1] if stated is None else stated)


def embedding_scale(body: nn.Module) -> float | None:
    """Return the factor by which a decoder multiplies the embeddings of token ids, and not embeddings that it is given.

    None for the most of them, which treat both alike.
    """
    try:
        found = _SCALED.search(inspect.getsource(type(body).forward))
    except (OSError, TypeError):  # a class without a file
        return None
    return None if found is None else float(getattr(body, found[1]))


def taking(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
