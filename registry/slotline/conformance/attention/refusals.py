"""Refusal of an attention backend's undeclared features by negotiation, and notes on those that work anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any

from attrs import evolve

from slotline.registry.capability import GraphSupport, Limit
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.cache_tensors import PLAIN
from slotline.registry.descriptor import DeviceInfo, Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Asked, Need, PlanRequest, group_layers, negotiate
from slotline.registry.negotiation.codes import code_of
from slotline.registry.negotiation.request import AUTO
from slotline.testing.check import Case, Failed, Family, Level, NotApplicable, Run, check
from slotline.testing.environments.attention_choice import choose, refusal
from slotline.testing.refusal_checks import (
    UNKNOWN,
    beyond,
    candidates_with,
    expect_accepted,
    expect_refused,
    text_of,
    undeclared,
)
from slotline.testing.subject import Subject

GPU = DeviceInfo(type="cuda", name="a GPU", compute_capability=(9, 0), total_memory=1 << 36, cores=100)
FLOATS = ("float32", "bfloat16", "float16")
TYPES = ("decoder", "encoder_only", "cross")
SIZES = (1, 7, 17, 31, 16, 48, 64, 128, 256)
FLAGS = (
    "different_value_head",
    "sliding_window",
    "soft_cap",
    "sinks",
    "alibi",
    "keys_ahead",
    "position_bias",
    "index_topk",
    "mla",
    "tree_mask",
    "cascade",
    "kv_scales",
    "batch_invariant",
    "lse",
)

VALUES: Mapping[str, Callable[[Subject], Sequence[Any]]] = MappingProxyType(
    {
        "devices": lambda _: ("cpu", "cuda", UNKNOWN),
        "dtypes": lambda _: tuple(product(FLOATS, (*FLOATS, "float8_e4m3fn", "float8_e5m2"))),
        "head_sizes": lambda _: (1, 7, 63, 65, 80, 128, 320, 4096),
        "latent_sizes": lambda subject: (1, 24, 576, 4096) if subject.capabilities.mla.support else (),
        "group_sizes": lambda _: (1, 3, 5, 6, 7, 8, 12, 16, 64, 128),
        "kernel_block_sizes": lambda subject: [size for size in SIZES if not _divides(subject, size)],
        "layouts": lambda _: ("NHD", "HND"),
        "attention_types": lambda _: TYPES,
        "query_len": lambda subject: beyond(subject, "query_len"),
        **{name: lambda _: (True,) for name in FLAGS},
    }
)
"""Values of each capability; the undeclared ones are asked for."""


def _divides(subject: Subject, size: int) -> bool:
    """Return True if a declared kernel block size divides a manager's block."""
    offer = subject.capabilities.kernel_block_sizes
    return any(size % kernel == 0 and offer.refusal(kernel) is None for kernel in range(1, size + 1))


def base(subject: Subject) -> PlanRequest:
    """Return a request for only declared values."""
    types = [kind for kind in TYPES if refusal(subject, {"attention_types": kind}) is None]
    if not types:
        raise NotApplicable("no attention type that the suite knows is declared")
    case = choose(subject, ((1, 20),), attention_type=types[0])
    pair = [str(dtype).removeprefix("torch.") for dtype in (case.dtype, case.cache_dtype)]
    return PlanRequest(
        device=subject.device,
        groups=group_layers([case.layer()]),
        dtype=_asked(pair[0]),
        kv_dtype=_asked(pair[1]),
        block_size=_asked(case.block_size),
        layout=_asked(case.layout),
        graphs=_asked("none"),
        backend=_asked(subject.name) if _is_named(subject) else Asked(AUTO),
    )


def _is_named(subject: Subject) -> bool:
    """Return True for a backend that is chosen only by its name: one that approximates, or with caches of its own."""
    offer = subject.capabilities
    return bool(offer.exact.refusal(True) or offer.cache_formats.refusal(PLAIN))


def _asked(value: Any) -> Asked[Any]:
    return Asked(value, "the suite", True)


def asking(request: PlanRequest, capability: str, value: Any) -> PlanRequest:
    """Return the same request with one more need."""
    layer = request.groups[0].layer
    if changes := _layer_changes(layer, capability, value):
        return evolve(request, groups=group_layers([evolve(layer, **changes)]))
    return evolve(request, **_request_changes(request, capability, value))


def _layer_changes(layer: AttentionLayer, capability: str, value: Any) -> dict[str, Any]:
    changes: dict[str, dict[str, Any]] = {
        "head_sizes": {"head_size": value, "head_size_v": value},
        "different_value_head": {"head_size_v": layer.head_size + 8},
        "group_sizes": {"num_heads": layer.num_kv_heads * value if isinstance(value, int) else 0},
        "attention_types": {"attention_type": value},
        "sliding_window": {"window": 32, "kv_kind": "sliding"},
        "soft_cap": {"soft_cap": 30.0},
        "sinks": {"sinks": True},
        "alibi": {"alibi_slopes": (0.5,) * layer.num_heads},
        "keys_ahead": {"keys_ahead": True},
        "position_bias": {"position_bias": ((0.5, 0.0),) * layer.num_heads},
        "mla": _latent(layer, layer.head_size),
        "index_topk": {**_latent(layer, layer.head_size), "index_topk": 4, "kv_kind": "dsa"},
        "latent_sizes": _latent(layer, value),
    }
    return changes.get(capability, {})


def _latent(layer: AttentionLayer, size: Any) -> dict[str, Any]:
    """Return the changes that turn a layer into an MLA layer: one KV head for the query heads of one KV head."""
    heads = layer.num_heads // layer.num_kv_heads
    shape = {"num_heads": heads, "num_kv_heads": 1, "head_size": size, "head_size_v": size}
    return {**shape, "mla": True, "kv_kind": "mla"}


def _request_changes(request: PlanRequest, capability: str, value: Any) -> dict[str, Any]:
    if capability == "dtypes":
        return {"dtype": _asked(value[0]), "kv_dtype": _asked(value[1])}
    if capability == "devices":
        return {"device": GPU if value == "cuda" else DeviceInfo(type=value)}
    names = {"kernel_block_sizes": "block_size", "layouts": "layout", "query_len": "max_query_len"}
    if capability in ("kernel_block_sizes", "layouts", "query_len", "tree_mask", "cascade", "batch_invariant"):
        return {names.get(capability, capability): _asked(value)}
    return {"needs": (*request.needs, Need(capability=capability, value=value, origin="the suite"))}


# --- declared, and not declared


@check(Kind.ATTENTION, "attention.negotiation.declared", Level.CONTRACT, cost=0.01)
def declared(run: Run) -> None:
    """A request for declared values ends in a plan that names the backend."""
    expect_accepted(run.subject, base(run.subject))


def _register(capability: str) -> None:
    code = code_of(capability)

    def refused(run: Run) -> None:
        values = VALUES[capability](run.subject)
        value = next(item for item in values if text_of(item) == run["value"])
        request = asking(base(run.subject), capability, value)
        expect_refused(run.subject, request, code, f"{capability.replace('_', ' ')} {run['value']}")

    def cases(subject: Subject) -> Iterable[Case]:
        found = undeclared(subject, capability, VALUES[capability](subject))
        return [{"value": text_of(value)} for value in found]

    refused.__doc__ = f"What is not declared of {capability.replace('_', ' ')} is refused with {code}."
    name = f"attention.refuse.{capability}"
    check(Kind.ATTENTION, name, Level.CONTRACT, family=Family.REFUSED, cases=cases, cost=0.01)(refused)


for _capability in VALUES:
    _register(_capability)


@check(Kind.ATTENTION, "attention.refuse.unknown", Level.CONTRACT, family=Family.REFUSED, cost=0.01)
def unknown(run: Run) -> None:
    """A need that no contract knows is refused with N179."""
    request = asking(base(run.subject), UNKNOWN, True)
    expect_refused(run.subject, request, code_of(UNKNOWN), UNKNOWN)


@check(Kind.ATTENTION, "attention.refuse.min_compute_capability", Level.CONTRACT, family=Family.REFUSED, cost=0.01)
def old_device(run: Run) -> None:
    """A GPU older than the backend's kernels require is refused with N102."""
    if run.subject.capabilities.min_compute_capability is None:
        raise NotApplicable("every compute capability is declared")
    device = evolve(GPU, compute_capability=(1, 0))
    request = evolve(base(run.subject), device=device)
    expect_refused(run.subject, request, code_of("min_compute_capability"), "compute capability 1.0")


@check(Kind.ATTENTION, "attention.refuse.approximate", Level.CONTRACT, family=Family.REFUSED, cost=0.01)
def approximate(run: Run) -> None:
    """A backend that approximates is refused with N184 until it is named or allowed."""
    if run.subject.capabilities.exact.support:
        raise NotApplicable("the backend is exact")
    unnamed = evolve(base(run.subject), backend=Asked(AUTO))
    expect_refused(run.subject, unnamed, code_of("exact"), "an approximation that nobody asks for")


@check(
    Kind.ATTENTION,
    "attention.refuse.graphs",
    Level.CONTRACT,
    family=Family.REFUSED,
    needs={"graphs": GraphSupport.ALWAYS},
    cost=0.02,
)
def graphs_above_the_level(run: Run) -> None:
    """Full graphs asked for by name: refused where forward is never captured, a downgrade that strict forbids else."""
    if refusal(run.subject, {"devices": "cuda"}) is not None:
        raise NotApplicable("graphs are for GPUs, which are not declared")
    request = evolve(base(run.subject), device=GPU, graphs=_asked("full"), strict=True)
    if run.subject.capabilities.graphs.value is GraphSupport.NEVER:
        expect_refused(run.subject, request, code_of("graphs"), "graphs of all batches")
        return
    try:
        negotiate(request, *candidates_with(run.subject))
    except NegotiationError as error:
        notes = () if error.failure is None else error.failure.notes
        if "N310" not in {note.code for note in notes}:
            raise Failed(f"expected the downgrade N310, found {error}") from error
    else:
        raise Failed("graphs of mixed batches are not declared, and a strict plan has them")


# --- limits between features


def _limited(subject: Subject, limit: Limit) -> tuple[PlanRequest, str]:
    """Return a request that the offer covers by itself and the limit excludes."""
    if "graphs" in (limit.when, limit.capability):
        raise NotApplicable("graphs are judged for each phase")
    if limit.capability == "preferred_block_sizes":
        raise NotApplicable("what a backend prefers refuses nothing")
    name, _, value = limit.when.partition("=")
    request = base(subject)
    if name in ("speculation", "kv_dtype"):
        request = _under(subject, request, name)
    else:
        known = {text_of(item): item for item in VALUES[name](subject)} if name in VALUES else {}
        request = asking(request, name, known.get(value, value) if value else True)
    limit_of = getattr(limit.offer, "limit", None)
    wanted = [
        item
        for item in (*VALUES[limit.capability](subject), *(() if limit_of is None else (limit_of + 1,)))
        if limit.offer.refusal(item) is not None
        and getattr(subject.capabilities, limit.capability).refusal(item) is None
    ]
    if not wanted:
        raise NotApplicable("the limit takes away nothing that the suite can ask for")
    return asking(request, limit.capability, wanted[0]), f"{limit.capability} {text_of(wanted[0])} with {limit.when}"


def _under(subject: Subject, request: PlanRequest, name: str) -> PlanRequest:
    """Return a request with speculation, or with a cache of another dtype."""
    if name == "speculation":
        return evolve(request, query_len=_asked(2))
    for pair in VALUES["dtypes"](subject):
        if pair[0] != pair[1] and subject.capabilities.dtypes.refusal(pair) is None:
            return asking(request, "dtypes", pair)
    raise NotApplicable("no pair of two dtypes that the suite knows is declared")


@check(
    Kind.ATTENTION,
    "attention.refuse.limits",
    Level.CONTRACT,
    family=Family.REFUSED,
    cases=lambda subject: [
        {"limit": index, "when": limit.when, "capability": limit.capability}
        for index, limit in enumerate(subject.capabilities.limits)
    ],
    cost=0.01,
)
def limits(run: Run) -> None:
    """A feature excluded by a limit is refused together with its condition, with the capability's code."""
    limit = run.subject.capabilities.limits[run["limit"]]
    request, what = _limited(run.subject, limit)
    expect_refused(run.subject, request, code_of(limit.capability), what)
