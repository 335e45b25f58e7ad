"""Plugins of this root: model families, cache specs, connectors, LoRA, logits processors and structured output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slotline.registry import Descriptor, hookimpl


@hookimpl
def slotline_model_family() -> Iterable[Descriptor[Any]]:
    """Offer the model families."""
    from slotline.plugins.model_families import decoder, encoder, speech, vision

    return (
        decoder.descriptor,
        vision.descriptor,
        encoder.descriptor,
        speech.descriptor,
    )


@hookimpl
def slotline_kv_spec() -> Iterable[Descriptor[Any]]:
    """Offer the KV-cache specs."""
    from slotline.plugins.kv_specs import chunked_local, cross_attention, full, mla, sliding

    return (
        full.descriptor,
        sliding.descriptor,
        chunked_local.descriptor,
        mla.descriptor,
        cross_attention.descriptor,
    )


@hookimpl
def slotline_kv_connector() -> Iterable[Descriptor[Any]]:
    """Offer the KV connectors."""
    from slotline.plugins.kv_connectors import host_memory

    return (host_memory.descriptor,)


@hookimpl
def slotline_lora() -> Iterable[Descriptor[Any]]:
    """Offer the LoRA backends."""
    from slotline.plugins.lora import grouped, segmented

    return (
        grouped.descriptor,
        segmented.descriptor,
    )


@hookimpl
def slotline_logits_processor() -> Iterable[Descriptor[Any]]:
    """Offer the logits processors."""
    from slotline.plugins.logits_processors import (
        allowed_token_ids,
        bad_words,
        callables,
        dry,
        guidance,
        logit_bias,
        min_p,
        min_tokens,
        mirostat,
        no_repeat_ngram,
        penalties,
        thinking_budget,
        xtc,
    )

    return (
        allowed_token_ids.descriptor,
        bad_words.descriptor,
        callables.descriptor,
        dry.descriptor,
        guidance.descriptor,
        logit_bias.descriptor,
        min_p.descriptor,
        min_tokens.descriptor,
        mirostat.descriptor,
        no_repeat_ngram.descriptor,
        penalties.descriptor,
        thinking_budget.descriptor,
        xtc.descriptor,
    )


@hookimpl
def slotline_structured_output() -> Iterable[Descriptor[Any]]:
    """Offer the grammar compilers."""
    from slotline.plugins.structured_output import llguidance, xgrammar

    return (
        llguidance.descriptor,
        xgrammar.descriptor,
    )
