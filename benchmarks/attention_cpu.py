"""Attention backends on a CPU: microseconds of one layer, and gigabytes of keys and values read per second.

    python benchmarks/attention_cpu.py [--threads 2] [--layout HND] [--quick | --shapes 16:1:1024]

`dense` is PyTorch's own attention over contiguous keys and values of equal lengths: what a layer would cost without
paging. Calls of the three take turns, so that a disturbance of the machine meets all alike; figures are lower
quartiles, for the same reason. Every call sees another cache out of several, as a model's layers do, so that the
processor's own caches do not flatter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib import import_module

import numpy as np
import torch
from attrs import frozen
from command_line import at_least, positive

from slotline.registry.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionContext,
    AttentionLayer,
    KVCache,
)

SHORT = "--dtype float32 --rounds 2 --shapes 2:1:32 1:16:16"
HEADS, KV_HEADS, SIZE, BLOCK = 12, 4, 64, 16
CACHE_BYTES = 256 << 20
DTYPES = ("float32", "bfloat16")


@frozen
class Shape:
    """A batch: `requests` with `query_len` new tokens each, `context` tokens in all."""

    requests: int
    query_len: int
    context: int

    def kv_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.requests * self.context * KV_HEADS * SIZE * dtype.itemsize


def shape(text: str) -> Shape:
    """Read a shape from REQUESTS:QUERY:CONTEXT."""
    try:
        found = Shape(*(positive(part) for part in text.split(":")))
    except TypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not REQUESTS:QUERY:CONTEXT") from None
    if found.query_len > found.context:
        raise argparse.ArgumentTypeError(f"{text!r} has more new tokens than tokens in all")
    return found


DECODES = [Shape(requests, 1, context) for requests in (1, 16, 64) for context in (128, 1024, 4096)]
SHAPES = [*DECODES, Shape(16, 5, 1024), Shape(1, 512, 512), Shape(1, 512, 4096)]


BACKENDS = {"torch": "slotline.backends.torch_sdpa", "cpu": "slotline.backends.cpu"}


def build(name: str, dtype: torch.dtype, layout: str) -> AttentionBackend:
    """The backend called `name`, from its descriptor."""
    module, factory = import_module(BACKENDS[name]).descriptor.factory.split(":")
    kind = str(dtype).removeprefix("torch.")
    context = AttentionContext(
        contract=1,
        layers=(layer(),),
        device="cpu",
        dtype=kind,
        kv_dtype=kind,
        block_size=BLOCK,
        kernel_block_size=BLOCK,
        layout=layout,
        max_query_len=8192,
        max_requests=256,
        max_tokens=8192,
        max_model_len=8192,
    )
    backend: AttentionBackend = getattr(import_module(module), factory)(context)
    return backend


def layer() -> AttentionLayer:
    return AttentionLayer(
        name="layer",
        index=0,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        head_size_v=SIZE,
        scale=SIZE**-0.5,
    )


def make_cache(num_blocks: int, dtype: torch.dtype, layout: str) -> KVCache:
    shape = (BLOCK, KV_HEADS) if layout == "NHD" else (KV_HEADS, BLOCK)
    data = torch.randn(num_blocks, 2, *shape, SIZE).to(dtype)
    views = data.unbind(1)
    return KVCache(*(view if layout == "NHD" else view.transpose(1, 2) for view in views))


def make_batch(shape: Shape) -> AttentionBatch:
    per_request = -(-shape.context // BLOCK)
    table = (torch.randperm(shape.requests * per_request) + 1).view(shape.requests, per_request).int()
    starts = np.arange(shape.requests + 1, dtype=np.int32) * shape.query_len
    lens = np.full(shape.requests, shape.context, np.int32)
    position = torch.arange(shape.context - shape.query_len, shape.context).repeat(shape.requests)
    request = torch.arange(shape.requests).repeat_interleave(shape.query_len)
    slots = table[request, position // BLOCK].long() * BLOCK + position % BLOCK
    return AttentionBatch(
        num_requests=shape.requests,
        num_tokens=int(starts[-1]),
        max_query_len=shape.query_len,
        max_seq_len=shape.context,
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_table=table,
        slot_mapping=slots,
        positions=position,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        num_decodes=shape.requests if shape.query_len == 1 else 0,
    )


def measure(shape: Shape, dtype: torch.dtype, layout: str, rounds: int) -> dict[str, float]:
    """Seconds of one layer's write and attention by name, lower quartiles."""
    batch = make_batch(shape)
    copies = max(1, min(12, CACHE_BYTES // shape.kv_bytes(dtype)))
    caches = [make_cache(int(batch.block_table.max()) + 1, dtype, layout) for _ in range(copies)]
    query, out = (torch.randn(batch.num_tokens, HEADS, SIZE).to(dtype) for _ in range(2))
    new = torch.randn(batch.num_tokens, KV_HEADS, SIZE).to(dtype)
    one = layer()

    def paged(name: str) -> Callable[[int], object]:
        backend = build(name, dtype, layout)
        plan = backend.plan(batch)

        def call(turn: int) -> object:
            cache = caches[turn % copies]
            backend.write(one, new, new, cache, plan)
            return backend.forward(one, query, new, new, cache, plan, out)

        return call

    calls = {"torch": paged("torch"), "cpu": paged("cpu"), "dense": dense(shape, dtype, copies)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            begin = time.perf_counter()
            call(turn)
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.quantiles(values[2:], n=4)[0] for name, values in times.items()}


def dense(shape: Shape, dtype: torch.dtype, copies: int) -> Callable[[int], object]:
    keys = [torch.randn(2, shape.requests, KV_HEADS, shape.context, SIZE).to(dtype) for _ in range(copies)]
    query = torch.randn(shape.requests, HEADS, shape.query_len, SIZE).to(dtype)
    visible = torch.ones(shape.query_len, shape.context, dtype=torch.bool).tril(shape.context - shape.query_len)
    mask = None if shape.query_len in (1, shape.context) else visible

    def call(turn: int) -> object:
        key, value = keys[turn % copies]
        causal = shape.query_len == shape.context
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True
        )

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--layout", default="HND", choices=("NHD", "HND"))
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--rounds", type=at_least(2), default=30)
    parser.add_argument("--quick", action="store_true", help="decode of batch 1 and 16 up to 1024 tokens, prefill 512")
    parser.add_argument("--shapes", type=shape, nargs="+", metavar="REQUESTS:QUERY:CONTEXT", help="these alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{HEADS} heads, {KV_HEADS} KV heads, head size {SIZE}, blocks of {BLOCK}, {options.layout}, ", end="")
    print(f"{options.threads} threads, torch {torch.__version__}; microseconds (GB/s of keys and values)")
    print(f"{'dtype':9}{'requests':>9}{'query':>7}{'context':>9}{'torch':>18}{'cpu':>18}{'dense':>18}{'torch/cpu':>11}")
    for dtype in (getattr(torch, name) for name in options.dtype):
        for one in options.shapes or SHAPES:
            if options.quick and (one.requests > 16 or one.context > 1024):
                continue
            seconds = measure(one, dtype, options.layout, options.rounds)
            cells = [f"{s * 1e6:9.0f} ({one.kv_bytes(dtype) / s / 1e9:5.1f})" for s in seconds.values()]
            kind = str(dtype).removeprefix("torch.")
            ratio = seconds["torch"] / seconds["cpu"]
            line = f"{kind:9}{one.requests:9}{one.query_len:7}{one.context:9}"
            print(line + "".join(f"{cell:>18}" for cell in cells) + f"{ratio:11.1f}", flush=True)


if __name__ == "__main__":
    main()
