"""Cache groups for tests of specs, and the memory location of each element of a bound view."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, product
from typing import Any

import torch
from attrs import evolve, frozen

from slotline.registry.capability import Align
from slotline.registry.contracts import FORMAT_DTYPES, PLAIN, AttentionLayer, KVSpecContext, LayerInput
from slotline.registry.errors import PluginError
from slotline.testing.check import Case, Failed, NotApplicable, Run
from slotline.testing.environments.state_spec import refuse_states
from slotline.testing.subject import Subject

SHAPES = {
    "gqa": (4, 2, 8, 8),
    "one_head": (4, 1, 16, 16),
    "odd": (6, 3, 5, 5),
    "short_value": (4, 2, 8, 3),
}
"""num_heads, num_kv_heads, head_size, head_size_v."""
LATENTS = {
    name: (4, 1, size, rank) for name, (size, rank) in zip(SHAPES, ((40, 32), (16, 16), (7, 5), (9, 3)), strict=True)
}
"""The same of layers with multi-head latent attention, under the same names."""

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
LAYOUTS = ("NHD", "HND")
KNOWN_KINDS = ("full", "sliding", "chunked", "mla", "dsa")
"""Kinds of layers whose visibility the suite knows; those of others are held to what holds for every kind."""
LATENT_KINDS = ("mla", "dsa")
INDEX = (
    LayerInput("index_query", (2, 12)),
    LayerInput("index_key", (12,)),
    LayerInput("index_weight", (2,), "float32"),
)
"""Inputs of layers whose index picks keys."""


def layer_of(
    shape: str = "gqa", *, index: int = 0, kind: str = "full", window: int | None = None, chunk: int | None = None
) -> AttentionLayer:
    """Return a layer of one of the `SHAPES`."""
    num_heads, num_kv_heads, head_size, head_size_v = (LATENTS if kind in LATENT_KINDS else SHAPES)[shape]
    return AttentionLayer(
        name=f"layers.{index}",
        index=index,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size_v,
        scale=1.0,
        window=window,
        chunk=chunk,
        **facts_of(kind),
    )


def facts_of(kind: str) -> dict[str, Any]:
    """Return what layers of a kind have beside their shape, as fields of `AttentionLayer`."""
    index = {"index_topk": 4, "inputs": INDEX} if kind == "dsa" else {}
    return {"kv_kind": kind, "mla": kind in LATENT_KINDS, **index}


def declared_kinds(subject: Subject) -> list[str]:
    """Return the kinds of layers that the spec declares, or the known ones if it accepts any."""
    values = subject.capabilities.kv_kinds.values
    return list(KNOWN_KINDS[:4]) if values is None else sorted(values)


def other_formats(subject: Subject) -> list[str]:
    """Return the declared formats other than ``plain``, in order of their names."""
    values = subject.capabilities.formats.values or ()
    return sorted(name for name in values if name != PLAIN)


def default_format(subject: Subject) -> str:
    """Return ``plain``, or the first declared format where that is not offered."""
    plain = subject.capabilities.formats.refusal(PLAIN) is None
    return PLAIN if plain else other_formats(subject)[0]


def is_exact(subject: Subject, kind: str) -> bool:
    """Return True if the spec declares that it holds a kind without waste."""
    return subject.capabilities.exact_kinds.refusal(kind) is None


def block_sizes(subject: Subject) -> list[int]:
    """Return the declared manager block sizes, up to three of them, or more if exhaustive.

    Raises:
        NotApplicable: if the spec holds states.
    """
    refuse_states(subject)
    offer: Align = subject.capabilities.block_sizes
    sizes = set(offer.exact)
    if offer.multiple_of is not None:
        sizes |= {offer.multiple_of, 2 * offer.multiple_of, 3 * offer.multiple_of}
    elif not sizes:
        sizes = {1, 5, 16, 48}
    return sorted(sizes)[: None if subject.exhaustive else 3]


def kernel_block_sizes(subject: Subject, block_size: int) -> list[int]:
    """Return the manager block size.

    If it can be split, also the largest and smallest divisor, or all if exhaustive.
    """
    if not subject.capabilities.splittable.support:
        return [block_size]
    divisors = [size for size in range(1, block_size) if block_size % size == 0]
    proper = divisors if subject.exhaustive else sorted({*divisors[:1], *divisors[-1:]})
    return [block_size, *reversed(proper)]


def memory_cases(subject: Subject) -> Iterable[Case]:
    """Yield each declared block size and kernel block size in each layout, with changing shapes and dtypes.

    All combinations if exhaustive.
    """
    sizes = [(size, kernel) for size in block_sizes(subject) for kernel in kernel_block_sizes(subject, size)]
    if subject.exhaustive:
        chosen = list(product(SHAPES, DTYPES, sizes, LAYOUTS))
    else:
        shapes, dtypes = cycle(SHAPES), cycle(DTYPES)  # 4 and 3: a pair repeats after twelve steps
        rounds = max(2, -(-12 // len(sizes)))
        chosen = [(next(shapes), next(dtypes), size, LAYOUTS[n % 2]) for n in range(rounds) for size in sizes]
    return [
        {"shape": shape, "dtype": dtype, "block_size": size, "kernel_block_size": kernel, "layout": layout}
        for shape, dtype, (size, kernel), layout in chosen
    ]


def group_cases(subject: Subject) -> list[Case]:
    """Return groups of layers with known visibility: kinds, windows around the edges of a block, and mixed groups."""
    cases: list[Case] = []
    kinds = [kind for kind in declared_kinds(subject) if kind in KNOWN_KINDS]
    for size in block_sizes(subject):
        if "full" in kinds:
            cases.append({"kind": "full", "block_size": size})
        cases += [{"kind": kind, "block_size": size} for kind in LATENT_KINDS if kind in kinds]
        if "sliding" in kinds:
            windows = {1, 2, size - 1, size, size + 1, size + 2, 2 * size, 2 * size + 1} - {0}
            cases += [{"kind": "sliding", "window": window, "block_size": size} for window in sorted(windows)]
        if "chunked" in kinds:
            chunks = {1, size - 1, size, size + 1, 2 * size, 3 * size} - {0}
            cases += [{"kind": "chunked", "chunk": chunk, "block_size": size} for chunk in sorted(chunks)]
        if {"full", "sliding"} <= set(kinds) and not is_exact(subject, "sliding"):
            cases.append({"kind": "mixed", "window": size + 1, "block_size": size})  # they share a table then
    return cases


def every_kind_cases(subject: Subject) -> list[Case]:
    """Return the groups of known kinds, and one of each other kind."""
    others = [kind for kind in declared_kinds(subject) if kind not in KNOWN_KINDS]
    return [*group_cases(subject), *({"kind": k, "block_size": n} for k in others for n in block_sizes(subject))]


@frozen(eq=False)
class Group:
    """Built spec and the cache group that it was built for."""

    spec: Any
    context: KVSpecContext
    exact: bool

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """Layers of the context."""
        return self.context.layers

    @property
    def block_size(self) -> int:
        """Block size of the context."""
        return self.context.block_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence of the context."""
        return self.context.max_model_len

    @property
    def ratio(self) -> int:
        """Number of kernel blocks in a manager block."""
        return self.context.block_size // self.context.kernel_block_size

    def describe(self) -> str:
        """Return the group in a few words, for messages."""
        layers = [
            " ".join([layer.kv_kind, *(f"{what} {n}" for what in ("window", "chunk") if (n := getattr(layer, what)))])
            for layer in self.layers
        ]
        return f"blocks of {self.block_size} tokens, layers: {', '.join(layers)}"


def context_of(run: Run, **changes: Any) -> KVSpecContext:
    """Return the build context for a case of `memory_cases`, `group_cases` or `every_kind_cases`."""
    case = run.case
    block_size = int(case["block_size"])
    kind = case.get("kind") or _first_kind(run.subject)
    shape = case.get("shape", "gqa")
    if kind == "mixed":
        layers: tuple[AttentionLayer, ...] = (
            layer_of(shape),
            layer_of("odd", index=1, kind="sliding", window=case["window"]),
        )
    else:
        window = case.get("window", block_size + 1) if kind == "sliding" else None
        chunk = case.get("chunk", 2 * block_size) if kind == "chunked" else None
        layers = tuple(
            layer_of(s, index=i, kind=kind, window=window, chunk=chunk) for i, s in enumerate((shape, "odd"))
        )
    cache_format = case.get("format") or default_format(run.subject)
    context = KVSpecContext(
        contract=1,
        layers=layers,
        block_size=block_size,
        kernel_block_size=case.get("kernel_block_size", block_size),
        layout=case.get("layout", "NHD"),
        kv_dtype=FORMAT_DTYPES.get(cache_format, case.get("dtype", "float32")),
        max_model_len=6 * block_size + 3,
        format=cache_format,
    )
    return evolve(context, **changes)


def build_group(run: Run, **changes: Any) -> Group:
    """Return the spec for a case.

    A quantised dtype or a shorter value head may be refused when the spec is built, because the contract has no
    capability for them.

    Raises:
        NotApplicable: if it is refused, with the plugin's reason.
    """
    context = context_of(run, **changes)
    try:
        spec = run.subject.build(context)
    except PluginError as error:
        if context.kv_dtype.startswith("float8") or run.case.get("shape") == "short_value":
            raise NotApplicable(f"refused when built: {error.message}") from error
        raise
    return Group(spec, context, all(is_exact(run.subject, layer.kv_kind) for layer in context.layers))


def _first_kind(subject: Subject) -> str:
    kinds = declared_kinds(subject)
    return next((kind for kind in kinds if kind in KNOWN_KINDS), kinds[0])


def element_bytes(view: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Return the byte in `raw` at which each element of `view` begins, int64 of the view's shape.

    It is computed from strides.

    Raises:
        Failed: if the view is not of the raw memory.
    """
    if view.untyped_storage().data_ptr() != raw.untyped_storage().data_ptr():
        raise Failed("bind returned a tensor with memory of its own: what is written to it is lost")
    places = torch.full((1,) * view.dim(), int(view.storage_offset()), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        places = places + (torch.arange(size) * stride).view([-1 if d == dim else 1 for d in range(view.dim())])
    return places * view.element_size() - int(raw.storage_offset())
