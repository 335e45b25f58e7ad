"""Paged attention alone on a GPU: time of a decode step's kernel, and the share of copy bandwidth that it reaches.

    python benchmarks/attention_gpu.py [--backend triton] [--block-size 16] [--json out.json]

Requests of 2,048 tokens by default, 32 query and 8 KV heads of 128, bfloat16; caches of four layers in turn, so that
nothing is found in the L2 cache. Times are medians of replays of a captured graph of 20 calls.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch

from slotline.registry.contracts.attention import AttentionBatch, AttentionContext, AttentionLayer, KVCache
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.loading import resolve_factory

CALLS = 20


def context(layer: AttentionLayer, block_size: int, requests: int, length: int) -> AttentionContext:
    return AttentionContext(
        contract=1,
        layers=(layer,),
        device="cuda",
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_size=block_size,
        kernel_block_size=block_size,
        layout="NHD",
        max_query_len=length,
        max_requests=requests,
        max_tokens=8192,
        max_model_len=length,
    )


def batch(requests: int, query_len: int, length: int, block_size: int, num_blocks: int) -> AttentionBatch:
    """Requests of equal length over shuffled blocks."""
    width = -(-length // block_size)
    blocks = torch.randperm(num_blocks - 1)[: requests * width] + 1
    table = blocks.view(requests, width).int().cuda()
    starts, lens = np.arange(requests + 1, dtype=np.int32) * query_len, np.full(requests, length, np.int32)
    positions = torch.arange(length - query_len, length).repeat(requests).cuda()
    rows = torch.arange(requests).repeat_interleave(query_len).cuda()
    slots = table[rows, positions // block_size].long() * block_size + positions % block_size
    return AttentionBatch(
        num_requests=requests,
        num_tokens=requests * query_len,
        max_query_len=query_len,
        max_seq_len=length,
        query_start_loc=torch.from_numpy(starts).cuda(),
        seq_lens=torch.from_numpy(lens).cuda(),
        block_table=table,
        slot_mapping=slots,
        positions=positions,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
        num_decodes=requests if query_len == 1 else 0,
    )


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy of 4 GiB, read and write counted, best of ten."""
    source = torch.empty(2**31, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return max(2 * source.nbytes / elapsed(lambda: target.copy_(source)) for _ in range(10)) / 1e12


def elapsed(work: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(name: str, requests: int, query_len: int, length: int, block_size: int) -> dict[str, Any]:
    """Median seconds of one call, and the bytes of keys and values that it must read."""
    layer = AttentionLayer(
        name="layer", index=0, num_heads=32, num_kv_heads=8, head_size=128, head_size_v=128, scale=128**-0.5
    )
    num_blocks = requests * -(-length // block_size) + 1
    descriptor = PluginRegistry.discover(tolerant=True).load(Kind.ATTENTION, name)
    backend = resolve_factory(descriptor)(context(layer, block_size, requests, length))
    shape = (num_blocks, block_size, 8, 128)
    caches = [KVCache(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))) for _ in range(4)]
    plan = backend.plan(batch(requests, query_len, length, block_size, num_blocks))
    query = torch.randn(requests * query_len, 32, 128, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(requests * query_len, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)

    def call(index: int) -> None:
        backend.forward(layer, query, new, new, caches[index % 4], plan, out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(4):
            call(index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS):
            call(index)
    times = sorted(elapsed(graph.replay) / CALLS for _ in range(30))
    read = 2 * requests * length * 8 * 128 * 2
    return {"seconds": times[len(times) // 2], "bytes": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    limit = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy bandwidth {limit:.2f} TB/s; backend {arguments.backend}")
    figures = []
    for requests, query_len, length in ((64, 1, 2048), (1, 1, 2048), (256, 1, 512), (8, 1, 32768), (32, 5, 2048)):
        found = measure(arguments.backend, requests, query_len, length, arguments.block_size)
        rate = found["bytes"] / found["seconds"] / 1e12
        figures.append({"requests": requests, "query_len": query_len, "length": length, **found})
        print(
            f"{requests:4} requests x {query_len} query tokens, {length:6} keys: {found['seconds'] * 1e6:8.1f} us  "
            f"{rate:5.2f} TB/s  {rate / limit:4.0%} of copy bandwidth"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"copy_tb_per_s": limit, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
