"""Prompts of models with an encoder in front of a decoder: which part is the encoder's, and which the decoder's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

ENCODER, DECODER = "encoder_prompt", "decoder_prompt"
_TEXTS = ("prompt", "prompt_token_ids")


def one_prompt(fields: Mapping[str, Any], reader: Any) -> dict[str, Any]:
    """Return the fields of a prompt whose encoder reads a text under `ENCODER`, and its decoder's under `DECODER`.

    Those of another model's prompt are returned in the form that has no encoder's part of its own.

    Args:
        fields: a prompt as it was given.
        reader: of the extension `multimodal`, None for a model of text alone.

    Raises:
        RequestError: if the model has no encoder for it, or a part is there twice.
    """
    reads_text = reader is not None and reader.prompt is not None
    if ENCODER not in fields:
        if DECODER in fields:
            raise RequestError("a decoder_prompt without an encoder_prompt", fix="give both, or 'prompt' alone")
        return _plain(fields) if reads_text else dict(fields)
    if twice := sorted(set(_TEXTS) & set(fields)):
        raise RequestError(f"a prompt has {', '.join(twice)} beside encoder_prompt", fix="give one of them")
    if reads_text:
        return {DECODER: None, **fields}
    if reader is None or not reader.cross:
        raise RequestError(
            "an encoder_prompt for a model whose encoder, if it has one, reads no prompt",
            fix="give 'prompt', or use an encoder-decoder model",
        )
    return _of_items(fields)


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a prompt that is the encoder's."""
    rest = {name: value for name, value in fields.items() if name not in _TEXTS}
    return {**rest, ENCODER: {name: fields[name] for name in _TEXTS if name in fields}, DECODER: None}


def _of_items(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a prompt whose encoder reads items, such as a recording: the prompt is the decoder's."""
    rest = {name: value for name, value in fields.items() if name not in (ENCODER, DECODER)}
    given, decoder = fields[ENCODER], fields.get(DECODER)
    if not isinstance(given, Mapping) or "multi_modal_data" not in given or decoder is None:
        raise RequestError(
            f"encoder_prompt={safe_repr(given, 80)} for an encoder that reads items, with "
            f"decoder_prompt={safe_repr(decoder, 80)}",
            fix="give {'encoder_prompt': {'multi_modal_data': ...}, 'decoder_prompt': ...}",
        )
    return {**rest, **as_fields(decoder), "multi_modal_data": given["multi_modal_data"]}


def as_fields(prompt: Any) -> dict[str, Any]:
    """Return a text, token ids, or a mapping that holds one of them, as a mapping."""
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
