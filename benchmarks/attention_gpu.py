"""Paged attention alone on a GPU: time of one layer's call by backend, and the share of the card's limits it reaches.

    python benchmarks/attention_gpu.py [--backend triton --backend flashinfer] [--kv-dtype float8_e4m3fn] [--json FILE]
    python benchmarks/attention_gpu.py --cascade

32 query and 8 KV heads of 128, bfloat16, pages of 16 tokens or the smallest that the backend takes; caches of four
layers in turn, so that nothing is found in the L2 cache. Times are medians of replays of a captured graph of 20 calls;
of 20 eager calls, which is marked, where the backend declares no capture for such a batch, and of prompts, whose
attention runs between the graphs. `nano` is the batch of that workload at a step, the longest first, as the scheduler
has it; `tree` requests verify one known token and a tree of drafts, `verify` ones a chain. `plan` is the host's time
for one step. Bytes are the keys and values that must be read, operations those of the two products under the mask.
`--cascade` compares requests that share a prefix with and without serving it apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from card_rates import measured_rates
from command_line import require_gpus

from slotline.cli.workloads import workload
from slotline.registry.capability import GraphSupport
from slotline.registry.contracts.attention import (
    AttentionBatch,
    AttentionContext,
    AttentionLayer,
    KVCache,
    KVScales,
    TreeMask,
)
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.loading import resolve_factory

SHORT = "--shape decode"
CALLS, ROUNDS = 20, 30
LONGEST_CAPTURED = 128
HEADS, KV_HEADS, SIZE = 32, 8, 128
LAYER = AttentionLayer(
    name="layer",
    index=0,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_size=SIZE,
    head_size_v=SIZE,
    scale=SIZE**-0.5,
)


class Shape(NamedTuple):
    """A batch: (query tokens, keys) of each request; the first `shared` keys are the same blocks for all.

    The last `nodes` query tokens of each are a tree's.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    shared: int = 0
    nodes: int = 0

    @property
    def level(self) -> GraphSupport:
        """The graph support that capturing it takes."""
        counts = {count for count, _ in self.requests}
        if counts == {1}:
            return GraphSupport.SINGLE_TOKEN
        return GraphSupport.UNIFORM if len(counts) == 1 else GraphSupport.ALWAYS

    @property
    def elements(self) -> int:
        return sum(length for _, length in self.requests) * 2 * KV_HEADS * SIZE

    @property
    def operations(self) -> int:
        return sum(4 * HEADS * SIZE * (count * length - count * (count - 1) // 2) for count, length in self.requests)


def nano(step: int) -> Shape:
    """The requests of the workload that are still running at a step of decoding."""
    work = workload("nano")
    lens = [len(p) + step for p, out in zip(work.waves[-1], work.max_tokens[-1], strict=True) if out > step]
    return Shape(f"nano {step}: {len(lens)} x {sum(lens) // len(lens):,}", tuple((1, n) for n in sorted(lens)[::-1]))


SHAPES = (
    Shape("decode 64 x 2,048", ((1, 2048),) * 64),
    Shape("decode 256 x 512", ((1, 512),) * 256),
    Shape("decode 8 x 32,768", ((1, 32768),) * 8),
    Shape("decode 1 x 2,048", ((1, 2048),)),
    Shape("verify 32 x 5 of 2,048", ((5, 2048),) * 32),
    *(
        Shape(f"{name} {count} x {1 + nodes} of 2,048", ((1 + nodes, 2048),) * count, nodes=nodes * (name == "tree"))
        for count, nodes in ((1, 16), (8, 16), (32, 16), (1, 63), (8, 63), (32, 63))
        for name in ("verify", "tree")
    ),
    Shape("prefill 1 x 8,192", ((8192, 8192),)),
    Shape("prefill 4 x 2,048", ((2048, 2048),) * 4),
    Shape("prefill 2 x 4,096", ((4096, 4096),) * 2),
    *(nano(step) for step in (60, 300, 500, 700, 800, 900, 960)),
    Shape("mixed 64 x 2,048, 1 x 2,048 new", (*((1, 2048),) * 64, (2048, 2048))),
)

SHARED = tuple(
    Shape(f"{requests} x {shared + 128:,}, {shared:,} shared", ((1, shared + 128),) * requests, shared)
    for requests, shared in (
        (8, 8192),
        (16, 1024),
        (16, 4096),
        (32, 512),
        (64, 512),
        (64, 1024),
        (64, 2048),
        (64, 8192),
        (256, 1024),
    )
)


def context(shape: Shape, block_size: int, kv_dtype: str) -> AttentionContext:
    half = {0: KVScales(*(torch.tensor(0.5, device="cuda") for _ in range(2)))}
    return AttentionContext(
        contract=1,
        layers=(LAYER,),
        device="cuda",
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        kv_scales={} if kv_dtype == "bfloat16" else half,
        block_size=block_size,
        kernel_block_size=block_size,
        layout="NHD",
        max_query_len=max(count for count, _ in shape.requests),
        max_requests=len(shape.requests),
        max_tokens=8192,
        max_model_len=max(length for _, length in shape.requests),
    )


def batch(shape: Shape, block_size: int, *, apart: bool) -> tuple[AttentionBatch, int]:
    """The batch over shuffled blocks, its prefix marked as common if `apart`, and how many blocks that takes."""
    counts, lens = (np.array(column, np.int32) for column in zip(*shape.requests, strict=True))
    widths = -(-lens // block_size)
    blocks = torch.randperm(int(widths.sum())).int() + 1
    table = torch.zeros(len(lens), int(widths.max()), dtype=torch.int32)
    for row, part in enumerate(blocks.split(widths.tolist())):
        table[row, : len(part)] = part
    table[:, : shape.shared // block_size] = table[:1, : shape.shared // block_size]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = np.repeat(np.arange(len(lens)), counts)
    positions = torch.from_numpy(np.arange(starts[-1]) - starts[rows] + (lens - counts)[rows]).long()
    slots = table[torch.from_numpy(rows), positions // block_size].long() * block_size + positions % block_size
    made = AttentionBatch(
        num_requests=len(lens),
        num_tokens=int(starts[-1]),
        max_query_len=int(counts.max()),
        max_seq_len=int(lens.max()),
        query_start_loc=torch.from_numpy(starts).cuda(),
        seq_lens=torch.from_numpy(lens).cuda(),
        block_table=table.cuda(),
        slot_mapping=slots.cuda(),
        positions=positions.cuda(),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        num_decodes=next((i for i, count in enumerate(counts) if count != 1), len(counts)),
        common_prefix_len=shape.shared if apart else 0,
        common_prefix=torch.tensor([shape.shared], dtype=torch.int32, device="cuda") if apart else None,
        tree=tree(shape.nodes, len(lens)) if shape.nodes else None,
    )
    return made, int(widths.sum()) + 1


def tree(nodes: int, requests: int) -> TreeMask:
    """Every node but the last ones has two behind it."""
    sees = torch.eye(nodes, dtype=torch.bool)
    for node in range(2, nodes):
        sees[node] |= sees[(node - 2) // 2]
    return TreeMask(sees.cuda(), (sees.sum(1) - 1).cuda(), np.full(requests, nodes, np.int32))


def elapsed(work: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end) / 1e3)


def measure(name: str, shape: Shape, kv_dtype: str = "bfloat16", *, apart: bool = False) -> dict[str, Any]:
    """Median seconds of one call and of one plan."""
    descriptor = PluginRegistry.discover(tolerant=True).load(Kind.ATTENTION, name)
    offer = descriptor.capabilities
    block_size = next(size for size in (16, 32, 64, 128, 256) if offer.kernel_block_sizes.refusal(size) is None)
    backend = resolve_factory(descriptor)(context(shape, block_size, kv_dtype))
    made, num_blocks = batch(shape, block_size, apart=apart)
    pages = (num_blocks, block_size, KV_HEADS, SIZE)
    dtype = getattr(torch, kv_dtype)
    caches = [
        KVCache(*(torch.randn(pages, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)))
        for _ in range(4)
    ]
    plan = backend.plan(made)
    query = torch.randn(made.num_tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(made.num_tokens, KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)

    def calls() -> None:
        for index in range(CALLS):
            backend.forward(LAYER, query, new, new, caches[index % 4], plan, out)

    captured = offer.graphs.refusal(shape.level) is None and made.max_query_len <= LONGEST_CAPTURED
    work = graph_of(calls) if captured else calls
    work()
    rounds = ROUNDS if captured else ROUNDS // 3
    times = sorted(elapsed(work) / CALLS for _ in range(rounds))
    return {
        "backend": name,
        "shape": shape.name,
        "block_size": block_size,
        "captured": captured,
        "seconds": times[len(times) // 2],
        "plan_seconds": host_time(lambda: backend.plan(made)),
        "bytes": shape.elements * dtype.itemsize,
        "operations": shape.operations,
    }


def graph_of(calls: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def host_time(work: Callable[[], Any]) -> float:
    """Median seconds of a call on the host, with the device idle."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def cascade(names: list[str], kv_dtype: str) -> None:
    """Time with and without serving a common prefix apart; 128 tokens are each request's own."""
    for shape in SHARED:
        for name in names:
            without, apart = (measure(name, shape, kv_dtype, apart=flag)["seconds"] for flag in (False, True))
            print(
                f"{shape.name:32} {name:12} {without * 1e6:9.1f} us, apart {apart * 1e6:9.1f} us, "
                f"{without / apart:5.2f} times",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="repeatable; triton by default")
    parser.add_argument("--shape", default="", help="shapes whose name begins so")
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--cascade", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    require_gpus()
    if arguments.cascade:
        cascade(arguments.backend or ["triton"], arguments.kv_dtype)
        return
    limit = measured_rates().bandwidth / 1e12
    print(f"{torch.cuda.get_device_name()}, copy bandwidth {limit:.2f} TB/s")
    figures = []
    for shape in (shape for shape in SHAPES if shape.name.startswith(arguments.shape)):
        for name in arguments.backend or ["triton"]:
            found = measure(name, shape, arguments.kv_dtype)
            torch.cuda.empty_cache()
            figures.append(found)
            rate, flops = found["bytes"] / found["seconds"] / 1e12, found["operations"] / found["seconds"] / 1e12
            print(
                f"{shape.name:32} {name:12} {found['seconds'] * 1e6:9.1f} us  {rate:5.2f} TB/s {rate / limit:4.0%}  "
                f"{flops:6.1f} TFLOP/s  plan {found['plan_seconds'] * 1e6:6.0f} us"
                + ("" if found["captured"] else "  (eager)"),
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"copy_tb_per_s": limit, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
