"""Construction of structured output from a plan's parts."""

from __future__ import annotations

from functools import partial

from slotline.builder.parts import Parts
from slotline.plugins.structured_output.extension import StructuredOutputs
from slotline.plugins.structured_output.grammar_compiler import GrammarCompiler
from slotline.plugins.structured_output.mask_cache import MaskCache
from slotline.registry.contracts import (
    ExtensionContext,
    StructuredOutput,
    StructuredOutputCapabilities,
    StructuredOutputContext,
)
from slotline.registry.loading import bind_contract


def build(context: ExtensionContext) -> StructuredOutputs | None:
    """Build structured output. Return None without a tokenizer or an end-of-sequence token.

    The plugin itself is built now if the configuration names it, else when a request first needs it.

    Raises:
        PluginError: if a named plugin cannot be built.
    """
    parts: Parts = context.parts
    planned, tokenizer = parts.planned, parts.tokenizer
    descriptor, config = planned.structured_output.descriptor, planned.loaded.config
    eos_token_ids = tuple(token for token in planned.facts.eos_token_ids if token < context.vocab_size)
    if descriptor is None or tokenizer is None or not eos_token_ids:
        return None
    own = StructuredOutputContext(
        contract=bind_contract(descriptor),
        tokenizer=tokenizer.transformers,
        vocab_size=context.vocab_size,
        eos_token_ids=eos_token_ids,
        max_requests=context.max_requests,
        options=planned.options(descriptor),
    )

    def cache_of(backend: StructuredOutput) -> MaskCache:
        return MaskCache(backend.token_text, eos_token_ids, forces=not capabilities.every_tokenization)

    capabilities: StructuredOutputCapabilities = descriptor.capabilities
    keeps = capabilities.reusable_masks and config.structured_output.keep_masks
    compiler = GrammarCompiler(
        partial(planned.registry.build, descriptor, own),
        threads=config.structured_output.compile_threads,
        capacity=config.structured_output.cached_grammars,
        cache_of=cache_of if keeps else None,
    )
    if config.structured_output.backend != "auto":
        compiler.build()
    return StructuredOutputs(
        descriptor.name,
        capabilities,
        compiler,
        parts.rows,
        vocab_size=context.vocab_size,
        eos_token_ids=eos_token_ids,
        device=planned.hardware[context.device],
        profiler=parts.profiler,
        ahead=not planned.asynchronous,
        count_nans=config.observability.count_nans,
        source=planned.registry.source(descriptor),
        plugins=planned.registry.built,
        decode=tokenizer.decode,
    )
