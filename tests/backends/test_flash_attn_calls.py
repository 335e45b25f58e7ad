"""How the `flash_attn` backends call their libraries, on a machine that has neither a GPU nor the libraries.

The libraries' functions are replaced by ones that compute in torch what their documentation says, and refuse what the
libraries refuse. On a GPU the conformance suite runs the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from slotline.testing.environments.attention import Case, World
from slotline.testing.environments.attention_shapes import SHAPES, with_empty_rows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the libraries run here")

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 17},
    "window and freed blocks": {"window": 17, "freed_before_window": True},
    "soft cap": {"soft_cap": 5.0, "amplitude": 6.0},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.5},
    "heads first": {"layout": "HND"},
    "alibi": {"alibi": True},
    "alibi, soft cap, sinks": {"alibi": True, "soft_cap": 5.0, "amplitude": 6.0, "sinks": True},
}
VERSIONS = {"backend:FlashAttnBackend": 256, "hopper:FlashAttn3Backend": 16}
"""Class -> smallest page."""


def attention(
    query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], length: int, table: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one request: query [q, H, D] over `length` keys; output [q, H, D] and natural log-sum-exp [H, q]."""
    count, group = query.shape[0], query.shape[1] // cache[0].shape[2]
    pages = table[: -(-length // cache[0].shape[1])].long()
    keys, values = (part[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for part in cache)
    scores = query.double().transpose(0, 1) @ keys.permute(1, 2, 0) * options["softmax_scale"]
    if cap := options["softcap"]:
        scores = cap * torch.tanh(scores / cap)
    if (slopes := options.get("alibi_slopes")) is not None:
        assert options["window_size"] == (-1, -1)
        assert slopes.dtype == torch.float32
        scores = scores + slopes.double()[:, None, None] * torch.arange(length)  # causal: by column alone
    own = torch.arange(length - count, length)[:, None]
    seen = torch.arange(length) <= own
    if (left := options["window_size"][0]) >= 0:
        seen &= torch.arange(length) >= own - left
        # Tiles lie inside a page, and those before the window are not read.
        values = values.clone()
        values[: max(0, length - count - left) // cache[0].shape[1] * cache[0].shape[1]] = 0.0
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, 2).nan_to_num(0.0)
    return (weights @ values.transpose(0, 1)).transpose(0, 1), torch.logsumexp(scores, 2)


def ragged(
    query: Any, cache: Any, starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, **options: Any
) -> Any:
    """Of requests one behind the other: output [tokens, H, D] and log-sum-exp [H, tokens]."""
    found = [
        attention(query[starts[i] : starts[i + 1]], cache, int(lens[i]), table[i], **options) for i in range(len(lens))
    ]
    return torch.cat([out for out, _ in found]).to(query.dtype), torch.cat([lse for _, lse in found], 1).float()


def uniform(query: Any, cache: Any, lens: torch.Tensor, table: torch.Tensor, **options: Any) -> Any:
    """Of requests side by side: query and output [B, q, H, D], log-sum-exp [B, H, q]."""
    found = [attention(query[i], cache, int(lens[i]), table[i], **options) for i in range(len(lens))]
    return torch.stack([out for out, _ in found]).to(query.dtype), torch.stack([lse for _, lse in found]).float()


def version_2() -> ModuleType:
    library = ModuleType("flash_attn")

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, block_table, causal, return_softmax_lse, **options
    ):  # type: ignore[no-untyped-def]
        assert k_cache.shape[1] % 256 == 0
        assert causal
        assert return_softmax_lse
        return uniform(q, (k_cache, v_cache), cache_seqlens, block_table, **options)

    def flash_attn_varlen_func(  # type: ignore[no-untyped-def]
        q, k, v, query_starts, key_starts, longest, longest_key, *, block_table, causal, return_attn_probs, **options
    ):
        assert k.shape[1] % 256 == 0
        assert causal
        counts, lens = query_starts.diff(), key_starts.diff()
        assert int(query_starts[0]) == int(key_starts[0]) == 0
        assert longest >= int(counts.max())
        assert longest_key >= int(lens.max())
        assert longest > 1 or len(q) == len(counts), "for 1 it takes every request to have a token"
        return *ragged(q, (k, v), query_starts, lens, block_table, **options), None

    library.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    library.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return library


def version_3() -> ModuleType:
    library = ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(  # type: ignore[no-untyped-def]
        q,
        k_cache,
        v_cache,
        *,
        cache_seqlens,
        page_table,
        cu_seqlens_q,
        max_seqlen_q,
        causal,
        return_softmax_lse,
        **options,
    ):
        assert causal
        assert return_softmax_lse
        cache = (k_cache, v_cache)
        if cu_seqlens_q is None:
            return *uniform(q, cache, cache_seqlens, page_table, **options), None
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        return *ragged(q, cache, cu_seqlens_q, cache_seqlens, page_table, **options), None

    library.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return library


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours = ("backend", "hopper")
    for library in (version_2(), version_3()):
        monkeypatch.setitem(sys.modules, library.__name__, library)
    for name in ours:
        monkeypatch.delitem(sys.modules, f"slotline.backends.flash_attn.{name}", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    for name in ours:
        sys.modules.pop(f"slotline.backends.flash_attn.{name}", None)


def made(version: str, world: World) -> Any:
    module, attribute = version.split(":")
    return getattr(import_module(f"slotline.backends.flash_attn.{module}"), attribute)(world.case.context())


BOTH = [(version, features) for version in VERSIONS for features in FEATURES if not features.startswith("alibi")]
ALIBI = [("backend:FlashAttnBackend", features) for features in FEATURES if features.startswith("alibi")]
"""FlashAttention 3 takes no slopes."""


@pytest.mark.spread(39, slow=0)
@pytest.mark.parametrize(("version", "features"), BOTH + ALIBI)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_calls_give_the_oracles_attention(version: str, shape: str, features: str) -> None:
    size = VERSIONS[version]
    requests = with_empty_rows(SHAPES[shape](16))
    case = Case(requests=requests, head_size=64, dtype=torch.float16, block_size=size, **FEATURES[features])
    world = World(case)
    world.check(*world.run(made(version, world)))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("count", [1, 5])
def test_requests_of_equal_length_take_one_call(version: str, count: int) -> None:
    case = Case(requests=((count, 40), (count, 9), (count, 300)), block_size=VERSIONS[version], dtype=torch.float16)
    world = World(case)
    backend = made(version, world)
    assert [part.query_len for part in backend.plan(world.batch).parts] == [count]
    world.check(*world.run(backend))
