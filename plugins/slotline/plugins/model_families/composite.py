"""The text part of models that also read images or sound, from the folder that holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from attrs import evolve
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from slotline.plugins.model_families import structure
from slotline.plugins.model_families.causal import causal_class
from slotline.plugins.model_families.cropped_images import TextAlone
from slotline.plugins.model_families.decoder import INNER
from slotline.plugins.model_families.logits import WholeHead
from slotline.registry.errors import ModelError
from slotline.registry.loading import one_line

_LEFT_OUT = "slotline_left_out"


def is_composite(config: Any, model_class: Any) -> bool:
    """Return True if a configuration holds that of a decoder beside those of other parts."""
    return config.get_text_config(decoder=True) is not config and hasattr(model_class, "config_class")


def text_class(path: Path, architecture: str, config: Any) -> tuple[Any, Any]:
    """Return the class and the configuration of the text part.

    Raises:
        ModelError: if transformers has no decoder class for it.
    """
    text = config.get_text_config(decoder=True)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if model_class is None:
        model_class = _inner_class(text)
    if model_class is None:
        raise ModelError(
            f"the text part of {architecture} in {path} ({text.model_type}) has no class of its own in transformers",
            fix="use a checkpoint of another architecture, or a plugin that serves this one",
        )
    return model_class, text


def _inner_class(text: Any) -> Any | None:
    """Return the causal class of a decoder that exists only inside models with vision, None for others."""
    inner = MODEL_MAPPING.get(type(text), None)
    made = None if inner is None or len(inner.__bases__) != 1 else causal_class(inner)
    return made if made is not None and made.__name__ in INNER else None


def loadable(found: Any) -> Any:
    """Return a checkpoint whose whole model can be built, with a class that leaves its encoders out, or the text part.

    Gemma 3n's vision tower needs a package (timm) that the text part does not.
    """
    if found.whole is None:
        return found
    original, config = found.whole
    kept = (found.model_class, _body_class(found))
    bare = _class_without(original, lambda whole: _leave_out(whole, kept))
    try:
        with torch.device("meta"):
            bare(config)
    except ImportError:
        return evolve(found, whole=None)
    return evolve(found, whole=(bare, config))


@cache
def without_inner(model_class: Any) -> Any:
    """Return the class of a decoder that holds its encoders, without them."""
    return _class_without(model_class, _replace_inner)


def _replace_inner(hf_model: Any) -> tuple[str]:
    hf_model.model.embed_tokens_extend = TextAlone()
    return ("model.embed_tokens_extend",)


def left_out(model: Any) -> tuple[str, ...]:
    """Return the names of the parts that a model of one of these classes lost."""
    return getattr(model, _LEFT_OUT, ())


def _class_without(original: Any, leave_out: Callable[[Any], Iterable[str]]) -> Any:
    """Return a class of the same name whose models lose parts, as `leave_out` does it, before they have weights."""

    class Bare(original):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            setattr(self, _LEFT_OUT, tuple(leave_out(self)))

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Bare, name, getattr(original, name))
    return Bare


def _body_class(found: Any) -> Any:
    """Return the class of a causal model's decoder without its head."""
    with torch.device("meta"):
        hf_model = found.model_class(found.config)
    return type(getattr(hf_model, _body_name(hf_model)))


def _body_name(hf_model: Any) -> str:
    return hf_model.base_model_prefix if hasattr(hf_model, hf_model.base_model_prefix) else "model"


def _leave_out(whole: Any, kept: tuple[Any, ...]) -> Iterator[str]:
    """Take from a model all modules beside its decoder and its head, and yield their names.

    Args:
        kept: classes of the decoder, with a head and without.
    """
    head = whole.get_output_embeddings()
    wanted: list[str] = []  # the outermost ones
    for name, module in whole.named_modules():
        if (type(module) in kept or module is head) and not f"{name}.".startswith(tuple(f"{one}." for one in wanted)):
            wanted.append(name)
    parts = [name.split(".") for name in wanted]
    for parent in {".".join(part[:depth]) for part in parts for depth in range(len(part))}:
        above = whole.get_submodule(parent)
        for name in list(above._modules):
            full = f"{parent}.{name}".removeprefix(".")
            if not any(f"{one}.".startswith(f"{full}.") for one in wanted):
                delattr(above, name)
                yield full


TEXT_KEYS: Mapping[str, str] = MappingProxyType(
    {r"^model\.language_model\.": "model.", r"^language_model\.(model|lm_head)\.": r"\1."}
)
"""Names of the text part's weights in a whole model's files -> in the text part's own."""


def refuse_quantized(found: Any) -> None:
    """Refuse a composite model whose files hold quantized weights.

    Raises:
        ModelError: always for such a model.
    """
    if found.whole is not None:
        raise ModelError(
            f"{found.path} holds quantized weights of {found.architecture}, whose text part is read in full precision "
            "only",
            fix="use the checkpoint in bfloat16, or set weights.quantize, or use one of the text part alone",
        )


def text_part(whole: Any, found: Any, attention: str) -> Any:
    """Return the decoder of a loaded model as a causal model of its own, whose layers call the function `attention`.

    Args:
        whole: the transformers model. It loses its decoder.
        found: the decoder's checkpoint.

    Raises:
        ModelError: if the decoder is not a part of the whole model.
    """
    inner = next((module for module in whole.modules() if type(module) is found.model_class), None)
    if inner is not None:  # Llama 4 has a whole causal model inside
        inner.config._attn_implementation = attention
        return structure.find_body(inner)
    with torch.device("meta"):
        hf_model = found.model_class(found.config)
    prefix = _body_name(hf_model)
    wanted = type(getattr(hf_model, prefix))
    body = next((module for module in whole.modules() if type(module) is wanted), None)
    if body is None:
        raise ModelError(
            f"{found.architecture} in {found.path} has no {wanted.__name__} inside",
            fix="use a model family plugin that serves this architecture",
        )
    setattr(hf_model, prefix, body)
    hf_model.set_output_embeddings(whole.get_output_embeddings())
    hf_model.config = body.config  # the very object that the attention modules read
    hf_model.config._attn_implementation = attention
    hf_model = structure.find_body(hf_model)
    _refuse_other_logits(whole, hf_model, found)
    return hf_model


@torch.no_grad()
def _refuse_other_logits(whole: Any, hf_model: Any, found: Any) -> None:
    """Compare what a whole model and its text part make of the same hidden states.

    Raises:
        ModelError: if the logits differ, since a whole model may leave out the scale of its text part.
    """
    weight = hf_model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, structure.hidden_size(hf_model), generator=generator).to(weight.dtype)
    try:
        expected, own = WholeHead(whole)(states), WholeHead(hf_model)(states)
    except Exception as error:  # of the whole model's own forward, which may want images
        raise ModelError(
            f"the logits of {found.architecture} in {found.path} cannot be compared with those of its text part: "
            f"{one_line(error)}",
            fix="use a checkpoint of the text part alone, or a model family plugin that serves this architecture",
        ) from error
    if expected.shape != own.shape or not torch.allclose(expected, own, rtol=1e-2, atol=1e-2):
        raise ModelError(
            f"{found.architecture} in {found.path} makes other logits than {type(hf_model).__name__}, its text part",
            fix="use a checkpoint of the text part alone, or a model family plugin that serves this architecture",
        )
