"""L0 of cache specs, of blocks and of states: descriptor, capabilities, factory, methods."""

from __future__ import annotations

from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES
from slotline.registry.contracts.kv_spec import (
    KVSpecCapabilities,
    KVSpecContext,
    StateSpecContext,
)
from slotline.registry.descriptor import Kind
from slotline.testing.check import NotApplicable, Run
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.kv_spec import LATENT_KINDS, default_format, facts_of
from slotline.testing.environments.state_spec import context_of, declared_kinds, holds_states
from slotline.testing.subject import Subject

KINDS = ("full", "sliding", "chunked", "mla", "dsa", "mamba", "cross", "encoder_only")
"""Kinds of layers, the usual first; a spec that declares others is asked for the first of its own."""
SIZES = (16, 32, 64, 48, 128, 256, 1)


def kind_of(subject: Subject) -> str:
    """Return a kind of layer that the spec declares."""
    declared = subject.capabilities.kv_kinds.values
    known = [kind for kind in KINDS if declared is None or kind in declared] or sorted(declared or ())
    if not known:
        raise NotApplicable("no kind of layer is declared")
    return str(known[0])


def block_size_of(subject: Subject) -> int:
    """Return a block size that the spec declares."""
    offer = subject.capabilities.block_sizes
    base = () if offer.multiple_of is None else (offer.multiple_of,)
    return int(next(size for size in (*SIZES, *offer.exact, *base) if offer.refusal(size) is None))


def _context(run: Run) -> KVSpecContext | StateSpecContext:
    return _state_context(run) if holds_states(run.subject) else _block_context(run)


def _state_context(run: Run) -> StateSpecContext:
    return context_of(declared_kinds(run.subject)[0], unit=16)


def _block_context(run: Run) -> KVSpecContext:
    kind, size = kind_of(run.subject), block_size_of(run.subject)
    layer = AttentionLayer(
        name="model.layers.0.self_attn",
        index=0,
        num_heads=4,
        num_kv_heads=1 if kind in LATENT_KINDS else 2,
        head_size=64,
        head_size_v=64,
        scale=0.125,
        window=size + 1 if kind == "sliding" else None,
        chunk=2 * size if kind == "chunked" else None,
        **facts_of(kind),
    )
    cache_format = default_format(run.subject)
    return KVSpecContext(
        contract=1,
        layers=(layer,),
        block_size=size,
        kernel_block_size=size,
        layout="NHD",
        kv_dtype=FORMAT_DTYPES.get(cache_format, "float32"),
        format=cache_format,
        max_model_len=8 * size,
    )


register_contract_checks(KindContract(kind=Kind.KV_SPEC, capabilities=KVSpecCapabilities, context=_context))
