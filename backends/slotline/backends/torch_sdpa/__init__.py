"""Descriptor of the `torch` attention backend: plain PyTorch on any device, the one that others are compared with."""

from __future__ import annotations

from itertools import product

from slotline.backends.keys_ahead import TREES
from slotline.registry.capability import Choice, Flag, Limit, Set, Support
from slotline.registry.contracts.attention import INDEX_INPUTS, AttentionCapabilities
from slotline.registry.contracts.attention_edges import EDGES
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES, LATENT_INDEX, PLAIN
from slotline.registry.descriptor import Descriptor, Kind

FLOATS = ("float32", "bfloat16", "float16")

descriptor = Descriptor(
    kind=Kind.ATTENTION,
    name="torch",
    capabilities=AttentionCapabilities(
        devices=Set(("cpu", "cuda")),
        dtypes=Set(product(FLOATS, (*FLOATS, "float8_e4m3fn", "float8_e5m2", "int8", "uint8"))),
        different_value_head=Flag(True),
        layouts=Choice(("NHD", "HND")),
        attention_types=Set(("decoder", "encoder_only", "cross")),
        sliding_window=Flag(True),
        encoder_window=Flag(True),
        keys_ahead=Flag(True),
        chunked=Flag(True),
        soft_cap=Flag(True),
        sinks=Flag(True),
        alibi=Flag(True),
        position_bias=Flag(True),
        mla=Flag(True),
        tree_mask=Flag(True),
        request_trees=Flag(True),
        cascade=Flag(True),
        cascade_prefixes="levels",
        kv_scales=Flag(True),
        cache_formats=Set((PLAIN, *FORMAT_DTYPES, LATENT_INDEX)),
        index_topk=Flag(True),
        layer_inputs=Set(INDEX_INPUTS),
        edges=Set(EDGES),
        scores=Flag(True, "a matrix product in float32, beside the kernels"),
        lse=Flag(True, "natural log; a sink counts as one more key"),
        limits=(
            Limit(
                when="sliding_window",
                capability="attention_types",
                offer=Set(("decoder", "encoder_only")),
                note="the contract defines no windows for cross-attention",
            ),
            Limit(
                when="chunked",
                capability="attention_types",
                offer=Set(("decoder",)),
                note="the contract defines chunks for causal attention alone",
            ),
            Limit(
                when="position_bias",
                capability="attention_types",
                offer=Set(("decoder",)),
                note="the contract defines a position bias for causal attention alone",
            ),
            Limit(
                when="alibi",
                capability="attention_types",
                offer=Set(("decoder",)),
                note="the contract defines ALiBi for causal attention alone",
            ),
            TREES,
            *(
                Limit(
                    when=f"cache_formats={name}",
                    capability="mla",
                    offer=Flag(Support.UNSUPPORTED),
                    note="the format has keys and values",
                )
                for name in FORMAT_DTYPES
            ),
            Limit(
                when=f"cache_formats={LATENT_INDEX}",
                capability="dtypes",
                offer=Set(product(FLOATS, FLOATS)),
                note="the format has no scales",
            ),
            Limit(
                when="index_topk",
                capability="cascade",
                offer=Flag(Support.UNSUPPORTED),
                note="an index picks among all keys of a request together",
            ),
        ),
        bounded_lengths=True,
        several_plans=True,
        any_strides=True,
        priority=10,
        priority_reason="runs everywhere, gathers the cache before it computes",
    ),
    factory="slotline.backends.torch_sdpa.backend:TorchBackend",
    summary="gather and matrix products in float32; any device, any feature",
)
