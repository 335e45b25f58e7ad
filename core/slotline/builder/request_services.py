"""Services for requests apart from the model: tokenizer, logits processors, and limits of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slotline.builder.plugin_construction import build_plugin
from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.batch.request_table import RequestTable
from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.core.sampling.logits_processors import ProcessorPipeline, ProcessorSlot
from slotline.core.scheduler.admission import EngineLimits
from slotline.planner.plan import Planned
from slotline.registry.contracts import (
    LogitsProcessorContext,
    ResponseParser,
    ResponseParserContext,
    SchedulerPolicyContext,
    TokenSampler,
)
from slotline.registry.loading import bind_contract
from slotline.registry.policy_queue import BuiltPolicy
from slotline.text.tokenizer import Tokenizer

_PROCESSED = frozenset(
    {
        "allowed_token_ids",
        "bad_words_token_ids",
        "frequency_penalty",
        "guidance_scale",
        "logit_bias",
        "logits_processors",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
    }
)
"""Sampling parameters that only a logits processor can honour."""


def load_tokenizer(planned: Planned) -> Tokenizer | None:
    """Load the tokenizer. Return None if none is named and the model folder has none.

    A model without a tokenizer serves only token ids. A named tokenizer must load.
    """
    named = planned.loaded.path("tokenizer")
    path = named or planned.facts.path
    return Tokenizer(path) if named or any(path.glob("tokenizer*")) else None


def build_parser(planned: Planned, tokenizer: Tokenizer | None) -> ResponseParser | None:
    """Build the response parser of the plan. Return None if there is none, or no tokenizer.

    Raises:
        PluginError: if it cannot be built.
    """
    choice = planned.response_parser
    if choice.descriptor is None or tokenizer is None:
        return None
    context = ResponseParserContext(
        contract=bind_contract(choice.descriptor),
        tokenizer=tokenizer.transformers,
        chat_template=choice.facts.chat_template,
        special_tokens=choice.facts.special_tokens,
        model_type=choice.facts.model_type,
        options=planned.options(choice.descriptor),
    )
    parser: ResponseParser = planned.registry.build(choice.descriptor, context)
    return parser


def build_policy(planned: Planned) -> BuiltPolicy:
    """Build the scheduler policy of the plan.

    Raises:
        PluginError: if it cannot be built.
    """
    descriptor, config = planned.scheduler_policy, planned.loaded.config.scheduler
    context = SchedulerPolicyContext(
        contract=bind_contract(descriptor),
        max_requests=config.max_requests,
        max_batched_tokens=config.max_batched_tokens,
        max_model_len=planned.max_model_len,
        options=planned.options(descriptor),
    )
    policy = planned.registry.build(descriptor, context)
    return BuiltPolicy(
        policy=policy, capabilities=descriptor.capabilities, label=planned.registry.full_name(descriptor)
    )


def build_processors(planned: Planned, rows: RequestTable, tokenizer: Tokenizer | None = None) -> list[ProcessorSlot]:
    """Build the logits processors that the plan names.

    Raises:
        PluginError: if one cannot be built.
        CapacityError: if it takes more memory than there is.
    """
    facts, slots = planned.facts, []
    for descriptor in planned.processors:
        context = LogitsProcessorContext(
            contract=bind_contract(descriptor),
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            max_requests=rows.max_requests,
            max_model_len=rows.max_model_len,
            device=planned.device,
            options=planned.options(descriptor),
            tokenizer=None if tokenizer is None else tokenizer.transformers,
        )
        processor = build_plugin(planned.registry, descriptor, context, "lower scheduler.max_requests")
        active = np.zeros(rows.max_requests, bool)
        slots.append(
            ProcessorSlot(
                name=descriptor.name,
                source=planned.registry.source(descriptor),
                processor=processor,
                capabilities=descriptor.capabilities,
                active=active,
            )
        )
    return slots


def build_pipeline(
    planned: Planned, rows: RequestTable, slots: Sequence[ProcessorSlot], extensions: Extensions = NO_EXTENSIONS
) -> ProcessorPipeline:
    """Build the pipeline of logits processors, with the batch fields that extensions give them."""
    elsewhere = frozenset(name for one in planned.extensions for name in one.capabilities.parameters)
    givers = [one.processor_fields for one in extensions.named.values() if hasattr(one, "processor_fields")]
    fields = {slot.name: found for slot in slots for give in givers if (found := give(slot)) is not None}
    return ProcessorPipeline(
        slots, rows, _PROCESSED, planned.registry.built, handled_elsewhere=elsewhere, fields=fields
    )


def build_plain_draws(
    planned: Planned, last_tokens: PlaceholderTokens | None, staging: TransferBuffer
) -> TokenSampler | None:
    """Build the fast sampler of steps that need nothing but plain draws, with `staging` as its transfer buffer.

    Return None if the next step does not read its tokens on the device that draws them, if there are drafts, or if
    several steps are in flight, whose tokens would land in the same memory.
    """
    if last_tokens is None or last_tokens.max_spec_tokens or planned.stages.divided or planned.turns > 1:
        return None
    most = planned.loaded.config.scheduler.max_requests
    ops = planned.hardware[planned.device].ops
    return ops.token_sampler(last_tokens.tokens, staging, most, planned.facts.vocab_size)


def limits_of(planned: Planned, tokenizer: Tokenizer | None) -> EngineLimits:
    """Return the limits that new requests are checked against."""
    config = planned.loaded.config
    refusal = planned.structured_output.refusal
    if refusal is None and tokenizer is None:
        refusal = ("the model has no tokenizer", "name a folder with one under tokenizer")
    if refusal is None and not any(token < planned.facts.vocab_size for token in planned.facts.eos_token_ids):
        refusal = ("the model names no end-of-sequence token", "add eos_token_id to its generation_config.json")
    return EngineLimits(
        max_model_len=planned.max_model_len,
        max_batched_tokens=config.scheduler.max_batched_tokens,
        max_logprobs=config.sampling.max_logprobs,
        vocab_size=planned.facts.vocab_size,
        chunked_prefill=planned.chunked_prefill,
        priorities=bool(planned.scheduler_policy.capabilities.priorities.support),
        tasks=planned.facts.tasks,
        absent=_absent(planned, refusal),
    )


def _absent(planned: Planned, refusal: tuple[str, str] | None) -> dict[str, Callable[[Any], tuple[str, str]]]:
    """Return reasons and remedies for arguments of requests whose feature the plan lacks.

    Args:
        refusal: those of structured output. None if requests can have it.
    """
    absent: dict[str, Callable[[Any], tuple[str, str]]] = {}
    if refusal is not None:
        absent["structured_outputs"] = lambda _: refusal
    if planned.lora is None:
        absent["lora_request"] = lambda given: (
            f"adapter {given.lora_name!r} in an engine without adapters",
            'name a LoRA plugin, for instance lora.name = "torch"',
        )
    if not planned.loaded.config.prompt_embeds:
        absent["prompt_embeds"] = lambda _: (
            "a prompt of embeddings in an engine that takes none",
            "set prompt_embeds = true",
        )
    if "tenant" not in planned.scheduler_policy.capabilities.inputs:
        absent["tenant"] = lambda given: (
            f"tenant={given!r:.80} under scheduler.policy = {planned.scheduler_policy.name!r}, which knows no tenants",
            'set scheduler.policy = "fair"',
        )
    if not planned.facts.modalities:
        absent["features"] = lambda given: (f"{len(given)} features for a model of text alone", "leave them out")
    return absent
