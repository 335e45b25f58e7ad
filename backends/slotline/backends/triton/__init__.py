"""Descriptor of the `triton` attention backend: our own paged kernels for GPUs."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

from attrs import evolve, frozen

from slotline.backends.keys_ahead import KEYS_AHEAD, LIMITS
from slotline.backends.triton.index_scores import workspace
from slotline.kernels.gluon_support import HOPPER, SERVED, has_hopper_kernels, why_no_gluon
from slotline.kernels.triton_support import why_no_triton
from slotline.registry.capability import Align, Choice, Flag, GraphSupport, Level, Limit, Range, Set, Support
from slotline.registry.contracts.attention import INDEX_INPUTS, AttentionCapabilities
from slotline.registry.contracts.attention_edges import NORM, ROTARY
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES, LATENT_INDEX, PLAIN
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind

FLOATS = ("float32", "bfloat16", "float16")
E4M3 = (8, 9)
"""Compute capability from which Triton compiles conversions of float8_e4m3fn."""
HOPPER_BLOCKS = Limit(
    when="latent_sizes=576",
    capability="preferred_block_sizes",
    offer=Align(multiple_of=64),
    note="the copy engine fetches 64 latents at a time",
)
NOT_WITH_LATENTS = (
    "sliding_window",
    "soft_cap",
    "sinks",
    "alibi",
    "cascade",
    "kv_scales",
    "batch_invariant",
)


@frozen(kw_only=True)
class TritonOptions:
    """`[backend.triton]`.

    Attributes:
        prompts: source of the keys of a prompt that begins in this step. ``step`` reads the step's own tensors if the
            device's copy engine can fetch them (Hopper and newer). ``pages`` reads the cache, as for all others.
        decodes: kernel for requests with one query token each. ``hopper`` uses Hopper's own kernel if Triton
            compiles it and it is faster for their number, and otherwise the common kernel. ``common`` always uses the
            common kernel.
    """

    prompts: Literal["step", "pages"] = "step"
    decodes: Literal["hopper", "common"] = "hopper"


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if Triton's kernels can run. Older GPUs lack the instructions for bfloat16, or for e4m3."""
    if device.type == "cuda" and (reason := why_no_triton()):
        return reason
    if device.compute_capability is not None and device.compute_capability < E4M3:
        pairs = descriptor.capabilities.dtypes.values or ()
        return evolve(descriptor.capabilities, dtypes=Set(pair for pair in pairs if pair[1] != "float8_e4m3fn"))
    offer = descriptor.capabilities
    if has_hopper_kernels(device.compute_capability):
        reason = f"{offer.priority_reason}; Hopper's own kernels for {SERVED}"
        return evolve(offer, priority_reason=reason, limits=(*offer.limits, HOPPER_BLOCKS))
    if device.compute_capability is not None and device.compute_capability[0] == HOPPER:
        reason = f"{offer.priority_reason}; Hopper's own kernels for {SERVED} are not used: {why_no_gluon()}"
        return evolve(offer, priority_reason=reason)
    return offer


descriptor = Descriptor(
    kind=Kind.ATTENTION,
    name="triton",
    capabilities=AttentionCapabilities(
        devices=Set(("cuda",)),
        min_compute_capability=(8, 0),
        dtypes=Set(product(FLOATS, (*FLOATS, "float8_e4m3fn", "float8_e5m2", "int8", "uint8"))),
        head_sizes=Range(minimum=1, maximum=256),
        different_value_head=Flag(True),
        layouts=Choice(("NHD", "HND")),
        sliding_window=Flag(True),
        soft_cap=Flag(True),
        sinks=Flag(True),
        alibi=Flag(True),
        tree_mask=Flag(True),
        request_trees=Flag(True),
        keys_ahead=KEYS_AHEAD,
        mla=Flag(True),
        latent_sizes=Range(minimum=1, maximum=576),
        cascade=Flag(True),
        cascade_prefixes="levels",
        kv_scales=Flag(True),
        cache_formats=Set((PLAIN, *FORMAT_DTYPES, LATENT_INDEX)),
        index_topk=Flag(True),
        layer_inputs=Set(INDEX_INPUTS),
        edges=Set((NORM, ROTARY)),
        graphs=Level(GraphSupport.ALWAYS),
        plan_once=Flag(True),
        plain_writes=True,
        several_plans=True,
        any_strides=True,
        bounded_lengths=True,
        workspace=workspace,
        scores=Flag(True, "a matrix product in float32, beside the kernels"),
        lse=Flag(True, "natural log; a sink counts as one more key"),
        batch_invariant=Flag(True, "one kernel for all lengths, keys unsplit"),
        limits=(
            *LIMITS,
            Limit(when="mla", capability="dtypes", offer=Set(product(FLOATS, FLOATS))),
            *(Limit(when="mla", capability=name, offer=Flag(Support.NOT_IMPLEMENTED)) for name in NOT_WITH_LATENTS),
            Limit(
                when="alibi",
                capability="cascade",
                offer=Flag(Support.NOT_IMPLEMENTED),
                note="the prefix's kernel knows no query's position",
            ),
            Limit(
                when="batch_invariant",
                capability="tree_mask",
                offer=Flag(Support.UNSUPPORTED),
                note="the bits of products in float32 depend on the mask",
            ),
        ),
        priority=50,
        priority_reason="reads the cache in place, for decode, prefill and verification",
    ),
    factory="slotline.backends.triton.build:build",
    options=TritonOptions,
    probe="slotline.backends.triton:probe",
    summary="paged decode with split keys, prefill, mixed batches and verification in Triton",
)
