"""Cases that fit a backend's declared capabilities.

A check sets the values that matter to it. `choose` fills the rest with values that the descriptor allows. A backend
with one dtype, one head size or pages of 48 tokens therefore runs the same checks as a backend without restrictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import torch
from attrs import evolve, fields

from slotline.registry.capability import Range
from slotline.registry.contracts.cache_tensors import FORMAT_DTYPES, KEY_BOUNDS, LATENT_INDEX, PLAIN
from slotline.testing.check import NotApplicable, Run
from slotline.testing.environments.attention import Case, World, threads
from slotline.testing.environments.attention_formats import CodedWorld
from slotline.testing.environments.attention_index import IndexedWorld
from slotline.testing.environments.attention_shapes import Requests
from slotline.testing.environments.attention_told import Told
from slotline.testing.environments.attention_written import WrittenWorld
from slotline.testing.subject import Subject

PAIRS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"))
HEAD_SIZES = (64, 80, 96, 128, 40, 7, 16, 32, 48, 72, 112, 160, 192, 256, 512, 576)
"""Sizes that models have, and a few that are no power of two; the first that is declared is the usual one."""
GROUPS = (3, 2, 4, 1, 5, 6, 7, 8)
LATENTS = {40: 32, 72: 64, 576: 512, 36: 24, 24: 16}
"""Sizes of an MLA key, and of the latent in it: small ones, DeepSeek's, and some whose parts are no power of two."""
BLOCK_SIZES = (16, 8, 48, 1)
WORLDS: Mapping[str, type[World]] = {
    PLAIN: World,
    KEY_BOUNDS: World,
    LATENT_INDEX: IndexedWorld,
    **dict.fromkeys(FORMAT_DTYPES, CodedWorld),
}
"""Formats that the suite can lay out."""


def dtype_pairs(subject: Subject) -> tuple[tuple[str, str], ...]:
    """Return the declared (dtype, cache dtype) pairs of plain caches that this torch has, those of one dtype first.

    If any pair is accepted, the usual three are returned.

    Raises:
        NotApplicable: if all declared pairs are of caches with codes.
    """
    declared = subject.capabilities.dtypes.values
    found = PAIRS if declared is None else sorted(declared, key=_pair_order)
    known = [pair for pair in found if all(isinstance(getattr(torch, name, None), torch.dtype) for name in pair)]
    plain = tuple(pair for pair in known if getattr(torch, pair[1]).is_floating_point)
    if known and not plain:
        raise NotApplicable("no dtype pair of a plain cache is declared")
    return plain


def _pair_order(pair: tuple[str, str]) -> tuple[int, tuple[str, str]]:
    return (PAIRS.index(pair) if pair in PAIRS else len(PAIRS), pair)


def head_sizes(subject: Subject) -> tuple[int, ...]:
    """Return a few declared head sizes, the usual one first, with the ends of the range and all single values."""
    offer = subject.capabilities.head_sizes
    usual = _covered(offer, HEAD_SIZES)
    return tuple(dict.fromkeys((*usual[: None if subject.exhaustive else 6], *_ends(offer))))


def latent_sizes(subject: Subject) -> tuple[int, ...]:
    """Return declared sizes of an MLA key, the usual one first."""
    offer = subject.capabilities.latent_sizes
    return tuple(dict.fromkeys((*_covered(offer, LATENTS), *_ends(offer))))


def group_sizes(subject: Subject) -> tuple[int, ...]:
    """Return declared numbers of query heads per KV head, the usual one first."""
    offer = subject.capabilities.group_sizes
    return tuple(dict.fromkeys((*_covered(offer, GROUPS), *_ends(offer))))


def block_sizes(subject: Subject) -> tuple[int, ...]:
    """Return declared kernel block sizes: all exact ones, a base and two multiples, or a few if any is accepted.

    Preferred sizes are included, because engines use them.
    """
    offer, preferred = subject.capabilities.kernel_block_sizes, subject.capabilities.preferred_block_sizes
    base = () if offer.multiple_of is None else tuple(n * offer.multiple_of for n in (1, 2, 3))
    wanted = (*preferred.exact, *(() if preferred.multiple_of is None else (preferred.multiple_of,)))
    return tuple(dict.fromkeys((*((*offer.exact, *base) or BLOCK_SIZES), *wanted)))


def layouts(subject: Subject) -> tuple[str, ...]:
    """Return declared physical orders of a page, preferred first."""
    return tuple(subject.capabilities.layouts.options)


def _covered(offer: Range, values: Iterable[int]) -> tuple[int, ...]:
    return tuple(value for value in values if offer.refusal(value) is None)


def _ends(offer: Range) -> tuple[int, ...]:
    lowest = max(1, -(-offer.minimum // offer.step)) * offer.step
    highest = () if offer.maximum is None else (offer.maximum // offer.step * offer.step,)
    return _covered(offer, (lowest, *highest, *offer.extra))


def needs_of(case: Case) -> dict[str, Any]:
    """Return the needs of a case by capability, in the form of negotiation."""
    return {
        "dtypes": tuple(str(dtype).removeprefix("torch.") for dtype in (case.dtype, case.stored_dtype)),
        "cache_formats": case.cache_format,
        **_sizes_of(case),
        "group_sizes": case.num_heads // case.num_kv_heads,
        "kernel_block_sizes": case.block_size,
        "layouts": case.layout,
        "attention_types": case.attention_type,
        "query_len": max((query_len for query_len, _ in case.requests), default=0),
        "sliding_window": case.window is not None and case.attention_type != "encoder_only",
        "encoder_window": case.window is not None and case.attention_type == "encoder_only",
        "soft_cap": case.soft_cap is not None,
        "sinks": case.sinks,
        "alibi": case.alibi,
        "keys_ahead": case.keys_ahead,
        "position_bias": case.position_bias,
        "index_topk": case.index_topk is not None,
        "kv_scales": case.kv_scales is not None,
    }


def _sizes_of(case: Case) -> dict[str, Any]:
    if case.mla:
        return {"mla": True, "latent_sizes": case.head_size}
    return {"head_sizes": case.head_size, "different_value_head": case.head_size_v not in (None, case.head_size)}


def refusal(subject: Subject, needs: Mapping[str, Any], conditions: Iterable[str] = ()) -> str | None:
    """Return the reason why a backend does not cover some needs, or None. Limits count as in negotiation."""
    active = set(conditions) | {name for name, value in needs.items() if value is True}
    active |= {f"{name}={value}" for name, value in needs.items()}
    if len(set(needs.get("dtypes", ()))) > 1:
        active.add("kv_dtype")
    for name, value in needs.items():
        if value is None or value is False:
            continue
        narrowed = [limit for limit in subject.capabilities.limits if limit.capability == name and limit.when in active]
        for offer in [getattr(subject.capabilities, name), *(limit.offer for limit in narrowed)]:
            if (text := offer.refusal(value)) is not None:
                return f"not declared: {name.replace('_', ' ')} {text}"
    return None


def choose(
    subject: Subject,
    requests: Requests | Callable[[int], Requests] = ((1, 33),),
    *,
    conditions: Iterable[str] = (),
    group: int | None = None,
    **fixed: Any,
) -> Case:
    """Return a case with `fixed` fields and declared values for all others.

    Args:
        subject: the backend.
        requests: (query tokens, length) of each, or a function of the block size. Query tokens are cut to the longest
            declared query.
        conditions: names under which limits apply, in addition to those that follow from the case.
        group: query heads per KV head. There are two KV heads unless `fixed` sets another number.
        fixed: fields of `Case`.

    Raises:
        NotApplicable: if `fixed` or a needed feature is not declared.
    """
    wanted = dict(fixed)
    if (why := refusal(subject, features_of(wanted), conditions)) is not None:
        raise NotApplicable(why)
    if "dtype" not in wanted:
        dtype, kv_dtype = _first(subject, wanted, conditions, "dtypes", dtype_pairs(subject))
        wanted.update(dtype=getattr(torch, dtype), kv_dtype=getattr(torch, kv_dtype))
    sizes = ("latent_sizes", latent_sizes(subject)) if wanted.get("mla") else ("head_sizes", head_sizes(subject))
    for name, capability, values in (
        ("head_size", *sizes),
        ("block_size", "kernel_block_sizes", block_sizes(subject)),
    ):
        if name not in wanted:
            wanted[name] = _first(subject, wanted, conditions, capability, values)
    if wanted.get("mla"):
        wanted["num_kv_heads"] = 1
        size = wanted["head_size"]
        wanted.setdefault("head_size_v", LATENTS.get(size, size - size // 9))
    if "num_heads" not in wanted:
        kv_heads = wanted.setdefault("num_kv_heads", 2)
        if group is None:
            group = _first(subject, wanted, conditions, "group_sizes", group_sizes(subject))
        wanted["num_heads"] = group * kv_heads
    wanted.setdefault("layout", subject.capabilities.layouts.options[0])
    if "cache_format" not in wanted:
        wanted["cache_format"] = _usual_format(subject)
    wanted.setdefault("stale", subject.companion is not None)
    shape = requests(wanted["block_size"]) if callable(requests) else requests
    limit = longest_query(subject, wanted, conditions)
    encoder = wanted.get("attention_type", "decoder") == "encoder_only"
    cut = tuple((min(q, limit), min(length, limit) if encoder else length) for q, length in shape)
    case = Case(requests=cut, **wanted)
    if (why := refusal(subject, needs_of(case), conditions)) is not None:
        raise NotApplicable(why)
    return case


def chosen(run: Run, requests: Requests | Callable[[int], Requests], **fixed: Any) -> Case:
    """Call `choose` with the fields of the run's case. Names of dtypes become dtypes."""
    known = ({each.name for each in fields(Case)} | {"group"}) - {"requests"}
    named = {name: value for name, value in run.case.items() if name in known}
    for name in ("dtype", "kv_dtype"):
        if name in named:
            named[name] = getattr(torch, named[name])
    return choose(run.subject, requests, **{**named, **fixed})


def _usual_format(subject: Subject) -> str:
    """Return ``plain``, or the format that a backend without it reads: its companion's, or that with bounds."""
    offer = subject.capabilities.cache_formats
    if offer.refusal(PLAIN) is None:
        return PLAIN
    if subject.companion is not None:
        own: str = min(subject.companion.capabilities.formats.values)
        return own
    return KEY_BOUNDS if offer.refusal(KEY_BOUNDS) is None else PLAIN


def _first(
    subject: Subject, wanted: Mapping[str, Any], conditions: Iterable[str], capability: str, values: Sequence[Any]
) -> Any:
    features = features_of(wanted)
    for value in values:
        if refusal(subject, {**features, capability: value}, conditions) is None:
            return value
    raise NotApplicable(f"no value of {capability.replace('_', ' ')} that the suite knows is declared")


def features_of(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features among the fields of a case, by capability."""
    return {
        "sliding_window": wanted.get("window") is not None and wanted.get("attention_type") != "encoder_only",
        "encoder_window": wanted.get("window") is not None and wanted.get("attention_type") == "encoder_only",
        "soft_cap": wanted.get("soft_cap") is not None,
        "sinks": bool(wanted.get("sinks")),
        "alibi": bool(wanted.get("alibi")),
        "keys_ahead": bool(wanted.get("keys_ahead")),
        "position_bias": bool(wanted.get("position_bias")),
        "index_topk": wanted.get("index_topk") is not None,
        "different_value_head": wanted.get("head_size_v") is not None and not wanted.get("mla"),
        "mla": bool(wanted.get("mla")),
        "attention_types": wanted.get("attention_type", "decoder"),
    }


def longest_query(subject: Subject, wanted: Mapping[str, Any], conditions: Iterable[str] = ()) -> int:
    """Return the most declared query tokens of one request with these features, a large number for no limit."""
    features = features_of(wanted)
    length = 1 << 20
    while length > 1 and refusal(subject, {**features, "query_len": length}, conditions) is not None:
        length = _next_lower(subject, length)
    return length


def _next_lower(subject: Subject, length: int) -> int:
    offers = [subject.capabilities.query_len]
    offers += [limit.offer for limit in subject.capabilities.limits if limit.capability == "query_len"]
    return max((o.limit for o in offers if o.limit is not None and o.limit < length), default=1)


def need_query(subject: Subject, length: int, **fields: Any) -> None:
    """Raise `NotApplicable` unless requests may have `length` query tokens."""
    if (limit := longest_query(subject, fields)) < length:
        raise NotApplicable(f"not declared: query len needs {length}, offers at most {limit}")


def build(run: Run, case: Case, layers: int = 1, num_threads: int = 1, *, told: bool = False) -> Any:
    """Return the backend that the subject's factory builds for a case, with `num_threads` threads of torch.

    One that hears of blocks is told before each plan (see `Told`), unless the caller tells it itself (`told`).
    """
    with threads(num_threads):
        backend = run.subject.build(case.context(device_of(run.subject), layers=layers))
    return Told(backend, case.block_size) if run.subject.capabilities.block_events and not told else backend


def device_of(subject: Subject) -> str:
    """Return the torch device to create tensors on."""
    return subject.device.type


def world(run: Run, case: Case, seed: int | None = None) -> World:
    """Return a world for a case, seeded by the run or with another seed."""
    seed = run.seed if seed is None else seed
    run.batch = evolve(case, seed=seed % (1 << 31))
    with threads(1):
        return maker(run)(run.batch, device_of(run.subject))


def maker(run: Run) -> Callable[[Case, str], World]:
    """Return what makes a world of a case on a device, with the kind of cache that the case's format asks for."""

    def make(case: Case, device: str) -> World:
        known = WORLDS.get(case.cache_format)
        return WrittenWorld(case, device, run.subject) if known is None else known(case, device)

    return make


def writes_cache(run: Run) -> bool:
    """Return True if the backend's forward stores the new tokens itself."""
    return bool(run.subject.capabilities.writes_cache)


def prove(run: Run, case: Case, num_threads: int = 1) -> World:
    """Build a backend, run one step of a case, compare it with the oracle, and return the world."""
    made = world(run, case)
    examine(run, made, num_threads=num_threads)
    return made


def examine(run: Run, made: World, backend: Any = None, num_threads: int = 1) -> torch.Tensor:
    """Run one step in an existing world, compare it with the oracle, and return the output."""
    backend = build(run, made.case, num_threads=num_threads) if backend is None else backend
    out, _ = made.run(backend, writes_cache(run), num_threads)
    made.check(out, run=run)
    return out


def pairwise(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield few combinations that contain each pair of values of two axes. Greedy and deterministic."""
    names = list(axes)
    left = {
        ((a, i), (b, j))
        for a, b in combinations(names, 2)
        for i, j in product(range(len(axes[a])), range(len(axes[b])))
    }
    rows = list(product(*(range(len(axes[name])) for name in names)))
    if len(names) < 2:
        yield from ({names[0]: value} for value in axes[names[0]]) if names else ()
        return
    while left:
        best = max(rows, key=lambda row: len(_pairs(names, row) & left))
        left -= _pairs(names, best)
        yield {name: axes[name][index] for name, index in zip(names, best, strict=True)}


def _pairs(names: Sequence[str], row: Sequence[int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    marked = list(zip(names, row, strict=True))
    return set(combinations(marked, 2))
