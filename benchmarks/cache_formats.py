"""Error and decode speed of cache formats in one attention layer, against a cache of the activations' dtype.

    python benchmarks/cache_formats.py [--backend cpu] [--device cpu] [--requests 4] [--contexts 1024 8192 32768]

Each request has one query token. Keys and values are normal numbers, with one element of each key ten times as large,
as models have outliers in fixed channels. The error is that of the output against float32 keys, as a share of its
root mean square. Formats are timed in turn, round after round, and the medians are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
from command_line import at_least, positive

from slotline.planner.plan import make_plan
from slotline.registry.config import load_config
from slotline.registry.contracts import FORMAT_DTYPES, AttentionBatch, AttentionContext, AttentionLayer, KVSpecContext
from slotline.registry.descriptor import Kind

BLOCK = 16
ROUNDS = 7
SHORT = "--backend torch --contexts 64 --rounds 2 --formats plain int8_token_head"
"""Arguments of a short run."""


@frozen
class Side:
    """Backend with a filled cache of one format."""

    backend: Any
    cache: Any
    token_bytes: float


def main() -> None:
    """Print a line for each context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=positive, default=4)
    parser.add_argument("--heads", type=positive, nargs=3, default=(8, 2, 128), help="query heads, KV heads, size")
    parser.add_argument("--contexts", type=positive, nargs="+", default=(1024, 8192, 32768))
    parser.add_argument("--formats", nargs="+", default=("plain", *FORMAT_DTYPES), help="plain first")
    parser.add_argument("--rounds", type=at_least(2), default=ROUNDS)
    given = parser.parse_args()
    registry = make_plan(load_config(values={"device": "cpu"})).registry
    print(f"backend {given.backend} on {given.device}, {given.requests} requests, heads {given.heads}, {given.dtype}")
    for length in given.contexts:
        measure(given, registry, length)


def measure(given: argparse.Namespace, registry: Any, length: int) -> None:
    """Time one context length in every format, and compare the outputs."""
    torch.manual_seed(0)
    heads, kv_heads, size = given.heads
    layer = AttentionLayer(
        name="layer",
        index=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        head_size_v=size,
        scale=size**-0.5,
    )
    dtype, count = getattr(torch, given.dtype), given.requests
    keys, values = (torch.randn(count * length, kv_heads, size, device=given.device) for _ in range(2))
    keys[:, :, 3] *= 10
    query = torch.randn(count, heads, size, device=given.device)
    exact = expected(query, keys, values, count, layer)
    sides = {
        name: side(given, registry, layer, name, (keys.to(dtype), values.to(dtype)), length) for name in given.formats
    }
    batch, tokens = batch_of(count, length, 1, given.device), query.to(dtype)
    out = torch.empty(count, heads, size, dtype=dtype, device=given.device)
    times: dict[str, list[float]] = {name: [] for name in sides}
    errors = {}
    for _ in range(given.rounds):
        for name, each in sides.items():
            plan = each.backend.plan(batch)
            given_states = tokens, tokens[:, :kv_heads], tokens[:, :kv_heads]
            run = partial(each.backend.forward, layer, *given_states, each.cache, plan, out)
            run()
            errors[name] = float((out.float() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())
            times[name].append(timed(run, given.device))
    first = given.formats[0]
    plain = statistics.median(times[first])
    for name, each in sides.items():
        took = statistics.median(times[name])
        print(
            f"context {length:6}  {name:16} {took * 1e3:9.3f} ms  {plain / took:5.2f} times {first}'s speed  "
            f"{each.token_bytes:6.0f} bytes a token  error {100 * errors[name]:.2f} %"
        )


def timed(run: Any, device: str) -> float:
    """Return the seconds of a call, the mean of as many as fit into a tenth of a second."""
    begin, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - begin < 0.1:
        run()
        calls += 1
        if device != "cpu":
            torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def side(
    given: argparse.Namespace,
    registry: Any,
    layer: AttentionLayer,
    cache_format: str,
    states: tuple[torch.Tensor, torch.Tensor],
    length: int,
) -> Side:
    """Build a backend and its cache, and store all keys and values in it."""
    descriptor = registry.load(Kind.ATTENTION, given.backend, required=True)
    kv_dtype = FORMAT_DTYPES.get(cache_format, given.dtype)
    layout = descriptor.capabilities.layouts.options[0]
    common: dict[str, Any] = {"contract": 1, "layers": (layer,), "block_size": BLOCK, "kernel_block_size": BLOCK}
    common |= {"layout": layout, "kv_dtype": kv_dtype, "max_model_len": length}
    spec = registry.build(
        registry.load(Kind.KV_SPEC, "full" if cache_format == "plain" else "full_quantized", required=True),
        KVSpecContext(**common, format=cache_format),
    )
    context = AttentionContext(
        **common,
        device=given.device,
        dtype=given.dtype,
        max_query_len=length,
        max_requests=given.requests,
        max_tokens=given.requests * length,
        cache_format=cache_format,
    )
    backend = registry.build(descriptor, context)
    blocks = given.requests * -(-length // BLOCK) + 1
    page = spec.page_bytes(layer)
    cache = spec.bind(torch.zeros(blocks * page, dtype=torch.uint8, device=given.device), layer, blocks)
    backend.write(layer, *states, cache, backend.plan(batch_of(given.requests, length, length, given.device)))
    return Side(backend, cache, page / BLOCK)


def batch_of(count: int, length: int, query_len: int, device: str) -> AttentionBatch:
    """Return a batch of equal requests, whose blocks lie in no order."""
    each = -(-length // BLOCK)
    table = torch.randperm(count * each, generator=torch.Generator().manual_seed(1)).view(count, each) + 1
    position = torch.arange(length - query_len, length)
    slots = table[:, position // BLOCK] * BLOCK + position % BLOCK
    starts = np.arange(count + 1, dtype=np.int32) * query_len
    lens = np.full(count, length, np.int32)
    return AttentionBatch(
        num_requests=count,
        num_tokens=count * query_len,
        max_query_len=query_len,
        max_seq_len=length,
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        block_table=table.int().to(device),
        slot_mapping=slots.flatten().to(device),
        positions=position.repeat(count).to(device),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        num_decodes=count if query_len == 1 else 0,
    )


def expected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int, layer: AttentionLayer
) -> torch.Tensor:
    """Return attention in float32, [requests, H, D]."""
    group = layer.num_heads // layer.num_kv_heads
    k, v = (part.view(count, -1, layer.num_kv_heads, layer.head_size) for part in (keys, values))
    grouped = query.view(count, layer.num_kv_heads, group, -1)
    weights = torch.einsum("rhgd,rkhd->rhgk", grouped, k).mul_(layer.scale).softmax(-1)
    return torch.einsum("rhgk,rkhd->rhgd", weights, v).flatten(1, 2)


if __name__ == "__main__":
    main()
